"""Every controller keeps every law; GraVAC climbs, falls back and settles."""

import _examples
import _harness
import _laws
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gravac_jax as gravac
from gravac_jax._controllers import CONTROLLERS

UNTIL_THE_TOP = {"window": 5, "smoothing": 0.3, "ladder": _examples.FOUR}

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


def steady(gain, *, seconds=(8.0, 4.0, 2.0, 1.0), measured=None, steps=60):
    """Return evidence that stays as it is; `gain` and `seconds` per rung."""
    rungs = len(_examples.FOUR)
    shares = np.broadcast_to(np.float32(gain), (rungs,)).copy()
    shares[0] = 1
    measured = np.full(rungs, np.nan) if measured is None else measured
    one = _examples.evidence(rungs, seed=0, steps=steps)
    return _laws.steady(
        one._replace(
            energies=np.tile(shares, (steps, 1)),
            energy=np.ones(steps, np.float32),
            predicted_parts=np.tile(
                np.outer(np.float32(seconds), np.eye(4)[0]), (steps, 1, 1)
            ).astype(np.float32),
            measured_seconds=np.tile(np.float32(measured), (steps, 1)),
        )
    )


@pytest.mark.parametrize(("law", "run"), CASES)
@pytest.mark.parametrize("controller", in_every_choice(EXAMPLES))
def test_every_controller_keeps_the_law(controller, law, run):
    rungs = len(controller.ladder)
    law(controller, _examples.evidence(rungs, seed=8, **RUNS[run]))


@pytest.mark.parametrize("seed", _harness.choices(range(10), lambda x: x < 2))
@pytest.mark.parametrize("controller", in_every_choice([*GRAVACS, *FASTEST]))
def test_it_decides_like_its_oracle_over_many_runs(controller, seed):
    for run in RUNS.values():
        evidence = _examples.evidence(len(controller.ladder), seed, **run)
        _laws.decides_like_its_oracle(controller, evidence)


@pytest.mark.parametrize("first_sparse", [2, 4])
@pytest.mark.parametrize("controller", GRAVACS, ids=repr)
def test_rungs_that_are_dense_by_another_name_are_left_out(controller, first_sparse):
    rungs = len(controller.ladder)
    evidence = _examples.evidence(rungs, 2, 300, 90, first_sparse)
    _laws.decides_like_its_oracle(controller, evidence)
    taken, _ = _laws.decided(controller, evidence)
    assert not ((taken > 0) & (taken < min(first_sparse, rungs - 1))).any()


def test_a_gain_of_1_climbs_to_the_top_one_rung_a_window():
    rungs, _ = _laws.decided(gravac.GraVAC(**UNTIL_THE_TOP), steady(1.0))
    # The first window tries the second compressed rung; the next one the top.
    assert rungs.tolist() == [2] * 5 + [3] * 55


def test_a_gain_of_0_goes_dense_at_once_and_stays():
    rungs, _ = _laws.decided(gravac.GraVAC(**UNTIL_THE_TOP), steady(0.0))
    assert not rungs.any()


@pytest.mark.parametrize(
    ("gain", "rungs"),
    [
        ([1, 0.5, 0.5, 0.5], [2] * 5 + [3] * 55),
        ([1, 0.5, 0.25, 0.25], [1] * 60),
    ],
)
def test_epsilon_itself_is_enough(gain, rungs):
    controller = gravac.GraVAC(epsilon=0.5, gain="energy", **UNTIL_THE_TOP)
    assert _laws.decided(controller, steady(gain))[0].tolist() == rungs


@pytest.mark.parametrize(("kind", "rung"), [("norm", 3), ("energy", 0)])
def test_a_norm_is_the_root_of_an_energy(kind, rung):
    controller = gravac.GraVAC(epsilon=0.6, gain=kind, **UNTIL_THE_TOP)
    rungs, _ = _laws.decided(controller, steady(0.49))
    assert rungs[-1] == rung


def test_like_throughputs_settle_on_the_lower_rung_and_stay():
    evidence = steady(1.0, seconds=[8.0, 4.0, 2.0, 1.99])
    evidence.predicted_parts[30:, :, 0] = [8.0, 4.0, 2.0, 0.1]  # too late
    rungs, states = _laws.decided(gravac.GraVAC(**UNTIL_THE_TOP), evidence)
    assert rungs.tolist() == [2] * 5 + [3] * 5 + [2] * 50
    assert states.is_settled.tolist() == [False] * 9 + [True] * 51


@pytest.mark.parametrize(("seconds", "is_settled"), [(1.45, True), (1.8, False)])
def test_throughputs_are_compared_relative_to_the_lower_one(seconds, is_settled):
    # One throughput is `seconds` times the other; over the higher one both would do.
    controller = gravac.GraVAC(omega=0.5, **UNTIL_THE_TOP)
    evidence = steady(1.0, seconds=[8.0, 4.0, seconds, 1.0])
    assert _laws.decided(controller, evidence)[1].is_settled[-1] == is_settled


def test_the_first_measured_time_clears_what_was_predicted():
    controller = gravac.GraVAC(**UNTIL_THE_TOP)
    calm = steady(1.0)
    calm.measured_seconds[12:, 3] = 0.5
    _, states = _laws.decided(controller, calm)
    assert states.throughputs[11].tolist() == [0, 0, 0.5, 1]
    assert states.throughputs[12].tolist() == [0, 0, 0, 2]
    assert states.is_measured.tolist() == [False] * 12 + [True] * 48


def test_a_late_time_is_credited_to_its_own_rung():
    evidence = steady([1, 0.64, 0.36, 0.25], measured=[np.nan, 2.0, np.nan, np.nan])
    _, states = _laws.decided(gravac.GraVAC(gain="norm", **UNTIL_THE_TOP), evidence)
    table = states.throughputs[-1]
    assert table[[0, 2, 3]].tolist() == [0, 0, 0]
    assert table[1] == np.float32(0.8) / 2


def test_the_smoothing_of_the_paper_is_a_hundredth_a_replica():
    # After gain 1 for a while, gain 0: with weight N / 100 the average halves after
    # log(1 / 2) / log(1 - N / 100) steps.
    evidence = steady(1.0, steps=60)._replace(replicas=8)
    evidence.energies[20:, 1:] = 0
    controller = gravac.GraVAC(_examples.FOUR, epsilon=0.5, window=1000)
    rungs, states = _laws.decided(controller, evidence)
    gain = states.averages.sent[:, 2] / states.averages.total
    first_dense = int(np.argmax(gain < 0.5))
    assert rungs[:first_dense].all()
    assert not rungs[first_dense:].any()
    # The averages start at zero, so 20 steps at 1 weigh 1 - 0.92**20 of themselves.
    weights = 1 - 0.92 ** np.arange(1, 61)
    expected = np.argmax(weights[19] * 0.92 ** np.arange(-19, 41) < 0.5 * weights)
    assert first_dense == expected


# Accordion. -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "rungs"),
    [
        # A decision takes effect at the third step after it.
        (
            lambda step: jnp.where(step < 40, 0.1, 0.01),
            [0] * 9 + [1] * 28 + [0] * 5 + [1] * 18,
        ),
        # But for the last few steps, on its way to 0.
        (lambda step: 1 + jnp.cos(jnp.pi * step / 70), [0] * 9 + [1] * 51),
    ],
    ids=["a drop", "a smooth fall"],
)
def test_accordion_sends_less_where_norms_stay_and_more_after_a_drop(rate, rungs):
    learning_rate = lambda step: jnp.float32(rate(jnp.float32(step)))
    controller = gravac.Accordion(interval=5, learning_rate=learning_rate)
    assert _laws.decided(controller, steady(1.0))[0].tolist() == rungs


def test_accordion_sends_more_where_the_norm_has_halved():
    evidence = steady(1.0)
    energy = np.where(np.arange(60) < 33, 1, 0.2).astype(np.float32)
    changed = evidence._replace(gradient_energy=energy)
    rungs, _ = _laws.decided(gravac.Accordion(interval=10), changed)
    # 0.2 has a norm of 0.45: over the fourth interval 0.61 of the third's, then 0.73.
    assert rungs.tolist() == [0] * 19 + [1] * 41
    low = gravac.Accordion(interval=10, threshold=0.3)
    rungs, _ = _laws.decided(low, changed)
    assert rungs.tolist() == [0] * 19 + [1] * 20 + [0] * 10 + [1] * 11


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gravac.Accordion(_examples.FOUR), "must have 2 encodings"),
        (lambda: gravac.Accordion(interval=0), "`interval` must be"),
        (lambda: gravac.Accordion(threshold=0), "`threshold` must be"),
        (lambda: gravac.Accordion(learning_rate=0.1), "`learning_rate` must be"),
        (lambda: gravac.Scheduled(_examples.FOUR, (5, 3, 7)), "`starts` must be"),
        (lambda: gravac.Scheduled(_examples.FOUR, (5, 7)), "`starts` must be"),
        (lambda: gravac.GraVAC(_examples.FOUR[1:]), "must begin with gravac.Dense"),
    ],
)
def test_a_wrong_argument_is_named(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


# What float32 cannot hold


FEW_BITS = (gravac.Dense(), gravac.Bits(4))


@pytest.mark.parametrize(
    "controller", [gravac.Fastest(FEW_BITS), gravac.GraVAC(FEW_BITS)], ids=repr
)
def test_gradients_whose_squares_vanish_go_dense(controller):
    tx = gravac.transform(None, send=controller, network=gravac.WireCost(1e6))
    grads = np.random.default_rng(0).normal(size=(128, 128)).astype("f")
    update = jax.jit(tx.update)
    _, usual = update(grads, tx.init(grads))
    assert float(usual.info.gain) > 0
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
        return jax.eval_shape(tx.update, grads, tx.init(grads), step_seconds=seconds)

    updated(np.float32(np.nan))  # one is coming
    updated(network=gravac.WireCost())
    if isinstance(send, gravac.Fastest):
        with pytest.warns(
            UserWarning, match=r"Fastest is told no step times.*StepClock"
        ):
            updated()
    else:
        updated()
