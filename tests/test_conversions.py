"""Loops as they are found, converted by what the documents say."""

import difflib
import functools
import re
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import gravac_jax as gravac

CONVERSIONS = Path(__file__).parents[1] / "examples" / "conversions"
STEPS = 6

README = (CONVERSIONS / "README.md").read_text()
# Lines taken out and put in, blank ones and docstrings apart.
HEADINGS = re.findall(r"^## .*: (\d+) lines out, (\d+) in$", README, re.MULTILINE)
NAMES = "pmap", "explicit", "shard_map", "jit", "train_state", "fsdp"


def source(name):
    return (CONVERSIONS / f"{name}.py").read_text()


def load(text, **names):
    """A program as a module, without running it."""
    module = types.ModuleType("conversion")
    exec(compile(text, "conversion.py", "exec"), vars(module))
    vars(module).update(names)
    return module


@pytest.fixture(autouse=True)
def settings(monkeypatch, standard_promotion, fast_keys):
    """Promotion as users have it, which these programs and Optax's Adam rely on."""
    monkeypatch.syspath_prepend(CONVERSIONS)  # for their models
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize(("name", "said"), [*zip(NAMES, HEADINGS, strict=True)])
def test_as_many_lines_change_as_the_page_says(name, said):
    sides = [source(f"{name}_{side}").splitlines() for side in ("before", "after")]
    diff = difflib.unified_diff(*sides, lineterm="", n=0)
    lines = [x for x in diff if re.match(r"[+-](?![+-])\s*\S", x)]
    program = [x for x in lines if not re.match(r'.("""|python examples)', x)]
    assert said == tuple(str(sum(x[0] == sign for x in program)) for sign in "-+")


# Of FSDP's many collectives those of eight devices on two cores may wait for each other
# until XLA's CPU backend ends the process.
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_dense_steps_give_the_same_losses_and_compressed_ones_train(name, monkeypatch):
    few_bits = gravac.Bits(4, row_entries=32)
    send = gravac.Scheduled((gravac.Dense(), few_bits), starts=(STEPS,))
    sending = functools.partial(gravac.transform, send=send)
    monkeypatch.setattr(gravac, "transform", sending)
    # Each replica's own gradient is clipped now, in place of their mean: see below.
    limits = {"fsdp": {"MAX_NORM": 1e9}, "train_state": {"DTYPE": jax.numpy.float32}}
    main = lambda side: load(source(f"{name}_{side}"), **limits.get(name, {})).main
    before, after = main("before")(STEPS), main("after")(25)
    # FSDP adds up in another order, and Adam divides by roots of next to nothing.
    np.testing.assert_allclose(after[:STEPS], before, rtol=1e-5)
    assert len(set(before)) == STEPS
    assert np.mean(after[-5:]) < 0.95 * np.mean(after[:5])
