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
import itertools
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
    """The part of a compressed leaf that lies in one bucket.

    Attributes:
      leaf: the index of the leaf among the compressed ones.
      start: the first entry, counted in the raveled leaf.
      stop: the entry after the last.
    """

    leaf: int
    start: int
    stop: int

    @property
    def entries(self) -> int:
        """The number of entries."""
        return self.stop - self.start


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

    @property
    def _borders(self) -> list[int]:
        """Where one bucket ends and the next begins, counted in entries of all."""
        size = sum(x.size for x in self._chosen(self.leaves, True))
        parts = max(1, -(-size // MAX_ENTRIES))
        return [size * i // parts for i in range(parts + 1)]

    @property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """The pieces in each bucket, of small leaves first; one bucket may be empty."""
        sizes = [x.size for x in self._chosen(self.leaves, True)]
        order = sorted(range(len(sizes)), key=lambda leaf: sizes[leaf])
        ends = itertools.accumulate((sizes[leaf] for leaf in order), initial=0)
        spans = list(zip(order, itertools.pairwise(ends), strict=True))
        return tuple(
            tuple(
                Piece(leaf, max(low, start) - start, min(high, end) - start)
                for leaf, (start, end) in spans
                if max(low, start) < min(high, end)
            )
            for low, high in itertools.pairwise(self._borders)
        )

    @property
    def _entries(self) -> tuple[int, ...]:
        """Entries of leaves in each bucket; a single 0 if all leaves go dense."""
        return tuple(sum(x.entries for x in bucket) for bucket in self.pieces)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size n of each bucket: its entries, and its padding."""
        sizes = tuple(map(self.padded_size, self._entries))
        if any(map(operator.lt, sizes, self._entries)):
            raise ValueError(
                f"`padded_size` of the encoding returned {list(sizes)} for"
                f" {list(self._entries)} entries: return as many or more."
            )
        return sizes

    @property
    def shapes(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The shape of each piece of each bucket; a leaf that is cut is a vector."""
        leaves = self._chosen(self.leaves, True)

        def shape(x: Piece) -> tuple[int, ...]:
            leaf = leaves[x.leaf]
            return leaf.shape if x.entries == leaf.size else (x.entries,)

        return tuple(tuple(map(shape, bucket)) for bucket in self.pieces)

    @property
    def named_shapes(self) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]:
        """The path and the shape of each piece of each part of `pack`."""
        tree = jax.tree.unflatten(self.structure, self.leaves)
        named = [(path, x.shape) for path, x in _arrays.named_leaves(tree)]
        paths = [path for path, _ in self._chosen(named, True)]
        buckets = []
        for pieces, shapes in zip(self.pieces, self.shapes, strict=True):
            inside = [paths[x.leaf] for x in pieces]
            buckets.append(tuple(zip(inside, shapes, strict=True)))
        return (*buckets, tuple(self._chosen(named, False)))

    @property
    def are_whole(self) -> bool:
        """Whether no leaf is cut, because all of it lies in one bucket."""
        leaves = [x.leaf for bucket in self.pieces for x in bucket]
        return len(set(leaves)) == len(leaves)

    @property
    def layout(self) -> tuple[tuple[int, int], ...]:
        """The leaf and the size of each piece of each part.

        A part ends with its padding, whose leaf is `NO_LEAF`.
        """
        order = range(len(self.leaves))
        chosen, others = self._chosen(order, True), self._chosen(order, False)
        parts = [[(chosen[x.leaf], x.entries) for x in part] for part in self.pieces]
        parts.append([(i, self.leaves[i].size) for i in others])
        padded = (
            [*part, (NO_LEAF, size - sum(n for _, n in part))]
            for part, size in zip(parts, self.part_sizes, strict=True)
        )
        return tuple(itertools.chain.from_iterable(padded))

    @property
    def dense_size(self) -> int:
        """Entries of all leaves that go dense."""
        return sum(x.size for x in self._chosen(self.leaves, False))

    @property
    def total_size(self) -> int:
        """Entries of all leaves."""
        return sum(x.size for x in self.leaves)

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """The size of each part of `pack`, `[n]` float32 each.

        The last, of dense leaves, has one entry of 0 where there are none: XLA does not
        shard an array without entries, and states should not differ in structure.
        """
        return (*self.sizes, max(1, self.dense_size))

    def pack(self, tree: Any) -> tuple[jax.Array, ...]:
        """Return the parts of `tree`: buckets, then dense leaves, `[n]` float32."""
        leaves = jax.tree.leaves(tree)
        flat = [jnp.ravel(x) for x in self._chosen(leaves, True)]
        cut = lambda x: jax.lax.slice(flat[x.leaf], (x.start,), (x.stop,))
        parts = [list(map(cut, bucket)) for bucket in self.pieces]
        parts.append(self._chosen(leaves, False))
        return tuple(map(_arrays.ravel, parts, self.part_sizes))

    def cleared(self, buckets: Iterable[jax.Array]) -> tuple[jax.Array, ...]:
        """Return `buckets` with 0 in their padding, where rounding leaves something."""
        return tuple(map(_xla.zero_after, buckets, self._entries))

    def unpack(self, parts: tuple[jax.Array, ...], count: jax.Array) -> Any:
        """Undo `pack`: return the leaves in their own dtypes.

        Args:
          parts: the buckets, then the leaves that go dense.
          count: as for `_arrays.unravel`.
        """
        *buckets, dense = parts
        specs = self._chosen(self.leaves, True)
        cuts: list[list[jax.Array]] = [[] for _ in specs]
        pairs = zip(self.pieces, self.shapes, strict=True)
        for bucket, (pieces, shapes) in zip(buckets, pairs, strict=True):
            like = [
                jax.ShapeDtypeStruct(shape, specs[x.leaf].dtype)
                for x, shape in zip(pieces, shapes, strict=True)
            ]
            arrays = _arrays.unravel(bucket, like, count)
            for piece, x in zip(pieces, arrays, strict=True):
                cuts[piece.leaf].append(x)
        compressed = [
            cut[0] if len(cut) == 1 else _joined(cut, spec)
            for cut, spec in zip(cuts, specs, strict=True)
        ]
        rest = _arrays.unravel(dense, self._chosen(self.leaves, False), count)
        by_kind = {True: iter(compressed), False: iter(rest)}
        leaves = [next(by_kind[chosen]) for chosen in self.is_compressed]
        return jax.tree.unflatten(self.structure, leaves)

    def rounded(
        self, parts: tuple[jax.Array, ...], count: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Return `parts` as the leaves hold them in their own dtypes."""
        is_narrow = any(x.dtype != jnp.float32 for x in self.leaves)
        return self.pack(self.unpack(parts, count)) if is_narrow else parts

    def _chosen(self, leaves: Any, which: bool) -> list[Any]:
        pairs = zip(leaves, self.is_compressed, strict=True)
        return [x for x, is_compressed in pairs if is_compressed == which]


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
        _refuse.not_path_and_leaf(compress)
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
    if buckets.dense_size and not any(buckets.is_compressed):
        warnings.warn(
            f"gravac.transform compresses none of the {len(buckets.leaves)} leaves"
            f" ({buckets.dense_size:,} entries): all are one-dimensional or small."
            " Pass compress=True to compress all of them, or"
            " compress=gravac.matrices(min_entries=...).",
            stacklevel=2,
        )
