"""Training state as the named arrays of a checkpoint, and back.

Every leaf is stored as it is, such as `tree/[0]['dense']['kernel']`. Only the state of
`gravac.transform` has another form:

    steps/.steps, info/...               what is the same on all replicas
    decided/.ladder, decided/...         what one ladder and one controller decided
    local/.local.told, local/...         `[N, ...]`, what one ladder and N replicas know
    local/.local.norms[0], ...           `[N, 2, rows]`, how short means of rows are
    memory/.residual['dense']['kernel']  `[replicas, *shape]`, an array for each leaf
    memory/.optimizer.count              `[N]`, numbers that the memory keeps
    memory/.optimizer.mu["['kernel']"]   `[N, ...]`, what an optimizer keeps by leaf

Between two runs the replicas, the buckets, the slices, the ladder and the controller
may change. Everything else must be the same.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from gravac_jax import _arrays, _refuse
from gravac_jax._arrays import is_shape
from gravac_jax._checkpoint.labels import Named, checksums
from gravac_jax._checkpoint.layout import layout_of, loading, redistribute
from gravac_jax._step import norms, states
from gravac_jax._step.states import TransformState

# What means something on one ladder and to one controller only, as does info.gains.
_DECIDED = {".ladder", ".decided", ".next_rungs", ".past_rungs", ".controller"}


def pieces_in(tree: Any) -> Any:
    """Return the pieces of all buckets of the state in `tree`; None without a state."""
    found = jax.tree.leaves([x.layout for x in states.transform_states(tree)])
    return found[0] if found else None


def with_pieces(tree: Any, pieces: Any) -> Any:
    """Return `tree` with the saved layout in its state, if that is only a shape."""
    here = pieces_in(tree)

    def fill(x: Any) -> Any:
        if x is not here or not is_shape(x):
            return x
        if x.sharding is None or x.shape != np.shape(pieces):
            _require_values(x)
        return jax.device_put(np.asarray(pieces, x.dtype), x.sharding)

    return jax.tree.map(fill, tree)


def of_tree(tree: Any, params: Any) -> Named:
    """Return what a checkpoint stores of `tree`.

    Args:
      tree: training state, with the state of `gravac.transform` in it.
      params: the params that the state was made for.

    Raises:
      ValueError: if the state was made for other params, is not as `gravac.place` makes
        it, was taken apart, or lies in `params`.
    """
    whole, parts = states.transform_states(tree), states.locals_of(tree)
    if states.locals_of(params) or not len(whole) == len(parts) <= 1:
        raise ValueError(
            "`tree` must hold one state of gravac.transform, whole, and `params` none:"
            " write save(step, (params, opt_state), params), and restore((params,"
            " opt_state), params); pass the nnx.Optimizer itself, not nnx.split of it."
        )
    named: Named = {}
    for keys, x in jax.tree.leaves_with_path(tree, is_leaf=states.is_transform_state):
        is_state = states.is_transform_state(x)
        named |= _stored(x, params) if is_state else {f"tree/{keystr(keys)}": x}
    # Orbax refuses arrays without entries.
    return {name: x for name, x in named.items() if 0 not in _shape(x)}


def to_load(here: Named, saved: Named, sums: dict[str, int], *, partial: bool) -> Named:
    """Return what to load of a checkpoint: arrays as they are to lie, and numbers.

    Args:
      here: what would be stored of the state of this run.
      saved: Orbax's metadata of everything in the checkpoint.
      sums: the checksums of everything in it.
      partial: whether `here` may be a part of it.

    Raises:
      ValueError: if the checkpoint does not fit.
    """
    if partial:  # but a state of gravac.transform is whole
        kinds = {*map(_kind, here)} - {"tree"}
        saved = {k: x for k, x in saved.items() if k in here or _kind(k) in kinds}
    _require_same(here, saved)
    if not (is_same := _is_decided_alike(here, saved, sums)):
        _refuse.warn(
            "the checkpoint was saved with another ladder or controller: residuals"
            " are restored; the controller, and what encodings keep, begin anew."
        )
    first = lambda y: {_shape(x)[0] for k, x in y.items() if _kind(k) == "memory"}
    ours, theirs = first(here), first(saved)  # as many devices may be other replicas
    is_new = {"decided": not is_same, "local": not is_same or ours != theirs}
    # Norms of slices are of one device each.
    may_move = lambda k: _kind(k) == "norms" and _shape(here[k])[0] == min(ours)
    of_one = lambda x, k: _shape(x)[1:] if may_move(k) else _shape(x)
    fits = lambda k: _kind(k) == "memory" or of_one(saved[k], k) == of_one(here[k], k)
    names = [k for k in here if k in saved and not is_new.get(_kind(k)) and fits(k)]
    _require_values(*(here[k] for k in here.keys() - names))
    lie = lambda x, shape: x if _shape(x) == shape else loading(x, shape)
    return {k: lie(here[k], _shape(saved[k])) for k in names}


def _is_decided_alike(here: Named, saved: Named, sums: dict[str, int]) -> bool:
    """Return whether the ladder and the controller are those of the checkpoint."""
    shapes = lambda y: {k: _shape(y[k]) for k in y if _kind(k) == "decided"}
    ladder = {k: x for k, x in here.items() if k.startswith("decided/.ladder")}
    known = {k: x for k, x in ladder.items() if not is_shape(x)}
    return shapes(here) == shapes(saved) and checksums(known).items() <= sums.items()


def _require_same(here: Named, saved: Named) -> None:
    """Refuse a checkpoint of something else, and name the first differences."""
    here, saved = ({k: _must_match(k, x) for k, x in y.items()} for y in (here, saved))
    differ = [k for k in here | saved if here.get(k, "") != saved.get(k, "")]
    of = lambda names, k: names.get(k, "missing")
    say = lambda k: f"{k} is {of(saved, k)} in the checkpoint and {of(here, k)} here"
    if differ:
        raise ValueError(
            f"the checkpoint is of another model, optimizer or memory:"
            f" {'; '.join(map(say, differ[:3]))}. Restore with what saved it, or a"
            f" part of it by partial=True. To change the memory, then send residuals by"
            f" gravac.flush, and begin anew."
        )


def _must_match(name: str, x: Any) -> str:
    """Describe what must be the same in the checkpoint and here, if anything must."""
    dtype, shape = _type_and_shape(x)
    if _kind(name) == "memory":
        return f"{shape[1:]} for each replica"
    return f"{dtype}{shape or ''}" if _kind(name) == "tree" else ""


def into_tree(found: Named, here: Named, tree: Any, params: Any) -> Any:
    """Return `tree` with what was loaded, in memory of its own.

    Args:
      found: what `to_load` named, as it was loaded; it is changed.
      here: what would be stored of the state of this run.
      tree: the state of this run, placed. It stays as it is.
      params: the params in it.
    """
    for name in [x for x in found if _shape(found[x]) != _shape(here[x])]:
        old, new = found[name], here[name]
        found[name] = redistribute(old, new, _kind(name) != "norms")
        if _kind(name) == "norms":
            found[name] = norms.of_others(found[name], len(old), new.shape[0])

    def fill(keys: Any, x: Any) -> Any:
        name = f"tree/{keystr(keys)}"
        if states.is_transform_state(x):
            return _filled(x, params, found)
        # What is not stored has no entries.
        return found[name] if name in found else jnp.zeros_like(x)

    return jax.tree.map_with_path(fill, tree, is_leaf=states.is_transform_state)


def _stored(state: TransformState, params: Any) -> Named:
    """Return what is stored of a transform's state."""
    layout = layout_of(state, params)
    own = jax.NamedSharding(layout.mesh, layout.spec)
    put = lambda x: x.update(sharding=own) if is_shape(x) else jax.device_put(x, own)
    placed = jax.tree.map(put, state.local)
    parts: dict[str, list[Any]] = {}
    for keys, x in jax.tree.leaves_with_path(state._replace(local=placed, layout=())):
        parts.setdefault(_stored_name(keys), []).append(x)
    # Vectors have an entry for each entry of their bucket. Other floats are of a leaf,
    # or each bucket's own. Integers count the same in every bucket.
    sizes = [(sum(bucket),) for bucket in layout.buckets] if layout.leaves else None
    named: Named = {}
    for name, arrays in parts.items():
        if _kind(name) == "memory" and [x.shape[1:] for x in arrays] == sizes:
            names = [name + leaf.path for leaf in layout.leaves]
            split = layout.shapes if is_shape(arrays[0]) else layout.split
            named |= zip(names, split(arrays), strict=True)
        elif len(arrays) > 1 and _arrays.is_float(arrays[0]):
            named |= {f"{name}/{i}": x for i, x in enumerate(arrays)}
        else:
            named[name] = arrays[0]
    return named


def _filled(state: TransformState, params: Any, named: Named) -> TransformState:
    """Return the state with the arrays in `named`, which are as `_stored` has them."""
    layout = layout_of(state, params)
    paths = [leaf.path for leaf in layout.leaves]
    join = functools.cache(lambda name: layout.join([named[name + x] for x in paths]))

    def fill(keys: Any, x: jax.Array) -> jax.Array:
        name = _stored_name(keys)
        is_vector = paths and name + paths[0] in named
        own = name + "".join(f"/{x.idx}" for x in keys[2:3] if hasattr(x, "idx"))
        if 0 in x.shape:  # which is not stored
            return jnp.zeros_like(x)
        # The caller may donate what it passed, so nothing may share its memory.
        copy = lambda: jnp.copy(named.get(own, named.get(name, x)))
        return join(name)[keys[2].idx] if is_vector else copy()

    filled = jax.tree.map_with_path(fill, state)
    if "local" not in map(_kind, named):  # of other replicas, or another ladder
        fresh = jax.tree.map(jnp.copy, state.controller)
        filled = filled._replace(controller=states.moved(filled.controller, fresh))
    return jax.device_put(filled, jax.tree.map(lambda x: x.sharding, state))


def _stored_name(keys: Any) -> str:
    """Return the name of a leaf of a transform's state: its kind and its place."""
    field, both = keystr(keys[:1]), keystr(keys[:2])
    if both == ".local.memory":
        return f"memory/{keystr(keys[3:])}"  # whichever bucket it is of
    is_decided = field in _DECIDED or both == ".info.gains"
    return f"{'decided' if is_decided else field[1:]}/{keystr(keys)}"


def _require_values(*leaves: Any) -> None:
    """Refuse shapes where the checkpoint has no values for them."""
    if any(map(is_shape, leaves)):
        raise ValueError(
            "shapes suffice if they have shardings, and params, replicas, ladder and"
            " controller are those saved: else restore into what gravac.place makes."
        )


def _kind(name: str) -> str:
    return "norms" if name.startswith("local/.local.norms") else name.split("/", 1)[0]


def _type_and_shape(x: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the type and shape in which an array or a number is stored.

    A random key is stored as its bits. `x` may be Orbax's metadata.
    """
    if _arrays.is_key(x):
        x = jax.eval_shape(jax.random.key_data, x)
    return getattr(x, "dtype", type(x).__name__), tuple(getattr(x, "shape", ()))


def _shape(x: Any) -> tuple[int, ...]:
    return _type_and_shape(x)[1]
