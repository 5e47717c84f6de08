"""The cost model: how long a step takes at each rung, predicted and then learned.

`WireCost` predicts the seconds from bytes and messages. As soon as step times are
measured, a filter corrects them: a step is a sum of parts (compute, selection,
messages, bytes), and only the proportions of each part between rungs are kept of the
prediction. What a kind of step takes beyond these is a part that it alone has, its
extra, which may be negative. How long all of them really take is learned by Bayesian
linear regression that forgets, a Kalman filter. A single time at one rung does not tell
how it divides into parts. The filter then is uncertain about the other rungs, and that
gives a visit to them its worth.

Sums over parts are no matrix products, so that XLA makes a few kernels of all.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _arrays, _refuse

PARTS = 4  # compute, selection, messages, bytes
IS_COMPUTE = np.arange(PARTS) == 0

# All of these are arbitrary. Networks drift more than chips.
DRIFT = np.array([0.002, 0.002, 0.03, 0.03], "f")  # of a part in a step
EXTRA = 0.1  # of a step of its kind, before it is learned; it does not drift
LEAST_PART = 0.3  # of a step; a smaller part wanders as if it were this large

NOISE = 0.2  # relative standard deviation of a time, before any is measured
LEAST_NOISE = 0.01
NOISE_WEIGHT = 0.05  # of the newest time
OUTLIER = 3.0  # standard deviations that a single time may count for
SURPRISE_WEIGHT = 0.3  # of the newest time
ALARM = 2.2  # a surprise that four outliers in a row make
LEAST_SHARE = 0.02  # of the last time: no rung is predicted to take less


@dataclasses.dataclass(frozen=True)
class WireCost:
    """Predicts seconds from bytes and messages: the alpha-beta model.

    Measured step times (`update(..., step_seconds=...)`) correct it from the first one
    on; the proportions of each part between rungs stay.

    Args:
      bytes_per_second: bandwidth of one replica's link. Default: 1 Gbit/s, commodity
        Ethernet.
      latency_seconds: latency of one message. The default, 0.1 ms, is arbitrary.
      compute_seconds: length of a step without any exchange. The default, 10 ms, is
        arbitrary; it keeps the model from promising more speed than a step can give.
      selection_seconds: time that a step needs to encode what it sends. The default,
        1 ms, is arbitrary.

    Raises:
      ValueError: if a figure is negative or not a number.

    Example:
      >>> import gravac_jax as gravac
      >>> network = gravac.WireCost(latency_seconds=1e-3)
      >>> sum(network.parts(wire_bytes=12.5e6, messages=1, is_dense=True))
      0.111
    """

    bytes_per_second: float = 125e6
    latency_seconds: float = 1e-4
    compute_seconds: float = 1e-2
    selection_seconds: float = 1e-3

    def __post_init__(self) -> None:
        for name, x in vars(self).items():
            low, high = (1, 1e15) if name == "bytes_per_second" else (0, 1e6)
            _refuse.number(x, name, "see gravac.WireCost for units", low=low, high=high)

    def parts(
        self, wire_bytes: float, messages: float, is_dense: bool
    ) -> tuple[float, float, float, float]:
        """Return the seconds of compute, selection, messages and bytes in a step."""
        return (
            self.compute_seconds,
            0.0 if is_dense else self.selection_seconds,
            self.latency_seconds * messages,
            wire_bytes / self.bytes_per_second,
        )


class Timing(NamedTuple):
    """What is known about the parts, among which the extra of each kind of step counts.

    Attributes:
      scale: `[parts]` float32, seconds of each part at the rung that has most of it,
        the extras last; before the first time the prediction is used instead.
      covariance: `[parts, parts]` float32, the covariance of `scale`.
      noise: `[]` float32, the relative variance of a measured time.
      surprise: `[]` float32, the recent mean error in standard deviations, signed.
      times: `[]` int32, how many times were measured.
      seconds: `[]` float32, the last measured time.
      at: `[parts]` float32, the share of each part at the rung of that time.
    """

    scale: jax.Array
    covariance: jax.Array
    noise: jax.Array
    surprise: jax.Array
    times: jax.Array
    seconds: jax.Array
    at: jax.Array


class Seconds(NamedTuple):
    """The predicted seconds of steps, and how sure they are.

    Attributes:
      mean: `[kinds]` float32, for each kind of step, such as one at a rung.
      covariance: `[kinds, kinds]` float32, of the errors of `mean` with those of each
        kind; from `in_rounds` `[rungs, kinds]`.
    """

    mean: jax.Array
    covariance: jax.Array


def no_times(kinds: int) -> Timing:
    """Return the state before any time was measured of some kinds of steps."""
    return Timing(
        scale=jnp.ones(PARTS + kinds, jnp.float32),
        covariance=jnp.zeros((PARTS + kinds, PARTS + kinds), jnp.float32),
        noise=jnp.full((), NOISE**2, jnp.float32),
        surprise=jnp.zeros((), jnp.float32),
        times=jnp.zeros((), jnp.int32),
        seconds=jnp.zeros((), jnp.float32),
        at=jnp.zeros(PARTS + kinds, jnp.float32),
    )


def predict(timing: Timing, guess: jax.Array) -> Seconds:
    """Predict the seconds of each kind of step.

    Args:
      timing: the state.
      guess: `[kinds, parts]` float32, seconds by `WireCost`.
    """
    shares, scale = _shares(timing, guess)
    mean = jnp.maximum(_dot(shares, scale[None]), LEAST_SHARE * timing.seconds)
    with_parts = _dot(shares[:, None], timing.covariance[None])
    return Seconds(mean, _dot(with_parts[:, None], shares[None]))


def in_rounds(kinds: Seconds, steps: jax.Array) -> Seconds:
    """Predict the mean seconds of a step in rounds: an exchange, then local steps.

    Args:
      kinds: the seconds of a step that exchanges at each rung, and of a local one.
      steps: `[]` float32, how many steps a round has.

    Returns:
      The mean seconds, `[rungs]`, and their covariance with those of each kind,
      `[rungs, kinds]`.
    """
    return jax.tree.map(lambda x: (x[:-1] + (steps - 1) * x[-1:]) / steps, kinds)


def least_compute(timing: Timing) -> jax.Array:
    """Return a lower bound of the seconds of compute, `[]` float32; 0 if unknown."""
    deviation = jnp.sqrt(jnp.maximum(timing.covariance[0, 0], 0))
    least = jnp.maximum(timing.scale[0] - 2 * deviation, 0)
    return jnp.where(timing.times == 0, 0.0, least)


def observe(
    timing: Timing, guess: jax.Array, kind: jax.Array | int, seconds: jax.Array
) -> tuple[Timing, jax.Array]:
    """Learn from the time of a step.

    The first time sets the scale of all parts. An outlier counts for at most three
    standard deviations. Several outliers in a row mean that the network has changed, or
    that others have paused: all parts then follow the newest time, and are less known
    than after the first one. Otherwise what a pause has left is believed for ever.

    Args:
      timing: the state.
      guess: `[kinds, parts]` float32, seconds by `WireCost`.
      kind: `[]` int32, the row of the step in `guess`.
      seconds: `[]` float32, its time; nothing is learned from 0 or NaN.

    Returns:
      The new state, and whether the network has changed, `[]` bool.
    """
    is_first, is_time = timing.times == 0, seconds > 0  # False for NaN
    seconds = jnp.where(is_time, seconds, 1.0)
    shares, scale = _shares(timing, guess)
    at = shares[kind]
    guessed = _dot(at, scale)
    scale *= jnp.where(is_first & (guessed > 0), seconds / guessed, 1.0)
    # Any part may be all of a step, unless no rung has any of it.
    whole = jnp.where(jnp.any(shares[:, :PARTS] > 0, axis=0), seconds, 0)
    expected = jnp.maximum(_dot(at, scale), LEAST_SHARE * seconds)
    # An extra is scaled as the parts are where the network has changed.
    whole = jnp.append(whole, EXTRA * seconds / expected * _dot(shares, scale[None]))
    # A part that was believed to be zero may turn out not to be.
    drift = jnp.maximum(jnp.clip(scale, 0, seconds / at), LEAST_PART * whole)
    drift *= np.pad(DRIFT, (0, len(guess)))
    covariance = timing.covariance + jnp.diag(jnp.square(drift))
    covariance += jnp.diag(jnp.square(jnp.where(is_first, whole, 0.0)))

    share = at / expected
    with_time = _dot(covariance, share[None])
    deviation = jnp.sqrt(_dot(with_time, share) + timing.noise)
    error = (seconds / expected - _dot(share, scale)) / deviation
    error = jnp.clip(error, -OUTLIER, OUTLIER)
    surprise = (1 - SURPRISE_WEIGHT) * timing.surprise + SURPRISE_WEIGHT * error
    is_alarm = jnp.abs(surprise) > ALARM
    moved = with_time / deviation
    scale = jnp.where(is_alarm, scale * seconds / expected, scale + moved * error)
    covariance -= jnp.outer(moved, moved)
    covariance = jnp.where(is_alarm, jnp.diag(jnp.square(whole)), covariance)
    scale, covariance = _positive(scale, covariance)
    learned = Timing(
        scale=scale,
        covariance=covariance,
        noise=_noise(timing, at, seconds),
        surprise=jnp.where(is_alarm, 0.0, surprise),
        times=timing.times + 1,
        seconds=seconds,
        at=at,
    )
    # If float32 was not enough, begin again.
    is_sound = jnp.isfinite(jnp.sum(learned.scale) + jnp.sum(learned.covariance))
    learned = _arrays.where(is_sound, learned, no_times(len(guess)))
    return _arrays.where(is_time, learned, timing), is_time & is_alarm


def _noise(timing: Timing, at: jax.Array, seconds: jax.Array) -> jax.Array:
    """Learn the noise from two times in a row at one rung, which need no model."""
    is_pair = (timing.times > 0) & jnp.all(timing.at == at)
    change = 2 * (seconds - timing.seconds) / (seconds + timing.seconds)
    seen = jnp.minimum(jnp.square(change) / 2, OUTLIER**2 * timing.noise)
    weight = jnp.where(is_pair, NOISE_WEIGHT, 0.0)
    return jnp.maximum(timing.noise + weight * (seen - timing.noise), LEAST_NOISE**2)


def _positive(scale: jax.Array, covariance: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Move the most negative of the four half the way to 0, and what goes with it."""
    i = jnp.argmin(scale[:PARTS])
    with_part, variance = covariance[i], covariance[i, i]
    root = jnp.where((scale[i] < 0) & (variance > 0), jnp.sqrt(0.5 / variance), 0.0)
    moved = with_part * root
    return scale - moved * root * scale[i], covariance - jnp.outer(moved, moved)


def _shares(timing: Timing, guess: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the share of each part at each rung, at most 1, and seconds of the parts.

    Compute is the same at all rungs, whatever was predicted. An extra is a part of one
    kind of step alone.
    """
    largest = jnp.max(guess, axis=0)
    shares = guess / jnp.where(largest > 0, largest, 1)[None]
    shares = jnp.where(IS_COMPUTE[None], 1, shares)
    first = jnp.pad(largest, (0, len(guess)))
    scale = jnp.where(timing.times == 0, first, timing.scale)
    alone = jnp.eye(len(guess), dtype=jnp.float32)
    return jnp.concatenate([shares, alone], axis=1), scale


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the sum of products over the parts, the last axis of both."""
    return jnp.sum(a * b, axis=-1)
