"""Training state by name: what is written down of it.

Everything has the name of the way to it, as if it were saved as it is; only what the
transform keeps per replica is written in the shapes of the params.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _arrays, _state
from gravac_jax._arrays import Path
from gravac_jax._checkpoint import portable, restore_checks
from gravac_jax._checkpoint.portable import Form
from gravac_jax._state import TransformState

VERSION = 1  # of the names and shapes of a transform's state

Named = dict[Path, Any]


@dataclasses.dataclass(frozen=True)
class Own:
    """The state of one transform, somewhere in a tree."""

    path: Path
    state: TransformState
    form: Form

    def has(self, path: Path) -> bool:
        """Whether a name is of this state."""
        return path[: len(self.path)] == self.path

    def below(self, named: Named) -> Named:
        """What is of this state, by its name within."""
        n = len(self.path)
        return {path[n:]: x for path, x in named.items() if self.has(path)}

    @functools.cached_property
    def vectors(self) -> dict[Path, list[jax.Array]]:
        """What the memory keeps per entry: `[replicas, n]` in each bucket."""
        kept = self._memory.items()
        return {name: x for name, x in kept if x[0].ndim == 2}

    @functools.cached_property
    def rows(self) -> Named:
        """What else is kept per replica: `[replicas, ...]`, by its name in the file."""
        numbers = {k: x[0] for k, x in self._memory.items() if k not in self.vectors}
        exchange = _arrays.by_path(self._led(self.state.local.exchange))
        named = _arrays.by_path({"replica": self._led(self.state.local.replica)})
        named |= {("memory", *k): x for k, x in numbers.items()}
        return named | {("exchange", *k): x for k, x in exchange.items()}

    @property
    def fields(self) -> dict[str, Any]:
        """Those of the state that are the same on all replicas."""
        fields = self.state._asdict()
        del fields["local"], fields["layout"]
        return fields

    @functools.cached_property
    def shared(self) -> Named:
        """What is in them, by its name."""
        return _arrays.by_path(self.fields)

    @property
    def _memory(self) -> dict[Path, list[jax.Array]]:
        buckets = [_arrays.by_path(self._led(x)) for x in self.state.local.memory]
        return {name: [x[name] for x in buckets] for name in buckets[0]}

    def _led(self, local: Any) -> Any:
        """With an axis of replicas; in the local form there is none."""
        if self.form.replicas is not None:
            return local
        return jax.tree.map(lambda x: jnp.asarray(x)[None], local)


def owns_of(tree: Any, params: Any) -> list[Own]:
    """Every transform's state in `tree`."""
    is_ours = _state.is_transform_state
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_ours)
    restore_checks.is_whole(
        len(_state.locals_of(tree)), sum(is_ours(x) for _, x in flat)
    )
    return [
        Own(_arrays.names(path), x, portable.form(x, params))
        for path, x in flat
        if is_ours(x)
    ]


def others_of(named: Named, owns: list[Own]) -> Named:
    """What is no transform's."""
    is_other = lambda path: not any(own.has(path) for own in owns)
    return {path: x for path, x in named.items() if is_other(path)}


def write(tree: Any, params: Any) -> Named:
    """What is to be saved of `tree`, by name.

    Args:
      tree: training state, with that of `gravac.transform` in it.
      params: those that it was made for.

    Raises:
      ValueError: if they are others, or the state is not as `gravac.place` makes it.
    """
    owns = owns_of(tree, params)
    written = others_of(_arrays.by_path(tree), owns)
    restore_checks.can_be_saved(written)
    for own in owns:
        written |= {own.path + name: x for name, x in _written(own)}
    return {name: x for name, x in written.items() if is_saved(x)}


def is_saved(x: Any) -> bool:
    """Orbax refuses arrays that hold nothing."""
    return math.prod(shape_of(x)) > 0


def _written(own: Own) -> Iterator[tuple[Path, Any]]:
    yield ("version",), VERSION
    yield ("replicas",), own.form.replicas or 1
    yield from own.shared.items()
    yield from own.rows.items()
    for name, buckets in own.vectors.items():
        leaves = own.form.split(buckets)
        for path, x in zip(own.form.names, leaves, strict=True):
            yield ("memory", *name, *path), x


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape in which a leaf is saved: a random key as its bits."""
    dtype = getattr(x, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.eval_shape(jax.random.key_data, x).shape
    return tuple(np.shape(x))
