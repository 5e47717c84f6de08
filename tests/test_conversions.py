"""Loops as they are found, converted by what the documents say, and gone wrong."""

import difflib
import functools
import re
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from _harness import ROWS

import gravac_jax as gravac

CONVERSIONS = Path(__file__).parents[1] / "examples" / "conversions"
TRANSFORM = gravac.transform
STEPS = 6

# Lines taken out or put in, blank ones and docstrings apart.
CHANGED = {
    "pmap": 7,
    "shard_map": 18,
    "fsdp": 25,
    "jit": 7,
    "linen": 7,
    "train_state": 9,
    "explicit": 8,
}


def source(name):
    return (CONVERSIONS / f"{name}.py").read_text()


def load(text, **names):
    """A program as a module, without running it."""
    module = types.ModuleType("conversion")
    exec(compile(text, "conversion.py", "exec"), vars(module))
    vars(module).update(names)
    return module


@pytest.fixture
def sends(monkeypatch):
    """Return what sets what a program's transform sends, such as what compiles fast."""
    use = functools.partial(monkeypatch.setattr, gravac, "transform")
    return lambda send: use(functools.partial(TRANSFORM, send=send))


@pytest.fixture(autouse=True)
def settings(monkeypatch, standard_promotion, fast_keys):
    """Promotion as users have it, which these programs and Optax's Adam rely on."""
    monkeypatch.syspath_prepend(CONVERSIONS)  # for their models
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("name", CHANGED)
def test_no_more_lines_change_than_it_took(name):
    sides = [source(f"{name}_{side}").splitlines() for side in ("before", "after")]
    diff = difflib.unified_diff(*sides, lineterm="", n=0)
    lines = [x for x in diff if re.match(r"[+-](?![+-])\s*\S", x)]
    program = [x for x in lines if not re.match(r'.("""|python examples)', x)]
    assert len(program) <= CHANGED[name]


# Of FSDP's many collectives those of eight devices on two cores may wait for each other
# until XLA's CPU backend ends the process.
@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGED)
def test_dense_steps_give_the_same_losses_and_compressed_ones_train(name, sends):
    few_bits = gravac.Bits(4, row_entries=32)
    sends(gravac.Scheduled((gravac.Dense(), few_bits), starts=(STEPS,)))
    # Each replica's own gradient is clipped now, in place of their mean: see below.
    limits = {"fsdp": {"MAX_NORM": 1e9}, "train_state": {"DTYPE": jax.numpy.float32}}
    main = lambda side: load(source(f"{name}_{side}"), **limits.get(name, {})).main
    before, after = main("before")(STEPS), main("after")(25)
    # FSDP adds up in another order, and Adam divides by roots of next to nothing.
    np.testing.assert_allclose(after[:STEPS], before, rtol=1e-5)
    assert len(set(before)) == STEPS
    assert np.mean(after[-5:]) < 0.95 * np.mean(after[:5])


def test_a_plain_jit_is_answered_with_what_to_do(sends):
    sends(ROWS)
    chain = "tx = optax.chain("
    told = f"import gravac_jax; {chain}gravac_jax.transform(), "
    text = source("fsdp_before")
    assert text.count(chain) == 1
    with pytest.raises(ValueError, match="not in a plain jit, where XLA has averaged"):
        load(text.replace(chain, told)).main(1)


def test_what_pmap_does_not_see_a_trace_on_a_mesh_does(sends):
    sends(ROWS)
    grads = "grads = grad_fn(state.params)\n"
    pmean = '    grads = jax.lax.pmean(grads, axis_name="batch")\n'
    mesh = jax.make_mesh((jax.device_count(),), ("batch",))

    def trace(text):
        program = load(text)
        state = jax.eval_shape(program.create_train_state, jax.random.key(0))
        state = gravac.place(state, mesh, "batch")
        step = gravac.data_parallel(program.train_step, mesh, "batch")
        batch = program.draw_images(np.random.default_rng(0), jax.device_count())
        return jax.eval_shape(step, state, batch)

    text = source("pmap_after")
    assert trace(text)[1]["loss"].shape == ()
    with pytest.raises(ValueError, match=r"remove any jax.lax.pmean"):
        trace(text.replace(grads, grads + pmean))
