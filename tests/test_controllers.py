"""Every controller keeps every law; GraVAC climbs, falls back and settles."""

from contextlib import nullcontext

import _examples
import _harness
import _laws
import jax
import numpy as np
import pytest

import gravac_jax as gravac
from gravac_jax._controllers import CONTROLLERS

UNTIL_THE_TOP = {"window": 5, "ladder": _examples.FOUR}

EXAMPLES = _examples.members(CONTROLLERS)
GRAVACS = [x for x in EXAMPLES if isinstance(x, gravac.GraVAC)]
FASTEST = [x for x in EXAMPLES if isinstance(x, gravac.Fastest)]
RUNS = {
    "predicted": {},
    "measured": {"measured_from": 0},
    "measured later": {"measured_from": 90},
    "in rounds": {"measured_from": 90, "longest": 3},
}
# To trace and to compile, no run is special.
ONE_RUN_DOES = (_laws.compiles_once, _laws.decides_alike)
RUNS_OF = {law: ["in rounds"] for law in ONE_RUN_DOES} | {
    _laws.survives_overflow: ["predicted", "measured"]  # it repeats the first step
}
CASES = [
    pytest.param(law, run, id=f"{law.__name__}-{run}")
    for law in _laws.CONTROLLER_LAWS
    for run in RUNS_OF.get(law, ["predicted", "in rounds"])
]
# Those whose ladders have an encoding that needs own params; others in the slow run.
in_every_choice = lambda every: _harness.choices(
    every, lambda x: x not in FASTEST[:-2], repr
)


def steady(gain, steps=60):
    """Return evidence of falling seconds that stays as it is; `gain` per rung."""
    shares = np.broadcast_to(np.float32(gain), 4).copy()
    shares[0] = 1
    parts = np.outer(np.float32([8, 4, 2, 1]), np.eye(4, dtype=np.float32)[0])
    return _examples.evidence(4, seed=0, steps=steps)._replace(
        energies=np.tile(shares, (steps, 1)),
        energy=np.ones(steps, np.float32),
        predicted_parts=np.tile(parts, (steps, 1, 1)),
    )


@pytest.mark.parametrize(("law", "run"), CASES)
@pytest.mark.parametrize("controller", in_every_choice(EXAMPLES))
def test_every_controller_keeps_the_law(controller, law, run):
    law(controller, _examples.evidence(len(controller.ladder), seed=3, **RUNS[run]))


@pytest.mark.parametrize("seed", _harness.choices((*range(8), 9, 11), lambda x: x < 2))
@pytest.mark.parametrize("controller", in_every_choice([*GRAVACS, *FASTEST]))
def test_it_decides_like_its_oracle_over_many_runs(controller, seed):
    for run in RUNS.values():
        evidence = _examples.evidence(len(controller.ladder), seed, **run)
        _laws.decides_like_its_oracle(controller, evidence)


@pytest.mark.parametrize("first_sparse", [2, 4])
@pytest.mark.parametrize("controller", GRAVACS, ids=repr)
def test_rungs_that_are_dense_by_another_name_are_left_out(controller, first_sparse):
    rungs = len(controller.ladder)
    evidence = _examples.evidence(rungs, 5, 300, 90, first_sparse)
    _laws.decides_like_its_oracle(controller, evidence)
    taken, _ = _laws.decided(controller, evidence)
    assert not ((taken > 0) & (taken < min(first_sparse, rungs - 1))).any()


# The first window tries the second compressed rung; the next one the top.
CLIMBS, IS_DENSE = [2] * 5 + [3] * 55, [0] * 60


@pytest.mark.parametrize(
    ("gain", "options", "rungs"),
    [
        pytest.param(1.0, {}, CLIMBS, id="a gain of 1 climbs"),
        pytest.param(0.0, {}, IS_DENSE, id="a gain of 0 goes dense at once"),
        pytest.param([1, 0.5, 0.5, 0.5], {"epsilon": 0.5}, CLIMBS, id="just enough"),
        pytest.param([1, 0.5, 0.25, 0.25], {"epsilon": 0.5}, [1] * 60, id="for one"),
        pytest.param(0.49, {"epsilon": 0.6}, IS_DENSE, id="as an energy"),
    ],
)
def test_gravac_climbs_a_rung_a_window_while_the_gain_allows_it(gain, options, rungs):
    controller = gravac.GraVAC(**UNTIL_THE_TOP, **options)
    taken, state = _laws.decided(controller, steady(gain))
    assert taken.tolist() == rungs
    assert state.moved(controller.init()[1]).candidate == 2  # it searches anew


# What float32 cannot hold


FEW_BITS = (gravac.Dense(), gravac.Bits(4))


@pytest.mark.parametrize(
    "controller", [gravac.Fastest(FEW_BITS), gravac.GraVAC(FEW_BITS)], ids=repr
)
def test_gradients_whose_squares_vanish_go_dense(controller):
    tx = gravac.transform(None, send=controller, network=gravac.WireCost(1e6))
    grads = np.random.default_rng(0).normal(size=(128, 128)).astype("f")
    update = jax.jit(tx.update)
    assert update(grads, tx.init(grads))[1].info.gain > 0
    for size in (1e-20, 1e-30):
        small = np.float32(size) * grads
        state = tx.init(small)
        for _ in range(10):
            updates, state = update(small, state)
        assert (float(state.info.factor), float(state.info.gain)) == (1, 0)
        assert np.array_equal(updates, small)
        assert not np.any(state.local.memory[0].residual)


# Times that nobody tells


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("send", [gravac.Fastest(FEW_BITS), gravac.Bits(4)], ids=repr)
def test_a_controller_says_once_that_it_guesses_times(send):
    grads = np.ones((128, 128), np.float32)

    def updated(seconds=None, **others):
        tx = gravac.transform(None, send=send, **others)
        jax.eval_shape(tx.update, grads, tx.init(grads), step_seconds=seconds)

    updated(np.float32(np.nan))  # one is coming
    updated(network=gravac.WireCost())
    warns = pytest.warns(UserWarning, match=r"Fastest is told no step times.*StepClock")
    with warns if isinstance(send, gravac.Fastest) else nullcontext([]) as said:
        updated()
    assert len(said) == isinstance(send, gravac.Fastest)
