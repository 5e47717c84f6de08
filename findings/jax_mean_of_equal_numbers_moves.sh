#!/usr/bin/env bash
# JAX 0.10.2: the mean of N equal numbers may be another number, also over replicas.
#
# Surprise: `jax.lax.pmean` of 1.0 over 41 replicas is 0.99999994, and so is
#   `jnp.mean(jnp.ones(41))`. XLA knows N, and multiplies by its reciprocal in place of
#   dividing: for 15 of the N up to 128, 41 the smallest, N * (1 / N) is not 1. Params
#   that replicas hold alike change by a rounding when they are averaged, and a count
#   that all agree on is one too small after `int(jax.lax.pmean(count))`.
# Why one would guess otherwise: the sum of 41 ones is exact, IEEE division of it by 41
#   is exact, NumPy says 1.0, and tests run on 2, 4 or 8 devices, where it is exact.
# Seen with: jax and jaxlib 0.10.2, x86-64. The program compiled for 41 devices has the
#   multiplication, too.
# Source: XLA's algebraic simplifier; https://github.com/jax-ml/jax/issues/2071 is an
#   early case of a constant divisor.
# Instead: round a mean that must be whole, take `jax.lax.pmin` of what is alike, or
#   divide by an N that the program does not know, such as an argument of the step.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=41

venv/bin/python - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

print("jax", jax.__version__)
mean = lambda x: jax.lax.pmean(x, "data")


def over(n):
    return jax.jit(jax.vmap(mean, axis_name="data", axis_size=n))


one = np.float32(1)
below = one - np.float32(2.0**-24)
moved = [n for n in range(2, 129) if over(n)(jnp.ones(n))[0] != one]
print("pmean of ones is not 1 over", moved, "replicas")
assert moved[0] == 41 and len(moved) == 15, "FAILED: other N move now"
of_jax = over(41)(jnp.ones(41))[0], jnp.mean(jnp.ones(41))
assert of_jax == (below, below), "FAILED: the mean of 41 ones is another one now"
assert np.mean(np.ones(41, np.float32)) == one, "FAILED: NumPy is not exact any more"
count = over(41)(jnp.full(41, 7.0))[0]
assert int(count) == 6, "FAILED: a count that all replicas agree on is whole now"

by = lambda x, n: jax.lax.psum(x, "data") / n
divided = jax.jit(jax.vmap(by, (0, None), axis_name="data"))
exact = divided(jnp.ones(41), jnp.float32(41))[0]
assert exact == one, "FAILED: an N that XLA does not know is not exact any more"

mesh = jax.make_mesh((41,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
step = jax.shard_map(mean, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
text = jax.jit(step).lower(jnp.ones(41)).compile().as_text()
assert "divide" not in text and "multiply" in text, "FAILED: 41 devices divide now"
print("As stated: the mean of equal numbers depends on how many they are.")
PY
