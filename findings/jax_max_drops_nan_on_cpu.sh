#!/usr/bin/env bash
# JAX 0.10.2 on CPUs: `jnp.max` and `lax.pmax` lose a NaN, depending on size and devices.
#
# Surprise: the max of a float32 array of 4,095 entries with one NaN is NaN, and of 4,096
#   entries it is the largest number. From there on XLA hands the reduction to a library
#   (`__ynn_fusion` in the compiled program). Between devices, `lax.pmax` loses a NaN at
#   any size. So `isfinite(max(abs(x)))` says True for an array with a NaN.
# Why one would guess otherwise: NumPy, small arrays, bfloat16, `jnp.argmax`, and `pmax`
#   under `vmap` all propagate NaN. A unit test on a small array, or on replicas that
#   vmap simulates, therefore passes. A report on TensorFlow even names JAX on CPUs as the
#   one that propagates it.
# Seen with: jax and jaxlib 0.10.2, x86-64.
# Source: https://github.com/tensorflow/tensorflow/issues/116992 (TensorFlow's case, which
#   compares it with JAX), https://github.com/openxla/xla/issues/21461 (an older case).
# Instead: test with `jnp.all(jnp.isfinite(x))`, or look at a sum, which keeps a NaN.
#   Between devices, sum a flag: `lax.psum(~jnp.isfinite(x), axis)`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2

venv/bin/python - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

print("jax", jax.__version__)
P = jax.P
mesh = jax.make_mesh((2,), ("r",), axis_types=(jax.sharding.AxisType.Auto,))


def with_nan(size, place=0):
    x = np.ones(size, np.float32)
    x[place] = np.nan
    return x


def over_devices(f):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("r"), out_specs=P()))


def is_nan(x):
    return bool(np.isnan(np.asarray(x, np.float32)).all())


of_two = np.array([np.nan, 1], np.float32)
seen = {
    "jnp.max of 4,095": is_nan(jnp.max(with_nan(4095))),
    "jnp.max of 4,096 bfloat16": is_nan(jnp.max(jnp.bfloat16(with_nan(4096)))),
    "jnp.argmax of 4,096 finds the place": int(jnp.argmax(with_nan(4096, 7))) == 7,
    "jnp.sum of 4,096": is_nan(jnp.sum(with_nan(4096))),
    "lax.pmax of 2 replicas under vmap": is_nan(
        jax.vmap(lambda x: jax.lax.pmax(x, "r"), axis_name="r")(of_two)
    ),
    "lax.psum of 2 devices": is_nan(over_devices(lambda x: jax.lax.psum(x, "r"))(of_two)),
}
lost = {
    "jnp.max of 4,096": is_nan(jnp.max(with_nan(4096))),
    "jnp.max of 4,096, NaN last": is_nan(jnp.max(with_nan(4096, -1))),
    "jnp.max of 64 x 64": is_nan(jnp.max(with_nan(4096).reshape(64, 64))),
    "jnp.min of 4,096": is_nan(jnp.min(with_nan(4096))),
    "lax.pmax of 2 devices": is_nan(over_devices(lambda x: jax.lax.pmax(x, "r"))(of_two)),
    "jnp.max over 2 devices of 8": is_nan(
        jnp.max(jax.device_put(with_nan(8), jax.NamedSharding(mesh, P("r"))))
    ),
}
for name, kept in {**seen, **lost}.items():
    print(f"  {name:38} expected: NaN is seen   seen: {'NaN' if kept else 'no NaN'}")
finite = jax.jit(lambda x: jnp.isfinite(jnp.max(jnp.abs(x))))(with_nan(10_000))
print(f"  isfinite(max(abs(x))) of 10,000         expected: False   seen: {finite}")
program = jax.jit(jnp.max).lower(with_nan(4096)).compile().as_text()
assert all(seen.values()), "FAILED: one that showed the NaN no longer does"
assert not any(lost.values()), "FAILED: one that lost the NaN shows it now"
assert bool(finite), "FAILED: the test for finite numbers sees the NaN now"
assert "__ynn_fusion" in program, "FAILED: XLA no longer uses the library"
print("As stated: whether the NaN is seen depends on the size and on the devices.")
PY
