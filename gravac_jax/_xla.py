"""What XLA compiles worse than it could, and how to write it instead.

Each function gives the result of the plain spelling in its first line. It says which
compiler needs it and why; `tests/test_xla.py` fails where CPUs no longer need one.
Found with jaxlib 0.10.2 (CPUs and, for CUDA, an H200) and libtpu 0.0.42. Where only the
order of operations differs between devices, `jax.lax.platform_dependent` stands beside
the computation.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata


def once(x: Any) -> Any:
    """Return `x`, which is then computed once.

    GPUs. XLA fuses what makes an array into everything that reads it, and computes it
    again for each: words of a mask for every entry that asks for its word. Programs for
    CPUs are the same without it.
    """
    return jax.lax.optimization_barrier(x)


def in_its_shape(x: Any) -> Any:
    """Return `x`, arrays which TPUs keep in memory in the shape that they have here.

    TPUs lay out arrays of other shapes otherwise. If XLA computed `x` in the shape of
    what reads it, what it is made of would first be laid out anew, in full: a vector
    once for each width of the matrices that are cut from it.
    """
    return jax.lax.platform_dependent(x, tpu=once, default=lambda x: x)


def only_if(predicate: jax.Array, change: Callable[[Any], Any], x: Any) -> Any:
    """Return `jax.lax.cond(predicate, change, lambda x: x, x)`.

    All devices. Under vmap a conditional computes both branches for every member of the
    batch. This loop of at most one turn costs nothing if no member needs the change.
    """
    body = lambda carry: (carry[0] & False, change(carry[1]))
    return jax.lax.while_loop(lambda carry: carry[0], body, (predicate, x))[1]


def chosen(predicate: jax.Array | bool, make: Callable[[], Any], otherwise: Any) -> Any:
    """Return `make() if predicate else otherwise`: arrays that vary over the same axes.

    Accelerators compute both: the host of a GPU would take longer to read the predicate
    than a cheap `make` takes.
    """
    if isinstance(predicate, bool):
        return make() if predicate else otherwise
    traced_once = jax.jit(make)
    branch = lambda: jax.lax.cond(predicate, traced_once, lambda: otherwise)
    both = lambda: jnp.where(predicate, traced_once(), otherwise)
    return jax.lax.platform_dependent(cpu=branch, default=both)


def after_reads(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return `x`, which CPUs compute last and in place of what it is made of.

    CPUs. XLA overwrites a vector in place only after everything that reads it has run;
    otherwise it copies it, which can cost more than a whole selection. A condition that
    XLA cannot simplify, computed from what others make of the vector, makes `x` wait
    for them. A barrier would not: it is gone before XLA assigns buffers.

    Args:
      x: computed from the vector.
      a: `[]` float32, at least 0, computed from the vector by another reader.
      b: like `a`, by one more.
    """
    in_place = lambda x: jnp.where(jnp.minimum(a, b) < 0, 0, x)
    return jax.lax.platform_dependent(x, cpu=in_place, default=lambda x: x)


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, which CPUs compile apart from what is around it.

    CPUs. XLA fuses what reshapes or joins an array into the kernel that computes it,
    and then divides indices for each entry, which takes up to ten times as long. It
    fuses nothing into a function that it is told not to inline.
    """
    traced_once = jax.jit(function)  # not once for every kind of device
    cpu = lambda *args: set_xla_metadata(traced_once(*args), inlineable="false")
    return jax.lax.platform_dependent(*args, cpu=cpu, default=traced_once)


def in_bytes(function: Callable[..., jax.Array], *args: Any) -> jax.Array:
    """Return `function(*args)`, uint32 below 256, which CPUs keep in memory as bytes.

    CPUs. What reads entries far apart, such as all that share a word, waits for memory
    at each of them. Bytes are made in the order of the entries, a quarter as many.
    """
    narrow = lambda *args: function(*args).astype(jnp.uint8)
    cpu = lambda *args: apart(narrow, *args).astype(jnp.uint32)
    return jax.lax.platform_dependent(*args, cpu=cpu, default=function)


def unknown(numbers: Sequence[int]) -> Sequence[jax.Array]:
    """Return `numbers`, `[]` uint32 each, which XLA does not know on CPUs.

    JAX counts signed places from the end, too, which is six operations more a slice.

    CPUs. XLA compiles a kernel for each slice at a place that it knows, 18 ms each, and
    one for all slices of one size at places that it does not know. It looks through
    barriers and sums, but not into a function that it is told not to inline.
    """
    return apart(lambda: tuple(map(jnp.uint32, numbers)))


def row_sums(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return the sums of the rows of several `[rows, ...]`, in float32, in one pass.

    Rows have a multiple of four entries.

    CPUs sum one array in a library that needs it in memory; sums of several at once are
    fused with what computes them. Rows are folded in four first, so that whole vectors
    are added. On a GPU the folded rows would go through memory.
    """
    zeros = [jnp.zeros((), jnp.float32)] * len(arrays)
    add = lambda a, b: [x + y for x, y in zip(a, b, strict=True)]

    def folded(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        folds = [x.reshape(len(x), 4, -1) for x in arrays]
        parts = jax.lax.reduce(folds, zeros, add, (1,))
        return tuple(jnp.sum(part, axis=1) for part in parts)

    def plain(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jnp.sum(x, axis=tuple(range(1, x.ndim))) for x in arrays)

    arrays = tuple(x.astype(jnp.float32) for x in arrays)
    return jax.lax.platform_dependent(*arrays, cpu=folded, default=plain)


def zero_after(x: jax.Array, filled: int) -> jax.Array:
    """Return `x.at[filled:].set(0)`.

    CPUs are slow to update a slice of what a kernel makes. Elsewhere a mask would be
    one more pass over what a branch returns.
    """
    if x.size <= filled:
        return x
    masked = lambda x: jnp.where(jnp.arange(x.size) < filled, x, 0)
    updated = lambda x: x.at[filled:].set(0)
    return jax.lax.platform_dependent(x, cpu=masked, default=updated)
