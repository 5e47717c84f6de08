"""Arithmetic on pytrees and vectors, in float32 and on the bits of float32.

Here is also how values and leaves are named in errors. Nothing here knows about
compression or optimizers.
"""

import dataclasses
import functools
import itertools
import json
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _xla

SMALLEST_NORMAL = 2.0**-126  # XLA may flush smaller numbers to zero
LARGEST_INT32 = 2**31 - 1
MANY = 200  # leaves; of more XLA makes a kernel that takes seconds to compile
MANY_ALIKE = 8  # leaves beyond the first of each size
LARGEST_BFLOAT16 = (2 - 2.0**-7) * 2.0**127  # a larger number rounds to infinity


def named_leaves(tree: Any, is_leaf: Any = None) -> list[tuple[str, Any]]:
    """Return the leaves of `tree`, each with a path such as `['dense']['kernel']`.

    A variable of Flax NNX adds nothing to the path of what it holds.
    """
    nnx = sys.modules.get("flax.nnx")  # which not everybody has
    pure = tree if nnx is None else nnx.as_pure(tree)
    leaves = jax.tree_util.tree_leaves_with_path(pure, is_leaf=is_leaf)
    return [(jax.tree_util.keystr(path) or "the tree itself", x) for path, x in leaves]


def is_shape(x: Any) -> bool:
    """Return whether `x` stands for an array, of which it has the shape and dtype."""
    return isinstance(x, jax.ShapeDtypeStruct)


def brief(value: Any) -> str:
    """Return what an error shows of a value, cut short: arrays may fill pages."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else f"{text[:116]} ..."


def constructor(x: Any) -> str:
    """Return how a dataclass is made, with what differs from the defaults.

    The first field goes by position. Of other classes no fields are known.
    """
    words = []
    fields = dataclasses.fields(x) if dataclasses.is_dataclass(x) else ()
    for i, field in enumerate(fields):
        value = getattr(x, field.name)
        if value != field.default:
            value = value.item() if hasattr(value, "item") else value  # of NumPy
            if isinstance(value, float) and value.is_integer():
                value = int(value)  # TopK(10.0) is TopK(10)
            shown = json.dumps(value) if isinstance(value, str) else repr(value)
            words.append(shown if i == 0 else f"{field.name}={shown}")
    return f"{type(x).__name__}({', '.join(words)})"


def ravel(leaves: list[jax.Array], size: int = 0) -> jax.Array:
    """Return the entries of all `leaves`, one leaf after the other: `[n]` float32.

    Zeros follow, if there are fewer than `size`.
    """
    flat = [jnp.ravel(x).astype(jnp.float32) for x in leaves]
    zeros = max(0, size - sum(x.size for x in flat))
    if zeros or not flat:
        flat.append(jnp.zeros(zeros, jnp.float32))
    join = jnp.concatenate
    # Else a reduction of the vector is one of each leaf, all in one kernel.
    return _xla.apart(join, flat) if len(flat) > MANY else join(flat)


def unravel(vector: jax.Array, like: Sequence[Any]) -> list[jax.Array]:
    """Undo `ravel`: return leaves with the shapes and dtypes of `like`.

    A value too large for a narrower dtype saturates, so a finite vector stays finite.

    Args:
      vector: `[n]` float32.
      like: the shapes and dtypes of the leaves.
    """
    sizes = [x.size for x in like]
    ends = list(itertools.accumulate(sizes, initial=0))

    def unknown(vector: jax.Array) -> list[jax.Array]:
        cut = lambda start, n: jax.lax.dynamic_slice(vector, (start,), (n,))
        return list(map(cut, _xla.unknown(ends[:-1]), sizes))

    fixed = lambda vector: jnp.split(vector, ends[1:])[:-1]
    if len(like) - len({*sizes}) > MANY_ALIKE and ends[-1] <= LARGEST_INT32:
        # CPUs compile one kernel for all leaves of one size.
        parts = jax.lax.platform_dependent(vector, cpu=unknown, default=fixed)
    else:
        parts = fixed(vector)
    pairs = zip(_xla.in_its_shape(parts), like, strict=True)
    return [_saturated(part.reshape(x.shape), x.dtype) for part, x in pairs]


def together(
    work: Callable[[jax.Array], jax.Array], arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    """Call `work` once, on all `arrays` joined along their last axes.

    The last axis of its result is as long, and is cut as the arrays were.
    """
    sizes = [x.shape[-1] for x in arrays]
    done = work(jnp.concatenate(arrays, axis=-1))
    return jnp.split(done, list(itertools.accumulate(sizes))[:-1], axis=-1)


def _saturated(x: jax.Array, dtype: Any) -> jax.Array:
    if jnp.finfo(dtype).bits < 32:
        largest = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)


PART_BITS = 11  # float32 adds up 2**13 parts of integers exactly


def exact_parts(x: jax.Array) -> list[jax.Array]:
    """Return float32 arrays whose sums over replicas give the sum of `x`."""
    if is_float(x):
        return [x.astype(jnp.float32)]
    x = x.astype(_unsigned(x.dtype))
    part = lambda shift: (x >> shift) & (2**PART_BITS - 1)
    return [part(shift).astype(jnp.float32) for shift in _shifts(x.dtype)]


def from_exact_parts(sums: list[jax.Array], like: jax.Array) -> jax.Array:
    """Undo `exact_parts` after adding up; an integer that is too large wraps around."""
    if is_float(like):
        return sums[0].astype(like.dtype)
    unsigned = _unsigned(like.dtype)
    pairs = zip(sums, _shifts(unsigned), strict=True)
    return total(x.astype(unsigned) << i for x, i in pairs).astype(like.dtype)


def _unsigned(dtype: Any) -> Any:
    return jnp.uint64 if jnp.iinfo(dtype).bits == 64 else jnp.uint32


def _shifts(dtype: Any) -> range:
    return range(0, jnp.iinfo(dtype).bits, PART_BITS)


def places(shape: tuple[int, ...]) -> jax.Array:
    """Return the place of each entry of an array, row by row: uint32, of its shape.

    Raveling a range would bring a sharded array to one device.
    """
    found = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        along = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        found = found * jnp.uint32(size % 2**32) + along
    return found


def is_float(x: Any) -> bool:
    """Return whether an array or a number is of real floating-point numbers."""
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def is_key(x: Any) -> bool:
    """Return whether `x` holds typed random keys."""
    return jnp.issubdtype(getattr(x, "dtype", float), jax.dtypes.prng_key)


def by_bits(put: Callable[[jax.Array], jax.Array], key: jax.Array) -> jax.Array:
    """Return keys whose bits are `put` of those of `key`, for what takes no keys."""
    impl = jax.random.key_impl(key)
    return jax.random.wrap_key_data(put(jax.random.key_data(key)), impl=impl)


def energy(x: jax.Array) -> jax.Array:
    """Return the squared norm of `x`, `[]` float32."""
    return jnp.sum(jnp.square(x.astype(jnp.float32)))


def total(parts: Iterable[jax.Array]) -> jax.Array:
    """Return the sum of one or more arrays."""
    return functools.reduce(operator.add, parts)


def is_bad(parts: Sequence[jax.Array], limit: float) -> jax.Array:
    """Return 1 if some entry of `parts` is NaN or reaches `limit`, else 0.

    The result is `[]` float32.
    """

    def look(parts: Sequence[jax.Array]) -> jax.Array:
        good = lambda x: jnp.min(jnp.where(jnp.abs(x) < limit, 1.0, 0.0), initial=1.0)
        return functools.reduce(jnp.minimum, map(good, parts)) > 0

    def look_if_large(parts: Sequence[jax.Array]) -> jax.Array:
        # The energy is computed anyway and mostly answers; on CPUs looking at every
        # entry costs another pass over memory, and a mask would take room, too. A
        # maximum may lose NaN: findings/jax_max_drops_nan_on_cpu.sh.
        whole = total(map(energy, parts))
        is_good = whole < limit**2
        most = lambda x: jnp.maximum(jnp.max(x, initial=0), -jnp.min(x, initial=0))
        within = lambda _: functools.reduce(jnp.maximum, map(most, parts)) < limit
        return _xla.only_if(~is_good & ~jnp.isnan(whole), within, is_good)

    is_good = jax.lax.platform_dependent(parts, cpu=look_if_large, default=look)
    return 1 - is_good.astype(jnp.float32)


def where(condition: jax.Array, x: Any, y: Any) -> Any:
    """Return `x` where `condition` (`[]` bool) holds, else `y`, leaf by leaf."""
    return jax.tree.map(lambda x, y: x if x is y else jnp.where(condition, x, y), x, y)


def draws(key: jax.Array) -> jax.Array:
    """Return the bits of a random key, `[2]` uint32, as two random numbers.

    They are random because the key came from `fold_in` or `split`. Do not use the key
    for anything else.
    """
    return jax.random.key_data(key)[:2]


def magnitude_bits(x: jax.Array) -> jax.Array:
    """Return the bits of float32 `x` without the sign: int32, in the order of |x|.

    Integer comparisons keep denormals, which float comparisons may flush to zero.
    """
    return jax.lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(0x7FFFFFFF)


def to_words(x: jax.Array, word: Any = jnp.uint32) -> jax.Array:
    """Return the bits of `x`, `[..., m]`, as words of another dtype: `[..., words]`.

    Where words are wider than entries, an odd one at the end is filled up with a zero.
    But for that, `.view(x.dtype)` undoes it.
    """
    each = max(1, jnp.dtype(word).itemsize // x.dtype.itemsize)
    whole = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % each)]
    return (jnp.pad(x, whole) if each > 1 else x).view(word)


def round_to_bfloat16(x: jax.Array) -> jax.Array:
    """Round float32 `x` to the nearest bfloat16, ties to even; keep it finite."""
    # XLA may leave out a cast there and back, but not this.
    x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return jnp.clip(x, -LARGEST_BFLOAT16, LARGEST_BFLOAT16)


def bfloat16_to_bits(x: jax.Array) -> jax.Array:
    """Return rounded float32 values as uint16, the upper half of their bits."""
    return (jax.lax.bitcast_convert_type(x, jnp.uint32) >> 16).astype(jnp.uint16)


def bfloat16_from_bits(bits: jax.Array) -> jax.Array:
    """Undo `bfloat16_to_bits`."""
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)
