"""Which leaves are fused into the compressed bucket, which go dense, and back again.

A bucket is a flat float32 vector. Selecting over the whole model at once beats layer
by layer at the same bytes (Tyagi and Swany, BigData 2023, table VI), so there is one
bucket; what is small or one-dimensional (biases, norms) is fused into one dense
vector, where compression would save nothing and cost quality (Lin et al., 2018).
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax

from gravac_jax import _step_checks, _tree

Predicate = Callable[[str, Any], bool]


def matrices(min_entries: int = 16_384) -> Predicate:
    """Compress leaves of two or more dimensions with at least `min_entries` entries.

    The default of `gravac.transform(compress=...)`.

    Args:
      min_entries: smaller leaves go dense. 16,384 from PaddlePaddle's DGC.

    Returns:
      A function of a leaf's path and the leaf.

    Example:
      >>> import jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> is_compressed = gravac.matrices()
      >>> is_compressed("kernel", jnp.ones((128, 128)))
      True
      >>> is_compressed("bias", jnp.ones(100_000))
      False
    """
    return lambda path, leaf: leaf.ndim >= 2 and leaf.size >= min_entries


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The plan for one pytree: static, made anew from the leaves at each trace."""

    structure: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    is_compressed: tuple[bool, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size n of each bucket: one for the whole model, 0 if all goes dense."""
        return (sum(self.layout),)

    @property
    def layout(self) -> tuple[int, ...]:
        """The size of each compressed leaf, in order."""
        return tuple(x.size for x in self._chosen(self.leaves, True))

    @property
    def dense_size(self) -> int:
        """Entries of all leaves that go dense."""
        return sum(x.size for x in self._chosen(self.leaves, False))

    def pack(self, tree: Any) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """The buckets (`[n]` float32 each) and the dense vector of `tree`."""
        leaves = jax.tree.leaves(tree)
        bucket = _tree.ravel(self._chosen(leaves, True))
        return (bucket,), _tree.ravel(self._chosen(leaves, False))

    def unpack(self, buckets: tuple[jax.Array, ...], dense: jax.Array) -> Any:
        """The inverse of `pack`, in the leaves' own dtypes."""
        (bucket,) = buckets
        parts = {
            True: iter(_tree.unravel(bucket, self._chosen(self.leaves, True))),
            False: iter(_tree.unravel(dense, self._chosen(self.leaves, False))),
        }
        leaves = [next(parts[chosen]) for chosen in self.is_compressed]
        return jax.tree.unflatten(self.structure, leaves)

    def _chosen(self, leaves: Any, which: bool) -> list[Any]:
        pairs = zip(leaves, self.is_compressed, strict=True)
        return [x for x, is_compressed in pairs if is_compressed == which]


def plan(tree: Any, compress: bool | Predicate | Any) -> Buckets:
    """Decide for each leaf of `tree` whether it is compressed.

    Args:
      tree: a pytree of arrays or `jax.ShapeDtypeStruct`.
      compress: True for every leaf, a function of (path, leaf), or a pytree of bools.

    Returns:
      The plan.

    Raises:
      ValueError: if `compress` is a pytree that does not match `tree`, or if more is
        compressed than one bucket holds.
    """
    leaves, structure = jax.tree.flatten(tree)
    if isinstance(compress, bool):
        chosen = [compress] * len(leaves)
    elif callable(compress):
        chosen = [bool(compress(path, x)) for path, x in _tree.named_leaves(tree)]
    elif not leaves:
        chosen = []  # optax.tree.map_params asks for the state of no params at all
    else:
        _step_checks.mask_matches(compress, tree)
        chosen = jax.tree.leaves(compress)
    specs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    buckets = Buckets(structure, specs, tuple(chosen))
    _step_checks.index_fits(max(buckets.sizes))
    return buckets


def warn_if_empty(buckets: Buckets) -> None:
    """Say so when nothing will be compressed: a silent dense run helps nobody."""
    if buckets.dense_size and not sum(buckets.sizes):
        warnings.warn(
            f"gravac.transform compresses none of the {len(buckets.leaves)} leaves"
            f" ({buckets.dense_size:,} entries): all are one-dimensional or small."
            " Pass compress=True to compress all of them, or"
            " compress=gravac.matrices(min_entries=...).",
            stacklevel=2,
        )
