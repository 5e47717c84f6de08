"""Leaves to flat vectors and back: what is compressed, and what goes dense.

A bucket is a flat float32 vector of fused leaves. Selecting over the whole model beats
selecting layer by layer at the same bytes (Tyagi and Swany, BigData 2023, table VI), so
there is one bucket, as long as its indices fit. A larger model has several of about
equal size; a leaf that lies across a border is cut there.

Leaves lie in a bucket in ascending order of size. So the small ones are its first
entries, and an encoding can treat them alike.

Leaves that go dense are fused into one vector. Where entries are selected, these are
small and one-dimensional leaves (biases, norms): their entries would wait long, which
costs quality (Lin et al., 2018). In few bits every entry is sent, in each step or in
its turn, and all leaves are compressed.

Few bits round a bucket in rows of entries. Zeros after its leaves make them whole: to
pad and to cut in every step would cost passes over the bucket.
"""

import dataclasses
import functools
import itertools
import math
import operator
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _refuse, _xla

MAX_ENTRIES = 2**30  # of a bucket: places, and slots without one, fit in int32
MIN_ENTRIES = 16_384  # of a compressed leaf; from PaddlePaddle's DGC
MIN_SHARE = 1e-3  # of all entries, in models so small that this is less
NO_LEAF = -1  # in place of a leaf's index: padding, at the end of a part

Predicate = Callable[[str, Any], bool]


class Piece(NamedTuple):
    """What lies in a row in one part: a leaf, or what a bucket's border cut off of it.

    Attributes:
      leaf: the index of the leaf.
      start: its first entry, counted in the raveled leaf.
      shape: that of the leaf; of a cut leaf `(entries,)`.
    """

    leaf: int
    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of entries."""
        return math.prod(self.shape)


def matrices(min_entries: int = MIN_ENTRIES) -> Predicate:
    """Compress leaves of two or more dimensions with at least `min_entries` entries.

    This is the default of `gravac.transform` for `TopK` and `LowRank`. It lowers
    `min_entries` to a thousandth of all entries in models of under 16 million: small
    convolutions sent whole would be most of what a small network sends.

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
    """The plan for one pytree; static, made from the leaves at each trace.

    Attributes:
      structure: that of the tree.
      leaves: their shapes and dtypes.
      is_compressed: whether each leaf is in a bucket; the others go dense.
      padded_size: returns the size of a bucket for so many entries.
    """

    structure: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    is_compressed: tuple[bool, ...]
    padded_size: Callable[[int], int]

    @functools.cached_property
    def parts(self) -> tuple[tuple[Piece, ...], ...]:
        """The pieces in each bucket, of small leaves first, then those that go dense.

        There is at least one bucket, which may be empty.
        """
        size = lambda leaf: self.leaves[leaf].size
        order = range(len(self.leaves))
        chosen = sorted((i for i in order if self.is_compressed[i]), key=size)
        ends = list(itertools.accumulate(map(size, chosen), initial=0))
        count = max(1, -(-ends[-1] // MAX_ENTRIES))
        borders = [ends[-1] * i // count for i in range(count + 1)]
        spans = list(zip(chosen, itertools.pairwise(ends), strict=True))

        def piece(leaf: int, start: int, stop: int) -> Piece:
            is_cut = stop - start < size(leaf)
            return Piece(
                leaf, start, (stop - start,) if is_cut else self.leaves[leaf].shape
            )

        buckets = [
            tuple(
                piece(leaf, max(low, start) - start, min(high, end) - start)
                for leaf, (start, end) in spans
                if max(low, start) < min(high, end)
            )
            for low, high in itertools.pairwise(borders)
        ]
        dense = [piece(i, 0, size(i)) for i in order if not self.is_compressed[i]]
        return (*buckets, tuple(dense))

    @property
    def entries(self) -> tuple[int, ...]:
        """Entries of leaves in each part."""
        return tuple(sum(x.size for x in part) for part in self.parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size n of each part of `pack`: its entries, and its padding.

        The last, of dense leaves, has one entry of 0 where there are none: XLA does not
        shard an array without entries, and states should not differ in structure.
        """
        *compressed, dense = self.entries
        sizes = tuple(map(self.padded_size, compressed))
        if any(map(operator.lt, sizes, compressed)):
            raise ValueError(
                f"`padded_size` of the encoding returned {list(sizes)} for"
                f" {list(compressed)} entries: return as many or more."
            )
        return (*sizes, max(1, dense))

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The path of the leaf of each piece of each part."""
        tree = jax.tree.unflatten(self.structure, self.leaves)
        paths = [path for path, _ in _arrays.named_leaves(tree)]
        return tuple(tuple(paths[x.leaf] for x in part) for part in self.parts)

    @property
    def layout(self) -> tuple[tuple[int, int], ...]:
        """The leaf and the size of each piece of each part.

        A part ends with its padding, whose leaf is `NO_LEAF`.
        """
        rows: list[tuple[int, int]] = []
        for part, size, entries in zip(
            self.parts, self.sizes, self.entries, strict=True
        ):
            rows += [*((x.leaf, x.size) for x in part), (NO_LEAF, size - entries)]
        return tuple(rows)

    def pack(self, tree: Any) -> tuple[jax.Array, ...]:
        """Return the parts of `tree`: buckets, then dense leaves, `[n]` float32."""
        leaves = jax.tree.leaves(tree)

        def cut(x: Piece) -> jax.Array:
            flat = jnp.ravel(leaves[x.leaf])
            is_whole = x.size == flat.size
            ends = (x.start,), (x.start + x.size,)
            return flat if is_whole else jax.lax.slice(flat, *ends)

        parts = [list(map(cut, part)) for part in self.parts]
        return tuple(map(_arrays.ravel, parts, self.sizes))

    def cleared(self, buckets: Iterable[jax.Array]) -> tuple[jax.Array, ...]:
        """Return `buckets` with 0 in their padding, where rounding leaves something."""
        return tuple(map(_xla.zero_after, buckets, self.entries))

    def unpack(self, parts: tuple[jax.Array, ...], count: jax.Array) -> Any:
        """Undo `pack`: return the leaves in their own dtypes.

        Args:
          parts: the buckets, then the leaves that go dense.
          count: as for `_arrays.unravel`.
        """
        cuts: list[list[jax.Array]] = [[] for _ in self.leaves]
        for vector, pieces in zip(parts, self.parts, strict=True):
            like = [
                jax.ShapeDtypeStruct(x.shape, self.leaves[x.leaf].dtype) for x in pieces
            ]
            arrays = _arrays.unravel(vector, like, count)
            for piece, x in zip(pieces, arrays, strict=True):
                cuts[piece.leaf].append(x)
        leaves = [
            cut[0] if len(cut) == 1 else _joined(cut, spec)
            for cut, spec in zip(cuts, self.leaves, strict=True)
        ]
        return jax.tree.unflatten(self.structure, leaves)

    def rounded(
        self, parts: tuple[jax.Array, ...], count: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Return `parts` as the leaves hold them in their own dtypes."""
        is_narrow = any(x.dtype != jnp.float32 for x in self.leaves)
        return self.pack(self.unpack(parts, count)) if is_narrow else parts


def _joined(cut: list[jax.Array], spec: Any) -> jax.Array:
    """Return a leaf from its pieces; one without entries has none."""
    flat = [jnp.zeros(0, spec.dtype), *map(jnp.ravel, cut)]
    return jnp.concatenate(flat).reshape(spec.shape)


def plan(
    tree: Any,
    compress: bool | Predicate | Any | None,
    padded_size: Callable[[int], int] = lambda n: n,
) -> Buckets:
    """Decide for each leaf of `tree` whether it is compressed.

    Args:
      tree: a pytree of arrays or `jax.ShapeDtypeStruct`.
      compress: True for every leaf, a function of (path, leaf), or a pytree of bools;
        None for matrices that are not small beside the others.
      padded_size: returns the size of a bucket for so many entries, at least as many.

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
        chosen = [bool(compress(path, x)) for path, x in _arrays.named_leaves(tree)]
    elif not leaves:
        chosen = []  # optax.tree.map_params asks for the state of no params at all
    else:
        _refuse.mask(compress, tree)
        chosen = jax.tree.leaves(compress)
    return Buckets(structure, leaves_of(tree), tuple(chosen), padded_size)


def leaves_of(tree: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the shapes and dtypes of the leaves of a tree."""
    leaves = jax.tree.leaves(tree)
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)


def warn_if_wide(buckets: Buckets) -> None:
    """Warn that what has more than 32 bits is rounded to float32."""
    wide = sum(jnp.finfo(x.dtype).bits > 32 for x in buckets.leaves)
    if wide:
        warnings.warn(
            f"{wide} of {len(buckets.leaves)} leaves of the params are float64, and"
            " gravac.transform remembers and exchanges gradients in float32: even a"
            " dense step rounds them to 24 bits. Train in float32, or average such"
            " gradients with jax.lax.pmean in place of the transform.",
            stacklevel=2,
        )


def warn_if_empty(buckets: Buckets) -> None:
    """Warn if nothing will be compressed."""
    if buckets.entries[-1] and not any(buckets.is_compressed):
        warnings.warn(
            f"gravac.transform compresses none of the {len(buckets.leaves)} leaves"
            f" ({buckets.entries[-1]:,} entries): all are one-dimensional or small."
            " Pass compress=True to compress all of them, or"
            " compress=gravac.matrices(min_entries=...).",
            stacklevel=2,
        )
