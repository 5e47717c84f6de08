#!/usr/bin/env bash
# Optax 0.2.8: the global norm of many bfloat16 leaves stops growing.
#
# Surprise: `optax.global_norm` of 1,000 bfloat16 leaves of norm 1 is 16, not 31.6, and
#   `optax.clip_by_global_norm(1)` lets through gradients of norm 2. The squared norms of
#   the leaves are added up one leaf after the other in bfloat16, and 256 + 1 is 256.
# Why one would guess otherwise: `jnp.sum` of one bfloat16 array adds up in float32, so the
#   norm of each leaf is right, and so is the norm of the same entries in one leaf. The
#   error depends on the number of leaves, not of entries: a model of 60 layers shows it
#   where one of 6 did not.
# Seen with: optax 0.2.8, jax 0.10.2.
# Source: https://github.com/AI-Hypercomputer/maxtext/pull/5143 (a trainer that clips with
#   a norm in float32 of its own, because Optax's is in the dtype of the gradients).
# Instead: cast the gradients to float32 before what clips or reports their norm.
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
LEAVES, ENTRIES = 1000, 16
leaves = [jnp.full(ENTRIES, 1 / ENTRIES**0.5, jnp.bfloat16) for _ in range(LEAVES)]
one_leaf = [jnp.concatenate(leaves)]
in_float32 = [x.astype(jnp.float32) for x in leaves]


def true_norm(leaves):
    return np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in leaves))


norms = {
    f"{LEAVES} leaves, bfloat16": float(optax.global_norm(leaves)),
    "the same entries in one leaf": float(optax.global_norm(one_leaf)),
    f"{LEAVES} leaves, float32": float(optax.global_norm(in_float32)),
}
for name, norm in norms.items():
    print(f"  norm of {name:28} expected: {true_norm(leaves):.2f}   seen: {norm:.2f}")
clip = optax.clip_by_global_norm(1.0)
clipped = true_norm(clip.update(leaves, clip.init(leaves))[0])
print(f"  norm after clip_by_global_norm(1.0)  expected: 1.00   seen: {clipped:.2f}")
stuck, whole, wide = norms.values()
assert stuck == 16, "FAILED: the norm of many bfloat16 leaves is no longer 16"
assert abs(whole - true_norm(leaves)) < 0.3, "FAILED: the norm of one leaf is wrong"
assert abs(wide - true_norm(leaves)) < 0.01, "FAILED: the norm in float32 is wrong"
assert clipped > 1.9, "FAILED: clip_by_global_norm clips to the right norm now"
print("As stated: the norm stops at 16, and clipping to 1 leaves a norm of 2.")
PY
