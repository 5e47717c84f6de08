#!/usr/bin/env bash
# JAX 0.10.2: after jax.set_mesh nothing can be computed from one shard of an array on that mesh.
#
# Surprise: with `shard = x.addressable_data(0)`, `shard + 1` raises "Received incompatible
#   devices for jitted computation". So does every operation on an array that was put on one
#   device of the mesh, though the mesh holds that device and all axes are Auto.
# Why one would guess otherwise: set_mesh is called for specs without a mesh; no operand here
#   has a spec, and without set_mesh the same line works.
# Seen with: jax 0.10.2, numpy 2.4.6.
# Source: https://docs.jax.dev/en/latest/jax.html#jax.set_mesh
# Instead: `with jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())):` around what reads
#   a process's own shards, such as metrics, or np.asarray(shard) first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
export JAX_PLATFORMS=cpu

venv/bin/python - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_num_cpu_devices", 4)
print("jax", jax.__version__)
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("data")))
shard = x.addressable_data(0)


def look():
    """Return one more than the shard, or the error."""
    try:
        return (shard + 1).tolist()
    except ValueError as error:
        return " ".join(str(error).split())[:57]


expected, no_mesh = look(), jax.sharding.Mesh(np.empty((), object), ())
jax.set_mesh(mesh)
seen = look()
with jax.set_mesh(no_mesh):
    around = look()
print("  expected of shard + 1:         ", expected)
print("  seen after jax.set_mesh:       ", seen)
print("  seen with a mesh of no devices:", around)
assert expected == around == [1.0, 2.0]
assert seen == "Received incompatible devices for jitted computation. Got", "FAILED: it computes now"
print("As stated: a shard of an array on the mesh is refused.")
PY
