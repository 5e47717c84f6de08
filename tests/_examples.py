"""What the laws are tried on: members of a registry, buckets, gradients, evidence."""

import dataclasses
import itertools
import math
from typing import Any

import _oracles
import jax.numpy as jnp
import numpy as np

import gravac_jax as gravac
from gravac_jax import Evidence


@dataclasses.dataclass(frozen=True)
class Slope:
    """A schedule with a name that is the same in every process."""

    begin: float
    rate: float

    def __call__(self, step: Any) -> Any:
        return self.begin * jnp.exp(jnp.float32(step) * math.log(self.rate))


@dataclasses.dataclass(frozen=True)
class Stairs:
    """A schedule that drops."""

    every: int
    share: float

    def __call__(self, step: Any) -> Any:
        return jnp.float32(self.share) ** jnp.float32(step // self.every)


# Of an all-gather whose entries are sent as they are.
WIDE = {"values": "float32", "indices": "int32"}

# For classes that need arguments, or are worth trying with several.
ARGUMENTS: dict[type, list[dict[str, Any]]] = {
    # Exact, with slots left empty, rounded; test_exchanges.py has other combinations.
    gravac.AllGather: [
        {"compressor": gravac.TopK(), **WIDE},
        WIDE,
        {},
    ],
    gravac.LeaderIndices: [{"compressor": gravac.TopK()}],
    gravac.DenseMean: [{"values": "bfloat16"}, {}],
    gravac.LowRank: [{}, {"values": "bfloat16"}],
    gravac.Mixed: [
        {"sparse_factors": (1000.0,), "few_bits": gravac.QuantizedAllReduce(32)},
        {"sparse_factors": (4.0,), "few_bits": gravac.Quantized(32)},
        {"few_bits": gravac.Quantized(32), "sparse": gravac.QuantizedTopK(2, 32)},
    ],
    gravac.Quantized: [{"row_entries": 32}, {"row_entries": 32, "least_bits": 1}],
    gravac.QuantizedAllReduce: [
        {"row_entries": 32},
        {"row_entries": 32, "least_bits": 1},
        {"row_entries": 32, "mean_bits": 4},
    ],
    gravac.QuantizedTopK: [
        {"row_entries": 32},
        {"row_entries": 32, "bits": 1},
    ],
    gravac.Steps: [{"optimizer": x} for x in _oracles.OPTIMIZERS],
    # Halves are exact.
    gravac.Momentum: [
        {"decay": 0.5, "nesterov": nesterov, "masking": masking}
        for nesterov in (False, True)
        for masking in (False, True)
    ],
    gravac.Accordion: [
        {"interval": 20, "threshold": 0.04},
        {
            "low": 4,
            "interval": 7,
            "threshold": 0.1,
            "learning_rate": Stairs(60, 0.5),
        },
        {"interval": 13, "threshold": 0.05, "learning_rate": Slope(0.1, 0.98)},
    ],
    gravac.Capped: [
        {
            "controller": gravac.GraVAC(epsilon=0.7, window=10, ladder=(1, 4, 16, 64)),
            "cap": Slope(2.5, 1.02),
        }
    ],
    gravac.Every: [
        {"steps": 3, "controller": gravac.Fixed(8)},
        {"steps": 2, "controller": gravac.GraVAC(epsilon=0.7, window=10)},
        {"steps": 1, "controller": gravac.Fixed(8)},
    ],
    gravac.Fastest: [
        {"ladder": (1, 4, 16, 64)},
        {
            "ladder": (1, 4, 16, 64),
            "least_progress": 0.8,
            "most_bytes": 1.0,
            "largest_at_shared": 16,
        },
        {"ladder": (1, 4, 16, 64), "rounds": (1, 3), "most_bytes": 100.0},
    ],
    gravac.Fixed: [{"factor": 100}],
    gravac.Scheduled: [
        {"schedule": Slope(0.7, 1.02), "ladder": (1, 10, 100)},
        {"schedule": Slope(200, 0.98), "ladder": (4, 16)},
    ],
    gravac.GraVAC: [
        {"epsilon": 0.7, "window": 10, "ladder": (1, 4, 16, 64)},
        {"epsilon": 0.9, "window": 7, "omega": 0.05, "smoothing": 0.5, "gain": "norm"},
        {"epsilon": 0.9, "window": 4, "ladder": (1, 10), "smoothing": 1.0},
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


HUGE = _random(30)
HUGE[17] = -(2.0**60)

# The situation, a bucket and a factor.
BUCKETS = {
    "gaussian": (_random(96), 6),
    "nothing divides": (_random(97), 6.5),
    "one entry": (_random(1), 10),
    "k is 1": (_random(30), 1000),
    "k is n": (_random(30), 1),
    "ties": (dyadic(30) // 4, 3),
    "constant": (np.full(30, -2.5, np.float32), 3),
    "one huge entry": (HUGE, 3),
    "denormals": (_random(30) * np.float32(2.0**-140), 3),
    "zeros of both signs": (np.copysign(np.float32(0), _random(30)), 3),
}

REPLICAS = 4  # a power of two, so that means of dyadic numbers are exact
LADDER = (1.0, 4.0, 1000.0)
# More bits than 16-bit values have; one replica has the largest entry.
EXCHANGED = dyadic(REPLICAS, 40, parts=64, seed=1)

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
) -> Evidence:
    """Return a run in which gains rise and fall for stretches of random length.

    Args:
      rungs: of the ladder.
      seed: of everything.
      steps: how many.
      measured_from: the first step with measured times, at random rungs; None for
        a run without any.
      first_sparse: the lowest rung that is not dense.
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
    measured, local = np.full((steps, rungs), np.nan), np.full(steps, np.nan)
    if measured_from is not None:
        now = np.arange(measured_from, steps, 3)
        at = rng.integers(0, rungs, now.size)
        measured[now, at] = seconds[at] * rng.lognormal(0, 0.05, now.size)
        local[now[1::2]] = 0.02 * rng.lognormal(0, 0.05, now[1::2].size)
    parts = np.stack([np.full(rungs, 0.02), *np.zeros((2, rungs)), seconds - 0.02], 1)
    to_float32 = lambda x: np.asarray(x, np.float32)
    fields: dict[str, Any] = {
        "step": np.arange(steps, dtype=np.int32),
        "replicas": REPLICAS,
        "first_sparse": np.full(steps, first_sparse, np.int32),
        "energies": to_float32(shares * noise * energy[:, None]),
        "energy": to_float32(energy),
        "gradient_energy": to_float32(energy / 2),
        "gradient_energies": to_float32(np.sqrt(shares) * energy[:, None] / 2),
        "predicted_parts": to_float32(np.tile(parts, (steps, 1, 1))),
        "measured_seconds": to_float32(measured),
        "local_seconds": to_float32(local),
        "steps": np.ones(steps, np.int32),
        "wire_bytes": np.tile(np.float32(1024) / 4 ** np.arange(rungs), (steps, 1)),
        "at_own_params": 3 * np.arange(steps) // steps == 1,
    }
    return Evidence(**fields)
