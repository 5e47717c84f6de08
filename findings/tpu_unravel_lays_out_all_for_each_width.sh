#!/usr/bin/env bash
# libtpu 0.0.42: matrices cut from a flat vector lay out the whole vector, once for each width.
#
# Surprise: for a TPU v5e, `ravel_pytree`'s `unravel` of five matrices reshapes all of the vector
#   to [n / 256, 256], to [n / 512, 512], and so on, and cuts each matrix from a vector of its
#   own: 13 reads and writes an entry, in place of 7. It grows with the number of widths, not
#   with what is cut.
# Why one would guess otherwise: a slice comes before its reshape in the program, and is
#   contiguous; GPUs and CPUs copy it alone. XLA moves the reshape before the slice where the
#   width divides where the matrix begins and how long the vector is. No TPU is needed to see
#   this: libtpu compiles for a described topology.
# Who meets it: flat optimizers, buckets of gradients, and flat params, as of ZeRO.
# Seen with: libtpu 0.0.42.1, jax and jaxlib 0.10.2, on a machine without a TPU.
# Source: https://docs.jax.dev/en/latest/_autosummary/jax.flatten_util.ravel_pytree.html
# Instead: `jax.lax.optimization_barrier` between slice and reshape, as `behind_barriers` below;
#   it pays from three widths on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 libtpu==0.0.42.1
export JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1

venv/bin/python - <<'PY'
import re
from importlib.metadata import version

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.flatten_util import ravel_pytree

print("jax", jax.__version__, "libtpu", version("libtpu"))
devices = topologies.get_topology_desc("v5e:2x2", "tpu").devices
everywhere = jax.NamedSharding(jax.sharding.Mesh(devices, ("x",)), jax.P())


def cut_by(widths):
    """Return two ways to cut a vector into matrices, and the entries of the vector."""
    matrices = [jnp.zeros((1024, width)) for width in widths]
    flat, unravel = ravel_pytree(matrices)

    def behind_barriers(vector):
        ends = [1024 * sum(widths[: i + 1]) for i in range(len(widths))]
        parts = map(jax.lax.optimization_barrier, jnp.split(vector, ends)[:-1])
        return [x.reshape(y.shape) for x, y in zip(parts, matrices)]

    return unravel, behind_barriers, flat.size


def program_of(cut, n):
    """Return how often the whole vector is reshaped, and the bytes moved per entry."""
    doubled = lambda vector: [2 * x for x in cut(vector)]
    jitted = jax.jit(doubled, in_shardings=everywhere, out_shardings=everywhere)
    compiled = jitted.lower(jax.ShapeDtypeStruct((n,), jnp.float32)).compile()
    text = compiled.as_text()
    shapes = re.findall(r"= f32\[(\d+),(\d+)\]\S* reshape\(", text[text.index("ENTRY") :])
    whole = sum(int(rows) * int(columns) == n for rows, columns in shapes)
    return whole, compiled.cost_analysis()["bytes accessed"] / 4 / n


for widths in ([256, 512], [128, 256, 512, 1024, 2048]):
    *ways, n = cut_by(widths)
    (whole, moved), (none, fewer) = (program_of(cut, n) for cut in ways)
    print(f"  widths {widths}: expected: 0 reshapes of the whole vector")
    print(f"    seen: {whole}, {moved:.1f} reads and writes an entry; barriers: {none}, {fewer:.1f}")
    assert none == 0, "FAILED: the way out does not help"
    assert whole == len(widths) - 1, "FAILED: not one for each width but the first"
assert moved > 1.5 * fewer, "FAILED: it costs little"
print("As stated: the whole vector is laid out anew for each width.")
PY
