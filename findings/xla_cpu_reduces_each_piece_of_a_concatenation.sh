#!/usr/bin/env bash
# jax 0.10.2, CPU: two reductions of one concatenated vector compile for a minute.
#
# Surprise: the largest minus the smallest entry of 800 arrays joined by `jnp.concatenate`
#   compiles for over 20 s of CPU, and of 200 arrays in half a second: XLA reduces each array by
#   itself and puts all 1,600 results into one kernel, a chain of maxima and minima that the
#   compiler takes more than quadratic time for.
# Why one would guess otherwise: joining comes first in the program, so that one loop over one
#   vector is left; that is what `ravel_pytree` is for. One reduction alone costs a second more.
# Who meets it: whoever logs or bounds the range of all gradients, or asks of a flat gradient at
#   once whether it is finite and within bounds; models with many small leaves, under `vmap`.
# Seen with: jax and jaxlib 0.10.2.
# Source: https://docs.jax.dev/en/latest/_autosummary/jax.flatten_util.ravel_pytree.html
# Instead: `jax.lax.optimization_barrier` around the joined vector.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
export JAX_PLATFORMS=cpu

venv/bin/python - <<'PY'
import time

import jax
import jax.numpy as jnp
import numpy as np

print("jax", jax.__version__)


def compiled(pieces, is_kept):
    """Return the maxima in the program of a range of rows, and its seconds of compiling."""
    leaves = [np.ones((4, 1 + i % 5), np.float32) for i in range(pieces)]

    def spread(leaves):
        rows = jnp.concatenate(leaves, axis=1)
        rows = jax.lax.optimization_barrier(rows) if is_kept else rows
        return jnp.max(rows, axis=1) - jnp.min(rows, axis=1)

    lowered, begin = jax.jit(spread).lower(leaves), time.process_time()
    program = lowered.compile()
    return program.as_text().count(" maximum("), time.process_time() - begin


for pieces in (200, 400, 800):
    (maxima, seconds), (kept, fewer) = (compiled(pieces, x) for x in (False, True))
    print(f"  {pieces} arrays: expected: a maximum or two in the program")
    print(f"    seen: {maxima}, compiled in {seconds:.1f} s; behind a barrier {kept}, {fewer:.1f} s")
    assert kept <= 4, "FAILED: the way out does not help"
    assert maxima > pieces, "FAILED: arrays are not reduced one by one"
print("As stated: each of the joined arrays is reduced by itself, all in one kernel.")
PY
