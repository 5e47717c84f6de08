#!/usr/bin/env bash
# JAX 0.10.2 on CPUs: collectives that only move bfloat16 send float32.
#
# Surprise: `all_gather`, `all_to_all` and `ppermute` of bfloat16 are compiled to
#   collectives of float32, twice the bytes. float8 is sent as float16 and int4 as int8.
#   float16, int16 and int8 are sent as they are.
# Why one would guess otherwise: most CPUs lack arithmetic in bfloat16, so a wider sum is
#   no surprise. But these three compute nothing, and float16, in which most CPUs lack
#   arithmetic too, is sent as it is. A test that counts bytes in the program compiled for
#   CPUs finds twice the bytes in bfloat16 that the code asks for.
# Seen with: jax and jaxlib 0.10.2.
# Source: https://github.com/openxla/xla/pull/4888 (the same question for float8 on GPUs: a
#   reviewer notes that collectives that only move data can send integers of that size).
# Instead: view the bits as integers of the same size, move these, and view them back:
#   `lax.bitcast_convert_type(x, jnp.uint16)`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2

venv/bin/python - <<'PY'
import re

import jax
import jax.numpy as jnp

print("jax", jax.__version__)
lax, P = jax.lax, jax.P
mesh = jax.make_mesh((2,), ("r",), axis_types=(jax.sharding.AxisType.Auto,))
MOVES = {
    "all-gather": (lambda x: lax.all_gather(x, "r"), P()),
    "all-to-all": (lambda x: lax.all_to_all(x.reshape(2, -1), "r", 0, 0), P("r")),
    "collective-permute": (lambda x: lax.ppermute(x, "r", [(0, 1), (1, 0)]), P("r")),
}


def as_bits(x):
    return lax.bitcast_convert_type(x, jnp.uint16)


def sent(name, dtype, view=lambda x: x):
    """Return the type of the operand of the collective in the compiled program."""
    move, out = MOVES[name]
    f = jax.shard_map(
        lambda x: move(view(x)), mesh=mesh, in_specs=P("r"), out_specs=out, check_vma=False
    )
    text = jax.jit(f).lower(jax.ShapeDtypeStruct((64,), dtype)).compile().as_text()
    (line,) = [x for x in text.splitlines() if re.search(rf" {name}\(", x)]
    return re.search(r"= \(?([a-z0-9]+)\[", line)[1]


asked = {
    "bfloat16": ("bf16", "f32"),
    "float8_e4m3fn": ("f8e4m3fn", "f16"),
    "int4": ("s4", "s8"),
    "float16": ("f16", "f16"),
    "int16": ("s16", "s16"),
    "int8": ("s8", "s8"),
}
for name in MOVES:
    for dtype, (expected, stated) in asked.items():
        found = sent(name, getattr(jnp, dtype))
        print(f"  {name:18} of {dtype:15} expected: {expected:8} seen: {found}")
        assert found == stated, f"FAILED: this is not {stated}, as the header states"
    found = sent(name, jnp.bfloat16, as_bits)
    print(f"  {name:18} of bfloat16's bits expected: u16      seen: {found}")
    assert found == "u16", "FAILED: the way out no longer sends 16 bits"
print("As stated: bfloat16 is moved as float32, and its bits as 16 bits.")
PY
