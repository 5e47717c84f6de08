"""A GPT that the compiler shards within a replica, and what its collectives carry.

Replicas lie along "dcn", and the devices of a replica along "fsdp" and "tp".
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from common.journal import Line

import gravac_jax as gravac
from programs import gpt
from programs.reading import Program, bytes_of, groups

AXES = ("dcn", "fsdp", "tp")
# In place of a method, steps by a plain jit: of all devices, and of one replica's.
JIT, ALONE = "jit", "alone"
REPLICAS = 2
SPECS = {  # by the name of a layer: of its kernel or table, and of its bias
    "embed": (jax.P("tp"), None),
    "qkv": (jax.P("fsdp", "tp"), jax.P("tp")),
    "mix": (jax.P("tp", "fsdp"), jax.P("fsdp")),
    "inner": (jax.P("fsdp", "tp"), jax.P("tp")),
    "outer": (jax.P("tp", "fsdp"), jax.P("fsdp")),
}


def mesh_of(devices: Any) -> jax.sharding.Mesh:
    """Return a mesh of `AXES` for devices `[replicas, fsdp, tp]`."""
    return jax.sharding.Mesh(
        devices, AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3
    )


def spec_of(path: Any, x: Any) -> jax.P:
    """Return along which axes a param of the GPT is sharded."""
    layer = getattr(path[-2], "key", "")
    kernel, bias = SPECS.get(layer, (jax.P(), jax.P()))
    return kernel if x.ndim == 2 else bias or jax.P()


def lowered(method: str, millions: int, mesh: jax.sharding.Mesh, rows: int) -> Any:
    """Return a method's step, lowered for the devices of `mesh`.

    Args:
      method: Of training/methods.py, or `JIT` or `ALONE`.
      millions: As for `gpt.step`.
      mesh: Of `mesh_of`; of one replica for `ALONE`.
      rows: Windows of each device along the axes of the batch.
    """
    lies = lambda spec: jax.NamedSharding(mesh, spec)
    tokens = jax.ShapeDtypeStruct(
        (rows * mesh.shape["dcn"] * mesh.shape["fsdp"], gpt.LENGTH),
        jnp.int32,
        sharding=lies(jax.P(("dcn", "fsdp"))),
    )
    model = gpt.model(millions)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)
    specs = jax.tree_util.tree_map_with_path(spec_of, shapes)
    shardings = jax.tree.map(lies, specs)
    if method in (JIT, ALONE):
        tx, take = _plain(model)
    else:
        step = gpt.step(method, millions, None, "dcn", shardings)
        tx, take = step.tx, gravac.data_parallel(step.take, mesh, "dcn")
    opt_state = jax.eval_shape(tx.init, shapes)
    is_like_params = lambda x: jax.tree.structure(x) == jax.tree.structure(shapes)

    def of_state(x: Any, spec: Any) -> Any:
        if is_like_params(x):
            return shardings
        return lies(jax.P(AXES) if spec == jax.P("dcn") else jax.P())

    of_states = jax.tree.map(
        of_state,
        opt_state,
        gravac.state_specs(opt_state, "dcn"),
        is_leaf=is_like_params,
    )
    out = (shardings, of_states)
    state = jax.tree.map(
        lambda x, y: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=y),
        (shapes, opt_state),
        out,
    )
    jitted = jax.jit(take, out_shardings=(*out, None), donate_argnums=(0, 1))
    return jitted.lower(*state, tokens)


def _plain(model: Any) -> tuple[Any, Any]:
    """Return Adam, and a train step as a plain jit takes it."""
    tx = optax.adam(1e-3)

    def take(params: Any, opt_state: Any, tokens: jax.Array) -> Any:
        loss_fn = lambda params: gpt.mean_loss(model.apply(params, tokens), tokens)
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return tx, take


def counted(program: Program, inner_devices: int) -> dict[str, list[Line]]:
    """Return the collectives over "dcn" and those within replicas, alike ones counted.

    Args:
      program: A compiled step.
      inner_devices: Devices of a replica.

    Returns:
      Lists under "across" and "within": `kind`, `dtypes`, how many there are (`count`),
      what one device puts into all of them and into the largest (`bytes`, `largest`).
    """
    found: dict[str, dict[Any, list[int]]] = {"across": {}, "within": {}}
    for x, shapes in program.puts():
        crosses = any(len({y // inner_devices for y in z}) > 1 for z in groups(x.rest))
        dtypes = "+".join(sorted({y.partition("[")[0].strip("(") for y in shapes}))
        where = found["across" if crosses else "within"]
        where.setdefault((x.collective, dtypes), []).append(sum(map(bytes_of, shapes)))
    return {
        where: [
            {
                "kind": kind,
                "dtypes": dtypes,
                "count": len(sizes),
                "bytes": sum(sizes),
                "largest": max(sizes),
            }
            for (kind, dtypes), sizes in sorted(alike.items())
        ]
        for where, alike in found.items()
    }
