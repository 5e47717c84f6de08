#!/usr/bin/env bash
# libtpu 0.0.42: an all-gather of a vector becomes an all-reduce, unless 1,024 divides its size.
#
# Surprise: for 8 TPU v5e, `lax.all_gather` of 5,120 bfloat16 a device is compiled to an
#   all-gather, and of 5,000 to an all-reduce of 40,000 that are mostly zeros. A ring sends
#   about twice the bytes for an all-reduce as for an all-gather of the same result.
# Why one would guess otherwise: padding to a tile costs at most 1,023 entries, both sizes
#   fit the same collective, and the profile names the operation that JAX was asked for.
#   The shape decides, not the size: as one row [1, 5000] between barriers it stays an
#   all-gather. No TPU is needed to see this: libtpu compiles for a described topology.
# Seen with: libtpu 0.0.42, jax and jaxlib 0.10.2, on a machine without a TPU.
# Source: https://github.com/pytorch/xla/issues/3510 (all-gathers of vectors on TPUs, where
#   padding and a second dimension are advised).
# Instead: pad flat vectors to a multiple of 1,024, or gather rows as `of_row` below does.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 libtpu==0.0.42
export JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1

venv/bin/python - <<'PY'
import re
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

print("jax", jax.__version__, "libtpu", version("libtpu"))
lax, P = jax.lax, jax.P
devices = np.array(topologies.get_topology_desc("v5e:2x4", "tpu").devices)
mesh = jax.sharding.Mesh(devices, ("r",))


def of_vector(x):
    return lax.all_gather(x, "r")


def of_row(x):
    row = lax.optimization_barrier(x[None])
    return lax.optimization_barrier(lax.all_gather(row, "r", tiled=True))


def collectives(gather, size):
    """Return the collectives of the compiled program, each with its type and shape."""
    f = jax.shard_map(gather, mesh=mesh, in_specs=P("r"), out_specs=P(), check_vma=False)
    x = jax.ShapeDtypeStruct(
        (8 * size,), jnp.bfloat16, sharding=jax.NamedSharding(mesh, P("r"))
    )
    text = jax.jit(f).lower(x).compile().as_text()
    entry = text[text.index("ENTRY") :]
    found = re.findall(r"= \(?(\w+\[[\d,]*\])\S* (all-gather|all-reduce)(?:-start)?\(", entry)
    return [f"{operation} {shape}" for shape, operation in found]


for size in (4096, 5120, 4097, 5000, 100_000):
    vector, row = collectives(of_vector, size), collectives(of_row, size)
    print(f"  {size:7,} a device  expected: all-gather   seen: {vector}; as a row: {row}")
    stated = "all-reduce" if size % 1024 else "all-gather"
    assert [x.split()[0] for x in vector] == [stated], f"FAILED: not one {stated}"
    assert [x.split()[0] for x in row] == ["all-gather"], "FAILED: the way out does not help"
print("As stated: a vector whose size 1,024 does not divide is sent by an all-reduce.")
PY
