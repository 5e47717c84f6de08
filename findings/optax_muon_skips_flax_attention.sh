#!/usr/bin/env bash
# Optax 0.2.8 with Flax 0.12.8: Muon takes the biases of attention, and none of its kernels.
#
# Surprise: of `nn.MultiHeadDotProductAttention`, `optax.contrib.muon` updates by Adam all
#   four kernels, and orthogonalizes the biases of query, key and value.
# Why one would guess otherwise: attention's projections are the matrices for which Muon
#   is used, and biases are what everybody leaves to Adam. But Muon takes the leaves with
#   two dimensions, and Flax gives each head a dimension of its own: kernels are
#   [features, heads, size] or [heads, size, features], and biases [heads, size]. No
#   error or warning tells.
# Seen with: optax 0.2.8, flax 0.12.8, jax 0.10.2.
# Source: `muon_weight_dimension_numbers` in Optax's docs of Muon;
#   https://github.com/AI-Hypercomputer/maxtext/pull/2546 (a trainer that names the
#   dimensions of every kernel).
# Instead: name them, as below, and print which leaves have a momentum of Muon's.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 optax==0.2.8 flax==0.12.8
export JAX_PLATFORMS=cpu

venv/bin/python - <<'PY'
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

print("jax", jax.__version__, "optax", optax.__version__, "flax", flax.__version__)
model = nn.MultiHeadDotProductAttention(num_heads=4)
params = model.init(jax.random.key(0), jnp.ones((2, 8, 32)))["params"]
Dims = optax.contrib.MuonDimensionNumbers


def dims(params):
    """Return which dimensions of a kernel are the inputs, and which the outputs."""

    def of(path, leaf):
        layer, kind = (x.key for x in path)
        if kind == "bias":
            return None
        return Dims((0, 1), (2,)) if layer == "out" else Dims((0,), (1, 2))

    return jax.tree_util.tree_map_with_path(of, params)


def orthogonalized(tx):
    """Return the leaves that have Muon's momentum."""
    momentum = tx.init(params).inner_states["muon"].inner_state[0].mu
    leaves, _ = jax.tree_util.tree_flatten_with_path(momentum)
    return {"/".join(x.key for x in path) for path, _ in leaves}


layers = ("key", "out", "query", "value")
kernels = {f"{x}/kernel" for x in layers}
found = orthogonalized(optax.contrib.muon(0.02))
named = orthogonalized(optax.contrib.muon(0.02, muon_weight_dimension_numbers=dims))
for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
    print("  leaf", "/".join(x.key for x in path), leaf.shape)
print("  expected: Muon takes", sorted(kernels))
print("  seen:     Muon takes", sorted(found))
print("  with named dimensions:", sorted(named))
assert found == {"key/bias", "query/bias", "value/bias"}, "FAILED: Muon takes others now"
assert named == kernels, "FAILED: the way out no longer helps"
print("As stated: Muon takes three biases, and no kernel.")
PY
