#!/usr/bin/env bash
# JAX 0.10.2: a gradient whose type says that it is not summed yet has been summed already.
#
# Surprise: the gradient with respect to params cast to `reduced={"data"}` is `unreduced`:
#   each device holds the part of its own rows, and nothing was communicated. If the model
#   casts such a param back by `jax.reshard(w, jax.P())`, the gradient has the same type and
#   the same sum, but an all-reduce has run: the first device holds all, the others zeros.
# Why one would guess otherwise: both are `f32[1,1]{U:data}`, and the reshard moves no data.
# Seen with: jax 0.10.2, and 0.12.0.1 with Python 3.13.
# Source: https://docs.jax.dev/en/latest/notebooks/explicit-sharding.html
# Instead: jnp.broadcast_to(w, shape, out_sharding=jax.P("data")) from 0.12 on, for biases;
#   products take reduced arrays as they are.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
export JAX_PLATFORMS=cpu

venv/bin/python - <<'PY'
import re

import jax
import jax.numpy as jnp

jax.config.update("jax_num_cpu_devices", 4)
print("jax", jax.__version__)
mesh = jax.make_mesh((4,), ("data",))
jax.set_mesh(mesh)
rows = jax.device_put(jnp.arange(1.0, 5.0).reshape(4, 1), jax.P("data"))


def look(loss):
    """Return the type of a gradient, the collectives that made it, and its parts."""

    def grad(w, rows):
        w = jax.reshard(w, jax.P(reduced=frozenset({"data"})))
        return jax.grad(loss)(w, rows)

    w = jnp.ones((1, 1))
    compiled = jax.jit(grad).lower(w, rows).compile()
    gradient = compiled(w, rows)
    parts = [shard.data.item() for shard in gradient.addressable_shards]
    return str(jax.typeof(gradient)), re.findall(r"all-\w+(?=\()", compiled.as_text()), parts


plain = look(lambda w, rows: jnp.sum(rows @ w))
cast = look(lambda w, rows: jnp.sum(rows @ jax.reshard(w, jax.P())))
print("  rows @ w:                       ", *plain)
print("  expected of rows @ reshard(w):  ", *plain)
print("  seen:                           ", *cast)
assert plain[1:] == ([], [1.0, 2.0, 3.0, 4.0])
assert cast[0] == plain[0], "FAILED: the types tell them apart now"
assert cast[1:] == (["all-reduce"], [10.0, 0.0, 0.0, 0.0]), "FAILED: the parts are each device's own now"
print("As stated: the gradient is typed as not summed, and is summed on the first device.")
PY
