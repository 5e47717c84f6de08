#!/usr/bin/env bash
# Optax 0.2.8: `inject_hyperparams(adamw)` of bfloat16 params makes every update NaN.
#
# Surprise: `optax.adamw(1e-2)` trains bfloat16 params, and the same optimizer under
#   `optax.inject_hyperparams` returns NaN from the first step on. The wrapper casts all
#   float hyperparameters to the dtype of the params, and 0.999, the decay of the second
#   moment, is 1 in bfloat16: the second moment stays 0, and so does its bias correction.
# Why one would guess otherwise: the wrapper is there to change the learning rate while
#   training, and should change nothing else. The caller names only the learning rate,
#   which the cast barely changes.
# Seen with: optax 0.2.8, jax 0.10.2.
# Source: https://github.com/google-deepmind/optax/issues/1414
# Instead: `optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 optax==0.2.8
export JAX_PLATFORMS=cpu

venv/bin/python - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np
import optax

print("jax", jax.__version__, "optax", optax.__version__)
params = {"w": jnp.ones(3, jnp.bfloat16)}
grads = {"w": jnp.array([1, -2, 0.5], jnp.bfloat16)}


def first_update(tx):
    updates, state = tx.update(grads, tx.init(params), params)
    return np.asarray(updates["w"], np.float32), state


inject = optax.inject_hyperparams
plain, _ = first_update(optax.adamw(1e-2))
wrapped, state = first_update(inject(optax.adamw)(1e-2))
in_float32, _ = first_update(inject(optax.adamw, hyperparam_dtype=jnp.float32)(1e-2))
print("  expected: the update of optax.adamw,", plain)
print("  seen:     ", wrapped, "with b2 =", state.hyperparams["b2"])
print("  with hyperparam_dtype=jnp.float32:", in_float32)
assert np.isfinite(plain).all() and (plain != 0).all(), "FAILED: the plain update is wrong"
assert float(state.hyperparams["b2"]) == 1, "FAILED: b2 is no longer 1"
assert np.isnan(wrapped).all(), "FAILED: the update under the wrapper is a number now"
assert np.allclose(in_float32, plain, rtol=1e-2), "FAILED: the way out no longer helps"
print("As stated: inject_hyperparams rounds b2 to 1, and the updates are NaN.")
PY
