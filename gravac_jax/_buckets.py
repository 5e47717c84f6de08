"""Which leaves are fused into the compressed bucket, which go dense, and back again.

A bucket is a flat float32 vector. Selecting over the whole model at once beats layer
by layer at the same bytes (Tyagi and Swany, BigData 2023, table VI), so there is one
bucket, as long as its indices fit; a larger model has several of about equal size, and
a leaf that lies across a border is cut there. Several smaller ones may be asked for, so
that one is on its way while the backward pass computes the next. What is small or
one-dimensional (biases, norms) is fused into one dense vector, where compression would
save nothing and cost quality (Lin et al., 2018).
"""

import dataclasses
import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _payload, _step_checks, _tree

ENTRY_BYTES = 4  # of a bucket
MIN_ENTRIES = 16_384  # of a compressed leaf; from PaddlePaddle's DGC
MIN_SHARE = 1e-3  # of all entries, where this is less: half of what factor 1000 sends

Predicate = Callable[[str, Any], bool]


class Piece(NamedTuple):
    """A part of a compressed leaf that lies in one bucket.

    Attributes:
      leaf: which of the compressed leaves.
      start: its first entry in the raveled leaf,
      stop: and the one after its last.
    """

    leaf: int
    start: int
    stop: int

    @property
    def entries(self) -> int:
        """How many there are."""
        return self.stop - self.start


def matrices(min_entries: int = MIN_ENTRIES) -> Predicate:
    """Compress leaves of two or more dimensions with at least `min_entries` entries.

    `gravac.transform` does by default, but in a model of under 16 million entries with
    a thousandth of these: small convolutions, sent whole, would be most of what a small
    network sends.

    Args:
      min_entries: smaller leaves go dense.

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
    bucket_bytes: int | None = None

    @property
    def _borders(self) -> list[int]:
        """Where one bucket ends and the next begins, counted in entries of all."""
        sizes = [x.size for x in self._chosen(self.leaves, True)]
        ends, full = [0, sum(sizes)], 0
        if self.bucket_bytes is not None:
            for end in itertools.accumulate(sizes[:-1]):
                if ENTRY_BYTES * (end - full) >= self.bucket_bytes:
                    ends.insert(-1, end)
                    full = end
        borders = [0]
        for start, end in itertools.pairwise(ends):
            parts = max(1, -(-(end - start) // _payload.MAX_ENTRIES))
            cut = lambda i, a=start, b=end, n=parts: a + (b - a) * i // n
            borders += [cut(i + 1) for i in range(parts)]
        return borders

    @property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """What each bucket holds: at least one bucket, though it be empty."""
        sizes = [x.size for x in self._chosen(self.leaves, True)]
        ends = list(itertools.accumulate(sizes, initial=0))
        spans = list(enumerate(itertools.pairwise(ends)))
        return tuple(
            tuple(
                Piece(leaf, max(low, start) - start, min(high, end) - start)
                for leaf, (start, end) in spans
                if max(low, start) < min(high, end)
            )
            for low, high in itertools.pairwise(self._borders)
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size n of each bucket; one of 0 if all goes dense."""
        return tuple(sum(x.entries for x in bucket) for bucket in self.pieces)

    @property
    def shapes(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The shape of each piece of each bucket; a leaf that is cut is a vector."""
        leaves = self._chosen(self.leaves, True)

        def shape(x: Piece) -> tuple[int, ...]:
            leaf = leaves[x.leaf]
            return leaf.shape if x.entries == leaf.size else (x.entries,)

        return tuple(tuple(map(shape, bucket)) for bucket in self.pieces)

    @property
    def layout(self) -> tuple[tuple[int, int], ...]:
        """The leaf, among all, and the size of each piece that is compressed."""
        chosen = [i for i, is_one in enumerate(self.is_compressed) if is_one]
        pieces = itertools.chain.from_iterable(self.pieces)
        return tuple((chosen[x.leaf], x.entries) for x in pieces)

    @property
    def dense_size(self) -> int:
        """Entries of all leaves that go dense."""
        return sum(x.size for x in self._chosen(self.leaves, False))

    def pack(self, tree: Any) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """The buckets (`[n]` float32 each) and the dense vector of `tree`."""
        leaves = jax.tree.leaves(tree)
        flat = [jnp.ravel(x) for x in self._chosen(leaves, True)]
        cut = lambda x: jax.lax.slice(flat[x.leaf], (x.start,), (x.stop,))
        buckets = tuple(_tree.ravel(list(map(cut, bucket))) for bucket in self.pieces)
        return buckets, _tree.ravel(self._chosen(leaves, False))

    def unpack(self, buckets: tuple[jax.Array, ...], dense: jax.Array) -> Any:
        """The inverse of `pack`, in the leaves' own dtypes."""
        specs = self._chosen(self.leaves, True)
        parts = [[jnp.zeros(0, x.dtype)] for x in specs]
        for bucket, pieces in zip(buckets, self.pieces, strict=True):
            like = [
                jax.ShapeDtypeStruct((x.entries,), specs[x.leaf].dtype) for x in pieces
            ]
            for piece, part in zip(pieces, _tree.unravel(bucket, like), strict=True):
                parts[piece.leaf].append(part)
        compressed = [
            jnp.concatenate(part).reshape(spec.shape)
            for part, spec in zip(parts, specs, strict=True)
        ]
        rest = _tree.unravel(dense, self._chosen(self.leaves, False))
        by_kind = {True: iter(compressed), False: iter(rest)}
        leaves = [next(by_kind[chosen]) for chosen in self.is_compressed]
        return jax.tree.unflatten(self.structure, leaves)

    def _chosen(self, leaves: Any, which: bool) -> list[Any]:
        pairs = zip(leaves, self.is_compressed, strict=True)
        return [x for x, is_compressed in pairs if is_compressed == which]


def plan(
    tree: Any, compress: bool | Predicate | Any | None, bucket_bytes: int | None = None
) -> Buckets:
    """Decide for each leaf of `tree` whether it is compressed.

    Args:
      tree: a pytree of arrays or `jax.ShapeDtypeStruct`.
      compress: True for every leaf, a function of (path, leaf), or a pytree of bools;
        None for matrices that are not small beside the others.
      bucket_bytes: how full a bucket is before the next one begins; None for one.

    Returns:
      The plan.

    Raises:
      ValueError: if `compress` is a pytree that does not match `tree`.
    """
    leaves, structure = jax.tree.flatten(tree)
    if compress is None:
        share = int(MIN_SHARE * sum(x.size for x in leaves))
        compress = matrices(min(MIN_ENTRIES, share))
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
    return Buckets(structure, specs, tuple(chosen), bucket_bytes)


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
