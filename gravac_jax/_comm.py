"""The only room that knows about other replicas.

Everything that crosses the network goes through `Comm`, in float32 or as integers, and
so do the questions of what varies from replica to replica. `axis_name=None` means
alone: the same code, nothing to exchange.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _checks, _step_checks, _tree

AxisName = str | tuple[str, ...] | None


def join(*axis_names: AxisName) -> AxisName:
    """All of these axes as one."""
    given = [name for name in axis_names if name is not None]
    names = tuple(x for name in given for x in _checks.axis_names(name))
    return names if len(given) > 1 else given[0] if given else None


@dataclasses.dataclass(frozen=True)
class Comm:
    """The replicas along `axis_name`, seen from one of them."""

    axis_name: AxisName

    @property
    def replicas(self) -> int:
        """N, how many replicas there are; static."""
        return 1 if self.axis_name is None else jax.lax.axis_size(self.axis_name)

    @property
    def _names(self) -> tuple[str, ...]:
        return _checks.axis_names(self.axis_name)

    @property
    def _is_checked(self) -> bool:
        # Under check_vma=False, pmap and vmap nothing is marked as varying, not even
        # the axis index; under check_vma=True the axis index always is.
        return bool(self._names) and not self._fixed_axes(
            jax.lax.axis_index(self.axis_name)
        )

    def _fixed_axes(self, x: jax.Array) -> list[str]:
        varying = jax.typeof(x).manual_axis_type.varying
        return [name for name in self._names if name not in varying]

    def check_local(self, tree: Any) -> None:
        """Raise if a leaf of `tree` is known to be the same on every replica."""
        if not self._is_checked:
            return
        for path, leaf in _tree.named_leaves(tree):
            if fixed := self._fixed_axes(leaf):
                _step_checks.still_local(path, fixed)

    def check_alike(self, before: Any, after: Any) -> None:
        """Raise if a leaf that was the same on several devices is known to differ."""
        leaves = zip(jax.tree.leaves(before), _tree.named_leaves(after), strict=True)
        for old, (path, new) in leaves:
            fixed = [set(self._fixed_axes(jnp.asarray(x))) for x in (old, new)]
            if lost := fixed[0] - fixed[1]:
                _step_checks.stays_alike(path, sorted(lost))

    def check_sharded(
        self, params: Any, is_chosen: tuple[bool, ...], is_sharded: bool
    ) -> None:
        """Raise if `params` are known to be sharded otherwise than it is said."""
        if not self._is_checked:
            return
        leaves = _tree.named_leaves(params)
        for (path, leaf), chosen in zip(leaves, is_chosen, strict=True):
            is_slice = not self._fixed_axes(leaf)
            if is_slice != (chosen and is_sharded):
                _step_checks.sharded_as_said(path, is_slice, self.axis_name)

    def is_shared(self, tree: Any) -> bool:
        """Whether some leaf of `tree` is known to be the same on every replica."""
        leaves = jax.tree.leaves(tree) if self._is_checked else []
        return any(self._fixed_axes(x) for x in leaves)

    def cast(self, tree: Any) -> Any:
        """`tree`, marked as varying over the axis where JAX keeps such marks."""
        if not self._is_checked:
            return tree

        def vary(x: jax.Array) -> jax.Array:
            fixed = tuple(self._fixed_axes(x))
            return jax.lax.pcast(x, fixed, to="varying") if fixed else x

        return jax.tree.map(vary, tree)

    def zeros(self, like: jax.Array) -> jax.Array:
        """float32 zeros of the shape of `like`, marked as its mean over replicas is.

        It varies over other axes where `like` does.
        """
        zeros = jnp.zeros(like.shape, jnp.float32)
        varying = jax.typeof(like).manual_axis_type.varying
        others = tuple(sorted(set(varying) - set(self._names)))
        return jax.lax.pcast(zeros, others, to="varying") if others else zeros

    def mean(self, tree: Any) -> Any:
        """The mean of `tree` over replicas, in float32, as one collective."""
        if self.axis_name is None:
            return tree
        leaves, structure = jax.tree.flatten(tree)
        mean = jax.lax.pmean(self.cast(_tree.ravel(leaves)), self.axis_name)
        return jax.tree.unflatten(structure, _tree.unravel(mean, leaves))

    def gather(self, x: jax.Array) -> jax.Array:
        """`[replicas, *x.shape]`, every replica's `x`, the same on all of them."""
        if self.axis_name is None:
            return x[None]
        # Only this form may leave shard_map as replicated, and vmap refuses it.
        form: dict[str, Any] = {"to": "invarying"} if self._is_checked else {}
        # Flat, XLA makes an all-reduce of it on TPUs, of twice the bytes, unless 1,024
        # divides the size; between barriers it stays a row each (libtpu 0.0.42, the
        # record of programs.py).
        row = jax.lax.optimization_barrier(self.cast(x)[None])
        rows = jax.lax.all_gather(row, self.axis_name, tiled=True, **form)
        return jax.lax.optimization_barrier(rows)

    def swap(self, x: jax.Array) -> jax.Array:
        """`[replicas, m]`: row r is what replica r has in the row of this one."""
        if self.axis_name is None:
            return x
        return jax.lax.all_to_all(self.cast(x), self.axis_name, 0, 0)

    def share(self, x: jax.Array, is_mine: jax.Array) -> jax.Array:
        """`x` (integers) of the one replica where `is_mine` (`[]` bool) holds."""
        if self.axis_name is None:
            return x
        return jax.lax.psum(jnp.where(is_mine, x, 0), self.axis_name)

    def replica(self) -> jax.Array:
        """`[]` int32, which replica this is."""
        if self.axis_name is None:
            return jnp.zeros((), jnp.int32)
        return jax.lax.axis_index(self.axis_name)

    def of_first(self, x: jax.Array) -> jax.Array:
        """float32, of which the mean over replicas is the first one's `x`."""
        own = jnp.where(self.replica() == 0, self.replicas * x, 0)
        return own.astype(jnp.float32)


def mean_messages(replicas: int) -> int:
    """What one replica sends one after the other in a ring all-reduce."""
    return 2 * (replicas - 1)


def gather_messages(replicas: int) -> int:
    """What one replica sends one after the other in a ring all-gather."""
    return replicas - 1


def mean_wire_bytes(payload_bytes: float, replicas: int) -> float:
    """What one replica sends in a ring all-reduce of a buffer of `payload_bytes`."""
    return 2 * (replicas - 1) / replicas * payload_bytes


def gather_wire_bytes(payload_bytes: float, replicas: int) -> float:
    """What one replica sends in an all-gather of `payload_bytes` from each."""
    return (replicas - 1) * payload_bytes
