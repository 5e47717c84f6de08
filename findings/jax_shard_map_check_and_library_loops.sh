#!/usr/bin/env bash
# JAX 0.10.2: `jax.shard_map` refuses RNNs and CTC; the flag that lets them in moves gradients.
#
# Surprise: Flax's `nn.RNN`, `optax.ctc_loss`, JAX's own `odeint`, `bicgstab`, `betainc`
#   and `random.binomial` raise TypeError inside `jax.shard_map`: their loops begin with
#   zeros, which are the same on all devices, and end with values that are not. The error
#   asks the caller to change a carry that is inside the library. `check_vma=False` runs
#   them, but the flag is more than a check: without it `jax.grad` of replicated params
#   no longer adds up over devices, so the same step has gradients 1/N as large, or N
#   times as large where the code relied on the other.
# Why one would guess otherwise: these libraries run under jit, vmap and pmap, `cg` passes
#   where `bicgstab` does not, and a flag named "check" should not change a result.
# Seen with: jax 0.10.2, flax 0.12.8, optax 0.2.8.
# Source: https://docs.jax.dev/en/latest/notebooks/shard_map.html (scan, and gradients);
#   https://github.com/netket/netket/issues/2139 (a library that met the first half).
# Instead: hand the loop a first carry made from the data where the library takes one
#   (`initial_carry` of `nn.RNN`), or turn the check off and average gradients with
#   `lax.pmean`. With the check on, mark the params first:
#   `lax.pcast(params, axis, to="varying")`; then both ways give the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 optax==0.2.8 flax==0.12.8
export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2

venv/bin/python - <<'PY'
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.experimental.ode import odeint
from jax.scipy.sparse.linalg import bicgstab, cg
from jax.scipy.special import betainc

print("jax", jax.__version__, "flax", flax.__version__, "optax", optax.__version__)
P = jax.P
mesh = jax.make_mesh((2,), ("r",), axis_types=(jax.sharding.AxisType.Auto,))
key = jax.random.key(0)
rnn = nn.RNN(nn.OptimizedLSTMCell(8))
sequences = jnp.ones((4, 5, 8))
params = rnn.init(key, sequences)
labels, is_pad = jnp.ones((2, 3), jnp.int32), jnp.zeros((2, 3))


def double(v):
    return 2 * v


CALLS = {
    "flax.linen.RNN": lambda x: rnn.apply(params, x),
    "optax.ctc_loss": lambda x: optax.ctc_loss(x, jnp.zeros(x.shape[:2]), labels, is_pad),
    "odeint": lambda x: odeint(lambda y, t: -y, x[:, 0], jnp.linspace(0, 1, 3))[-1],
    "bicgstab": lambda x: bicgstab(double, x)[0],
    "betainc": lambda x: betainc(x, x, x / 2),
    "random.binomial": lambda x: jax.random.binomial(key, 5 * x, x / 2),
}
PASSES = {
    "cg": lambda x: cg(double, x)[0],
    "RNN, carry from data": lambda x: rnn.apply(
        params, x, initial_carry=(0 * x[:, 0], 0 * x[:, 0])
    ),
}


def on_devices(f, check, specs=P("r"), out=P("r")):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check))


def outcome(f, check):
    try:
        on_devices(f, check)(sequences)
    except TypeError as error:
        assert "equal types" in str(error) and "manual axis types" in str(error), error
        return "TypeError"
    return "runs"


for name, f in {**CALLS, **PASSES}.items():
    seen = outcome(f, True), outcome(f, False)
    print(f"  {name:21} expected: runs   seen: {seen[0]}; check_vma=False: {seen[1]}")
    stated = ("TypeError" if name in CALLS else "runs", "runs")
    assert seen == stated, f"FAILED: {name} is not {stated}, as the header states"


def gradient(check, mark):
    """Return the mean over devices of the gradient of the mean of (w x)^2 at 1."""

    def step(w, x):
        w = jax.lax.pcast(w, "r", to="varying") if mark else w
        return jax.lax.pmean(jax.grad(lambda w: jnp.mean((w * x) ** 2))(w), "r")

    step = on_devices(step, check, (P(), P("r")), P())
    return float(step(jnp.float32(1), jnp.ones(4)))


checked, unchecked, marked = gradient(True, False), gradient(False, False), gradient(True, True)
print("  pmean of a gradient over 2 devices  expected: 2 in each case")
print(f"  seen: {checked:g}; check_vma=False: {unchecked:g}; params marked as varying: {marked:g}")
assert (checked, unchecked, marked) == (4, 2, 2), "FAILED: not 4, 2 and 2"
print("As stated: the check stops loops of libraries, and it doubles this gradient.")
PY
