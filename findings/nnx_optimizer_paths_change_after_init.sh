#!/usr/bin/env bash
# Flax 0.12.8: a rule by path sees other paths when nnx.Optimizer updates than at its init.
#
# Surprise: `nnx.Optimizer` hands variables to `tx.init`, whose paths end in `.value`, and
#   plain arrays to `tx.update`, whose paths do not. A mask or label such as
#   `path.endswith("['kernel']")` chooses nothing at init and the kernels afterwards: a
#   momentum in it fails in the first step, in words about sequences, and weight decay,
#   which keeps no state, works.
# Why one would guess otherwise: Optax calls a mask at init and at update to get the same
#   answer twice, and both trees are states of the same model.
# Seen with: flax 0.12.8, optax 0.2.8, jax 0.10.2.
# Source: https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/training/optimizer.html
# Instead: let the rule look at the path without a `.value` at its end.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    flax==0.12.8 optax==0.2.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
export JAX_PLATFORMS=cpu

venv/bin/python - <<'PY'
import flax
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

print("flax", flax.__version__, "optax", optax.__version__, "jax", jax.__version__)


def paths(tree):
    return [keystr(path) for path, _ in tree_leaves_with_path(tree)]


def step(tx):
    """Return how far one step moves the kernel, or the error."""
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer, before = nnx.Optimizer(model, tx, wrt=nnx.Param), model.kernel[...]
    grads = nnx.grad(lambda model: jnp.sum(model(jnp.ones((1, 2)))))(model)
    try:
        optimizer.update(model, grads)
    except TypeError as error:
        return str(error)
    return float(jnp.abs(model.kernel[...] - before).max())


seen = {}
look = optax.GradientTransformation(
    lambda params: seen.update(init=paths(params)) or (),
    lambda updates, state, params: seen.update(update=paths(updates)) or (updates, state),
)
step(look)
print("  paths at init:  ", *seen["init"])
print("  paths at update:", *seen["update"])


def of_kernels(end):
    def mask(tree):
        return tree_map_with_path(lambda path, _: keystr(path).removesuffix(end).endswith("['kernel']"), tree)

    return lambda inner: optax.chain(optax.masked(inner, mask), optax.sgd(1.0))


found = step(of_kernels("")(optax.trace(0.9)))
print("  expected: momentum of kernels alone, in the first step as in later ones")
print("  seen:    ", found)
print("  without .value at the end of the path:", step(of_kernels(".value")(optax.trace(0.9))))
assert seen["init"] == [x + ".value" for x in seen["update"]], "FAILED: the paths are alike now"
assert isinstance(found, str), "FAILED: the momentum works now"
assert step(of_kernels("")(optax.add_decayed_weights(0.1))) > 0
assert step(of_kernels(".value")(optax.trace(0.9))) == 1.0
print("As stated: nnx.Optimizer shows Optax other paths at update than at init.")
PY
