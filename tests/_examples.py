"""What the laws are tried on: members of a registry, buckets, gradients, evidence."""

import itertools
from typing import Any

import _oracles
import numpy as np

import gravac_jax as gravac
from gravac_jax import Evidence

FOUR = gravac.TopK.geometric(4, 64, 4)
# One bit needs own params: the last encoding here, and one between others there.
TO_ONE_BIT = (gravac.Dense(), gravac.Bits(8), gravac.Bits(2), gravac.Bits(1))
UNLIKE = (gravac.Dense(), gravac.Bits(2), gravac.Bits(1), gravac.TopK(100))

# Of entries that are sent as they are.
WIDE = {"values": "float32"}

# For classes that need arguments, or are worth trying with several.
ARGUMENTS: dict[type, list[dict[str, Any]]] = {
    gravac.Bits: [
        {"bits": 2, "turns": 3, "row_entries": 32},
        {"bits": 1, "row_entries": 32},
        {"bits": 2, "row_entries": 32},
        {"bits": 8},
        {"bits": 4},
    ],
    gravac.Dense: [{}, {"values": "bfloat16"}],
    gravac.LowRank: [{"rank": 1}, {"rank": 2}],
    gravac.TopK: [
        {"factor": factor, "select": select, **widths}
        for select, factor in (("threshold", 7), ("sampled", 8), ("exact", 9.5))
        for widths in ({}, WIDE)
    ],
    gravac.OwnOptimizer: [{"optimizer": x} for x in _oracles.OPTIMIZERS],
    # Halves are exact.
    gravac.Momentum: [
        {"decay": 0.5, "nesterov": nesterov, "masking": masking}
        for nesterov in (False, True)
        for masking in (False, True)
    ],
    gravac.Fastest: [
        {"ladder": FOUR},
        {"ladder": (gravac.Bits(2), gravac.TopK(100)), "least_progress": 0.8},
        {"ladder": UNLIKE, "least_progress": 0.9},
        {"ladder": TO_ONE_BIT},
    ],
    gravac.Scheduled: [
        {"ladder": FOUR, "starts": (0, 50, 250)},
        {"ladder": (gravac.Bits(2), gravac.TopK(100)), "starts": (101,)},
    ],
    gravac.GraVAC: [
        {"epsilon": 0.7, "window": 10, "ladder": FOUR},
        {"epsilon": 0.9, "window": 7, "omega": 0.05},
        {"epsilon": 0.9, "window": 4, "ladder": FOUR[:2]},
    ],
}


def members(registry: tuple[type, ...]) -> list[Any]:
    """Return an instance of each class, or several with different arguments."""
    return [kind(**x) for kind in registry for x in ARGUMENTS.get(kind, [{}])]


def one_of_each(registry: tuple[type, ...]) -> list[Any]:
    """Return the first instance of each class that `members` has."""
    return [members((kind,))[0] for kind in registry]


def _random(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def dyadic(*shape: int, parts: int = 8, seed: int = 0) -> np.ndarray:
    """Return float32 multiples of 1 / parts up to 8: their sums are exact."""
    integers = np.random.default_rng(seed).integers(-8 * parts, 8 * parts + 1, shape)
    return (integers / parts).astype(np.float32)


REPLICAS = 4  # a power of two, so that means of dyadic numbers are exact
# Enough entries for turns, spared leaves and matrices; no row length divides them.
ENTRIES = 1610
# More bits than 16-bit values have, and many ties.
EXACT = dyadic(REPLICAS, ENTRIES, parts=64, seed=1)
ROUGH = _random(REPLICAS * ENTRIES, seed=1).reshape(REPLICAS, ENTRIES)


def buckets_for(encoding: gravac.Encoding) -> np.ndarray:
    """Return buckets `[replicas, n]` whose sums are exact, if entries go whole."""
    return EXACT if encoding.sends_whole_entries else ROUGH


_NORMAL = _random(97)
_PLACES = np.arange(97)

# Buckets of one replica each, in which nothing divides the entries.
SITUATIONS = {
    "gaussian": np.stack([_NORMAL, -_NORMAL[::-1]]),
    "one entry": _random(1)[None],
    "seven entries": _random(7)[None],
    "ties": (dyadic(97) // 4)[None],
    "constant": np.full((1, 97), -2.5, np.float32),
    "mostly zero": np.where(_PLACES % 11, 0, _NORMAL)[None],
    "one huge entry": np.where(_PLACES == 17, np.float32(-(2.0**60)), _NORMAL)[None],
    "tiny": _NORMAL[None] * np.float32(1e-15),
    "denormals": _NORMAL[None] * np.float32(2.0**-140),
    "zeros of both signs": np.copysign(np.float32(0), _NORMAL)[None],
}

STEPS = 40
GRADIENTS = np.random.default_rng(1).integers(-9, 10, (STEPS, 12)).astype(np.float32)
# Entries come and go, and every fifth step is dense.
IS_SENT = np.random.default_rng(2).random((STEPS, 12)) < 0.3
IS_SENT[::5] = True


def evidence(
    rungs: int,
    seed: int,
    steps: int = 300,
    measured_from: int | None = None,
    first_sparse: int = 1,
    longest: int = 1,
) -> Evidence:
    """Return a run in which gains rise and fall for stretches of random length.

    Measured steps take eight times as long in the last third.

    Args:
      rungs: of the ladder.
      seed: of everything.
      steps: how many.
      measured_from: the first step with measured times, at random rungs; None for
        a run without any.
      first_sparse: the lowest rung that is not dense.
      longest: the most steps of a round, each of which ends with a step of this run.
    """
    rng = np.random.default_rng(seed)
    lengths = itertools.accumulate(rng.integers(20, 60, steps).tolist())
    ends = [end for end in lengths if end < steps]
    stretch = np.searchsorted(ends, np.arange(steps), side="right")
    # The energy sent falls along the ladder, in every stretch at another pace.
    falls = rng.beta(1, 6, (len(ends) + 1, rungs)) * rng.choice([0.02, 0.3, 1], rungs)
    falls[:, 0] = 0
    shares = np.cumprod(1 - falls, axis=1)[stretch]
    energy = rng.lognormal(0, 0.3, steps)
    noise = rng.uniform(0.98, 1.0, (steps, rungs)) ** (np.arange(rungs) > 0)
    seconds = 0.02 + 0.2 * rng.uniform(0.3, 0.9) ** np.arange(rungs)
    measured, local = np.zeros((steps, rungs)), np.zeros(steps)
    if measured_from is not None:
        now = np.arange(measured_from, steps, 3)
        at = rng.integers(0, rungs, now.size)
        measured[now, at] = seconds[at] * rng.lognormal(0, 0.05, now.size)
        measured[2 * steps // 3 :] *= 8  # the network has changed
        local[now[1::2]] = 0.02 * rng.lognormal(0, 0.05, now[1::2].size)
    rounds = rng.integers(1, longest + 1, steps, np.int32)
    parts = np.stack([np.full(rungs, 0.02), *np.zeros((2, rungs)), seconds - 0.02], 1)
    to_float32 = lambda x: np.asarray(x, np.float32)
    fields: dict[str, Any] = {
        "step": np.cumsum(rounds, dtype=np.int32) - 1,
        "replicas": 16 if seed == 1 else REPLICAS,
        "first_sparse": np.full(steps, first_sparse, np.int32),
        "energies": to_float32(shares * noise * energy[:, None]),
        "energy": to_float32(energy),
        "gradient_energy": to_float32(energy / 2),
        # No rung need send everything.
        "gradient_energies": to_float32(0.49 * np.sqrt(shares) * energy[:, None]),
        "predicted_parts": to_float32(np.tile(parts, (steps, 1, 1))),
        "measured_seconds": to_float32(measured),
        "local_seconds": to_float32(local),
        "round_steps": rounds,
        "at_own_params": 3 * np.arange(steps) // steps == 1,
    }
    return Evidence(**fields)
