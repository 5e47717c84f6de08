"""What XLA compiles worse than it could: each workaround, and the day it is not needed.

Every test compiles the plain spelling beside ours, for CPUs. If both are as good it
fails, and the workaround can go. What is for GPUs and TPUs is looked at in compiled
programs (`examples/benchmarks/programs`, `examples/benchmarks/accelerator`).
"""

import re

import jax
import jax.numpy as jnp
from _harness import AS_USERS

from gravac_jax import _xla

N = 2**16


def text(function, **options):
    """Return the compiled program of a function of `[N]` float32."""
    return jax.jit(function, **options).lower(jnp.zeros(N)).compile(AS_USERS).as_text()


def kernels(program):
    """Return the different kernels of a program, without names."""
    bodies = re.findall(r"^%fused_computation.*?\{\n(.*?)^\}", program, re.M | re.S)
    return {re.sub(r"%[\w.-]+|metadata=\{.*?\}", "", body) for body in bodies}


def test_slices_at_known_places_have_a_kernel_each():
    starts = list(range(0, N, N // 16))

    def cut(x, starts):
        return [jnp.sin(jax.lax.dynamic_slice(x, (i,), (100,))) for i in starts]

    ours = text(lambda x: cut(x, _xla.unknown(starts)))
    assert len(kernels(text(lambda x: cut(x, starts)))) == len(starts)
    assert len(kernels(ours)) < 4


def test_a_vector_that_others_read_is_copied_before_it_is_overwritten():
    def copies(change):
        def of(x):
            energy, top = jnp.sum(jnp.square(x)), jnp.max(jnp.abs(x))
            return change(jnp.where(jnp.abs(x) > 1, 0, x), energy, top), energy, top

        return text(of, donate_argnums=0).count(f" f32[{N}]{{0}} copy(")

    assert copies(lambda x, *_: x) == 1
    assert copies(_xla.after_reads) == 0


plain = lambda function, *args: function(*args)


def is_fused(both, codes, words):
    """Return whether one kernel has both operations, if so codes and words are made."""
    is_above = lambda rows, scale: (rows > scale[:, None, None]).astype(jnp.uint32)
    places = jnp.arange(32, dtype=jnp.uint32)[None, :, None]
    made = lambda *args: jnp.sum(codes(is_above, *args) << places, axis=1)

    def of(x):
        rows = x.reshape(16, 32, -1)
        scale = jnp.mean(jnp.abs(rows), axis=(1, 2))
        return jnp.append(words(made, rows, scale), scale.astype(jnp.uint32))

    return any(all(x in kernel for x in both) for kernel in kernels(text(of)))


def test_what_joins_an_array_is_fused_into_the_kernel_that_computes_it():
    assert is_fused(["concatenate(", "shift-left("], plain, plain)
    assert not is_fused(["concatenate(", "shift-left("], plain, _xla.apart)


def test_what_reads_entries_far_apart_is_fused_with_what_they_are_made_of():
    assert is_fused(["compare(", "shift-left("], plain, _xla.apart)
    assert not is_fused(["compare(", "shift-left("], _xla.in_bytes, _xla.apart)


def test_sums_of_several_arrays_need_these_in_memory():
    def in_memory(sums):
        def of(x):
            x = jnp.abs(x.reshape(64, -1))
            return sums(x, jnp.where(x > 1, x, 0), x > 1)

        return len(re.findall(r"= f32\[(?:65536|64,1024)\]\S* fusion\(", text(of)))

    assert in_memory(lambda *arrays: [jnp.float32(x).sum(1) for x in arrays]) == 3
    assert in_memory(_xla.row_sums) == 0


def test_zeros_at_the_end_are_written_into_what_a_kernel_makes():
    is_updated = lambda of: "dynamic-update-slice(" in text(lambda x: of(jnp.sin(x)))
    assert is_updated(lambda x: x.at[N - 9 :].set(0))
    assert not is_updated(lambda x: _xla.zero_after(x, N - 9))


def test_under_vmap_a_conditional_computes_both_branches():
    def primitives(conditional):
        step = lambda due, x: conditional(due, jnp.sin, x)
        made = jax.make_jaxpr(jax.vmap(step))(jnp.ones(4, bool), jnp.ones((4, 9)))
        return {x.primitive.name for x in made.jaxpr.eqns}

    assert "sin" in primitives(lambda due, f, x: jax.lax.cond(due, f, lambda x: x, x))
    assert "sin" not in primitives(_xla.only_if)
