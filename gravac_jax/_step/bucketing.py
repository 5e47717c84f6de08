"""Leaves to flat vectors and back: what is compressed, and what goes dense.

A bucket is a flat float32 vector of fused leaves. Selecting over the whole model beats
selecting layer by layer at the same bytes (Tyagi and Swany, BigData 2023, table VI), so
there is one bucket, as long as its indices fit. A larger model has several, each of
whole leaves; only a leaf that is larger than a bucket is cut.

Leaves lie in a bucket in ascending order of size. So the small ones are its first
entries, and an encoding can treat them alike.

Leaves that go dense are fused into one vector. Where entries are selected, these are
small and one-dimensional leaves (biases, norms): their entries would wait long, which
costs quality (Lin et al., 2018). In few bits every entry is sent, in each step or in
its turn, and all leaves are compressed but the smallest, together 1/4096 of all
entries. Entries that share a scale are moved by steps of one size, and what is small
beside its neighbours is moved too far: a learnable temperature ran away. That adds
0.4% to the bytes of two bits, and 3% to those of two bits of an eighth.

Few bits round a bucket in rows of entries. Zeros after its leaves make them whole: to
pad and to cut in every step would cost passes over the bucket.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _refuse

MAX_ENTRIES = 2**30  # of a bucket: places, and slots without one, fit in int32
MIN_ENTRIES = 16_384  # of a compressed leaf; from PaddlePaddle's DGC
MIN_SHARE = 1e-3  # of all entries, in models so small that this is less
DENSE_SHARE = 1 / 4096  # of all entries, which go dense beside few bits
FEW = 32  # entries that go dense beside few bits, though they are a larger share
NO_LEAF = -1  # in place of a leaf's index: padding, at the end of a part

Predicate = Callable[[str, Any], bool]


class Piece(NamedTuple):
    """What lies in a row in one part: a leaf, or a piece of one too large for a bucket.

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

    Raises:
      ValueError: if `min_entries` is no whole number, or below 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> is_compressed = gravac.matrices()
      >>> is_compressed("kernel", jnp.ones((128, 128)))
      True
      >>> is_compressed("bias", jnp.ones(100_000))
      False
    """
    _refuse.number(min_entries, "min_entries", is_whole=True, low=0)
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
        order = range(len(self.leaves))
        chosen = [i for i in order if self.is_compressed[i]]
        chosen.sort(key=lambda leaf: self.leaves[leaf].size)
        buckets: list[tuple[Piece, ...]] = [()]
        room = MAX_ENTRIES
        for piece in itertools.chain(*map(self._pieces, chosen)):
            if piece.size > room:
                buckets.append(())
                room = MAX_ENTRIES
            buckets[-1] += (piece,)
            room -= piece.size
        dense = (self._pieces(i) for i in order if not self.is_compressed[i])
        return (*buckets, tuple(itertools.chain(*dense)))

    def _pieces(self, leaf: int) -> list[Piece]:
        """Return a leaf whole, or cut into equal pieces that fit into a bucket."""
        spec = self.leaves[leaf]
        count = -(-spec.size // MAX_ENTRIES)
        if count <= 1:
            return [Piece(leaf, 0, spec.shape)]
        ends = [spec.size * i // count for i in range(count + 1)]
        return [Piece(leaf, i, (j - i,)) for i, j in itertools.pairwise(ends)]

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
    def named(self) -> list[tuple[tuple[str, tuple[int, ...]], ...]]:
        """The path of the leaf, and the shape, of each piece of each part."""
        tree = jax.tree.unflatten(self.structure, self.leaves)
        paths = [path for path, _ in _arrays.named_leaves(tree)]
        return [tuple((paths[x.leaf], x.shape) for x in part) for part in self.parts]

    @property
    def layout(self) -> tuple[tuple[int, int], ...]:
        """The leaf and the size of each piece of each part.

        A part ends with its padding, whose leaf is `NO_LEAF`.
        """
        rows: list[tuple[int, int]] = []
        parts = zip(self.parts, self.sizes, self.entries, strict=True)
        for part, size, entries in parts:
            rows += [*((x.leaf, x.size) for x in part), (NO_LEAF, size - entries)]
        return tuple(rows)

    def pack(self, tree: Any) -> tuple[jax.Array, ...]:
        """Return the parts of `tree`: buckets, then dense leaves, `[n]` float32."""
        flat = list(map(jnp.ravel, jax.tree.leaves(tree)))
        cut = lambda x: jax.lax.slice_in_dim(flat[x.leaf], x.start, x.start + x.size)
        parts = [list(map(cut, part)) for part in self.parts]
        return tuple(map(_arrays.ravel, parts, self.sizes))

    def unpack(self, parts: tuple[jax.Array, ...]) -> Any:
        """Undo `pack`: return the leaves in their own dtypes."""
        cuts: list[list[jax.Array]] = [[] for _ in self.leaves]
        like = lambda x: jax.ShapeDtypeStruct(x.shape, self.leaves[x.leaf].dtype)
        for vector, pieces in zip(parts, self.parts, strict=True):
            arrays = _arrays.unravel(vector, list(map(like, pieces)))
            for piece, x in zip(pieces, arrays, strict=True):
                cuts[piece.leaf].append(x)
        whole = lambda x, y: jnp.concatenate(x).reshape(y.shape) if x[1:] else x[0]
        return jax.tree.unflatten(self.structure, map(whole, cuts, self.leaves))


def plan(
    tree: Any,
    compress: bool | Predicate | Any | None,
    padded_size: Callable[[int], int] = lambda n: n,
    suits_small_leaves: bool = False,
) -> Buckets:
    """Decide for each leaf of `tree` whether it is compressed.

    Args:
      tree: a pytree of arrays or `jax.ShapeDtypeStruct`.
      compress: True for every leaf, a function of (path, leaf), or a pytree of bools;
        None for matrices that are not small beside the others, or if small leaves
        suit, for all but the smallest.
      padded_size: returns the size of a bucket for so many entries, at least as many.
      suits_small_leaves: whether all encodings suit them.

    Returns:
      The plan.

    Raises:
      ValueError: if `compress` is a pytree that does not match `tree`.
    """
    leaves, structure = jax.tree.flatten(tree)
    if compress is None and not suits_small_leaves:
        share = int(MIN_SHARE * sum(x.size for x in leaves))
        compress = matrices(min(MIN_ENTRIES, share))
    if compress is None:
        chosen = _but_the_smallest([x.size for x in leaves])
    elif isinstance(compress, bool):
        chosen = [compress] * len(leaves)
    elif callable(compress) and jax.tree_util.all_leaves([compress]):
        chosen = [bool(compress(path, x)) for path, x in _arrays.named_leaves(tree)]
    elif not leaves:
        chosen = []  # optax.tree.map_params asks for the state of no params at all
    else:
        _refuse.mask(compress, tree)
        chosen = jax.tree.leaves(compress)
    return Buckets(structure, leaves_of(tree), tuple(chosen), padded_size)


def _but_the_smallest(sizes: list[int]) -> list[bool]:
    """Return False for the smallest leaves, as long as they are few entries."""
    few = max(DENSE_SHARE * sum(sizes), min(FEW, sum(sizes) // FEW))
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    ends = itertools.accumulate(sizes[i] for i in order)
    large = {i for i, end in zip(order, ends, strict=True) if end > few}
    return [i in large for i in range(len(sizes))]


def leaves_of(tree: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the shapes and dtypes of the leaves of a tree."""
    leaves = jax.tree.leaves(tree)
    # What JAX will make of it: NumPy's float64 becomes float32.
    return tuple(jax.ShapeDtypeStruct(x.shape, jnp.result_type(x)) for x in leaves)


def warn_if_wide(buckets: Buckets) -> None:
    """Warn that what has more than 32 bits is rounded to float32."""
    wide = sum(jnp.finfo(x.dtype).bits > 32 for x in buckets.leaves)
    if wide:
        _refuse.warn(
            f"{wide} of {len(buckets.leaves)} leaves of the params are float64, and"
            " gravac.transform exchanges gradients in float32, even in a dense step:"
            " train in float32, or average such gradients by jax.lax.pmean instead."
        )


def warn_if_empty(buckets: Buckets) -> None:
    """Warn if nothing will be compressed."""
    if buckets.entries[-1] and not any(buckets.is_compressed):
        _refuse.warn(
            f"gravac.transform compresses none of the {len(buckets.leaves)} leaves"
            f" ({buckets.entries[-1]:,} entries): all are one-dimensional, small, left"
            " out by `compress`, or not cut by `shardings`. Pass compress=True for all"
            " that may be, or compress=gravac.matrices(min_entries=...)."
        )
