"""The format of checkpoints, version 8: training state as named arrays.

Every leaf is stored as it is, under the names on the way to it. Only the state of
`gravac.transform` is stored in another form. Below its place in the tree it has

    version                        8
    replicas                       N
    steps, decided, ahead, ...        the fields that are the same on all replicas
    replica                        `[N]`
    memory/residual/dense/kernel   `[replicas, *shape]`, one array for each leaf
    memory/optimizer/count         `[N]`, numbers that the memory keeps
    memory/optimizer/mu/['kernel'] `[N, ...]`, what an optimizer keeps by leaf
    told/bad                       `[N]`, with a delay
    encodings/0/TopK/threshold     `[N, ...]`, the state of an encoding, of bucket 0
"""

from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _state
from gravac_jax._state import TransformState, is_transform_state
from gravac_jax.checkpoint import _paths
from gravac_jax.checkpoint._leaves import Layout, layout_of
from gravac_jax.checkpoint._paths import Named, Path

VERSION = 8


def to_named(tree: Any, params: Any) -> Named:
    """Return what a checkpoint stores of `tree`.

    Args:
      tree: training state, with the state of `gravac.transform` in it.
      params: the params that the state was made for.

    Raises:
      ValueError: if the state was made for other params, is not as `gravac.place` makes
        it, or was taken apart; if Orbax would give two leaves the same name.
    """
    if _state.locals_of(params):
        raise ValueError(
            "`params` holds the state of gravac.transform, which belongs into `tree`:"
            " write save(step, (params, opt_state), params), and restore((params,"
            " opt_state), params)."
        )
    if len(_state.locals_of(tree)) != len(_state.transform_states(tree)):
        raise ValueError(
            "nnx.split took the state in `tree` apart: pass the nnx.Optimizer itself."
        )
    named: Named = {}
    for path, x in _paths.by_path(tree, is_transform_state).items():
        stored = _stored(x, params) if is_transform_state(x) else {(): x}
        named |= {path + name: array for name, array in stored.items()}
    dotted = list(map(".".join, named))
    if twice := {name for name in dotted if not name or dotted.count(name) > 1}:
        raise ValueError(
            f"leaves of `tree` have no name, or the same one with dots between its"
            f" parts: {twice}. Rename them, or put a single array into a dict."
        )
    # Orbax refuses arrays without entries.
    return {path: x for path, x in named.items() if 0 not in _paths.shape_of(x)}


def from_named(named: Named, tree: Any, params: Any) -> Any:
    """Undo `to_named`: return `tree` with the arrays in `named`, in memory of its own.

    Args:
      named: arrays by path, in the shapes that `to_named` returns for `tree`. Leaves
        without an array keep their values.
      tree: training state. It stays as it is.
      params: as for `to_named`.
    """

    def value(path: Path, x: Any) -> Any:
        if is_transform_state(x):
            return _filled(x, params, _paths.below(named, path))
        is_kept = path not in named and isinstance(x, jax.Array)
        return _copy_like(x, x) if is_kept else named.get(path, x)

    return _paths.map_by_path(value, tree, is_transform_state)


def _stored(state: TransformState, params: Any) -> Named:
    layout = layout_of(state, params)
    named, vectors = _parts(state, layout)
    for name, buckets in vectors.items():
        arrays = zip(layout.leaves, layout.split(buckets), strict=True)
        named |= {name + leaf.path: x for leaf, x in arrays}
    return named


def _filled(state: TransformState, params: Any, named: Named) -> TransformState:
    layout = layout_of(state, params)
    plain, vectors = _parts(state, layout)
    joined = {}
    for name, buckets in vectors.items():
        if arrays := _paths.below(named, name):
            ordered = [arrays[leaf.path] for leaf in layout.leaves]
            joined[name] = layout.join(ordered, tuple(x.shape[1] for x in buckets))

    def value(path: Path, x: jax.Array) -> jax.Array:
        name = _stored_name(path)
        return joined[name][int(path[2])] if name in joined else named.get(name, x)

    filled = _paths.map_by_path(value, state)
    if named.get(("replicas",)) not in (None, plain["replicas",]):
        # Some of what a controller knows is not true on other devices.
        can_move = lambda x: hasattr(x, "moved")
        move = lambda x, fresh: x.moved(fresh) if can_move(x) else x
        args = filled.controller, state.controller
        filled = filled._replace(controller=jax.tree.map(move, *args, is_leaf=can_move))
    return jax.tree.map(_copy_like, filled, state)


def _parts(
    state: TransformState, layout: Layout
) -> tuple[Named, dict[Path, list[jax.Array]]]:
    """Return what is stored as it is, and the memory's vectors of all buckets.

    Both are by their stored names. Per-replica state is `[N, ...]`, on the layout's
    mesh.
    """
    local, replicas = state.local, _state.placed_replicas(state.local)
    if replicas is None:
        local = jax.tree.map(lambda x: jnp.asarray(x)[None], local)
    by_device = jax.NamedSharding(layout.mesh, layout.spec)
    placed = state._replace(local=jax.device_put(local, by_device))
    plain: Named = {("version",): VERSION, ("replicas",): replicas or 1}
    vectors: dict[Path, list[jax.Array]] = {}
    for path, x in _paths.by_path(placed).items():
        name = _stored_name(path)
        if name[0] == "memory" and x.ndim > 1 and layout.leaves:
            vectors.setdefault(name, []).append(x)
        elif name[0] != "layout":
            plain.setdefault(name, x)  # every bucket has the same
    for name in [name for name, x in vectors.items() if not _are_vectors(x, vectors)]:
        plain[name] = vectors.pop(name)[0]  # of a leaf, or the same in every bucket
    return plain, vectors


def _are_vectors(arrays: list[jax.Array], all_of: dict[Path, list[jax.Array]]) -> bool:
    """Return whether arrays have an entry for each entry of their buckets."""
    residuals = all_of.get(("memory", "residual"), arrays)
    is_alike = [x.shape for x in arrays] == [x.shape for x in residuals]
    return is_alike and all(x.ndim == 2 for x in arrays)


def _stored_name(path: Path) -> Path:
    """Return the stored name of a leaf of a transform's state."""
    name = path[1:] if path[0] == "local" else path
    return (name[0], *name[2:]) if name[0] == "memory" else name


def _copy_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return a copy of `x` with the shape and sharding of `like`.

    The caller may donate what it passed, so nothing may share its memory.
    """
    return jax.device_put(jnp.copy(x).reshape(like.shape), like.sharding)
