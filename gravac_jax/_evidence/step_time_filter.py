"""The step-time filter: learn the seconds of a step at every rung while training.

A step is a sum of parts: compute, selection, messages, bytes. The cost model predicts
each part at each rung; only the proportions between rungs are kept. How long each part
really takes is learned by Bayesian linear regression that forgets: a Kalman filter of
four numbers. A single time at one rung does not tell how it divides into parts. The
filter then is uncertain about the other rungs, and that gives a visit to them its
worth.

Sums over the four parts are written out, so that XLA makes a few kernels of it all.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays

PARTS = ("compute", "selection", "messages", "bytes")
COMPUTE = (1.0, 0.0, 0.0, 0.0)

# All of these are arbitrary. Networks drift more than chips.
DRIFT = (0.002, 0.002, 0.03, 0.03)  # how far a part wanders in a step, as a share of it
LEAST_PART = 0.3  # of a step; a smaller part wanders as if it were this large
JUMP = (0.3, 0.3, 1.0, 1.0)  # the share of a step that a part may be after a surprise

NOISE = 0.2  # relative standard deviation of a time, before any is measured
LEAST_NOISE = 0.01
NOISE_WEIGHT = 0.05  # of the newest time
OUTLIER = 3.0  # standard deviations that a single time may count for
SURPRISE_WEIGHT = 0.3  # of the newest time
ALARM = 2.2  # a surprise that four outliers in a row make
LEAST_SHARE = 0.02  # of the last time: no rung is predicted to take less


class Timing(NamedTuple):
    """What is known about the parts.

    Attributes:
      scale: `[parts]` float32, seconds of each part at the rung that has most of it;
        before the first time the prediction is used instead.
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


class Predicted(NamedTuple):
    """The predicted seconds of a step at every rung.

    Attributes:
      seconds: `[rungs]` float32.
      covariance: `[rungs, rungs]` float32, the covariance of `seconds`.
    """

    seconds: jax.Array
    covariance: jax.Array


def no_times() -> Timing:
    """Return the state before any time was measured."""
    parts = len(PARTS)
    return Timing(
        scale=jnp.ones(parts, jnp.float32),
        covariance=jnp.zeros((parts, parts), jnp.float32),
        noise=jnp.full((), NOISE**2, jnp.float32),
        surprise=jnp.zeros((), jnp.float32),
        times=jnp.zeros((), jnp.int32),
        seconds=jnp.zeros((), jnp.float32),
        at=jnp.zeros(parts, jnp.float32),
    )


def predict(timing: Timing, guess: jax.Array) -> Predicted:
    """Predict the seconds of each rung, and the covariance of their errors.

    Args:
      timing: the state.
      guess: `[rungs, parts]` float32, seconds by the cost model.
    """
    shares, scale = _normal(timing, guess)
    seconds = jnp.maximum(_dot(shares, scale[None]), LEAST_SHARE * timing.seconds)
    with_parts = _dot(shares[:, None], timing.covariance[None])
    return Predicted(seconds, _dot(with_parts[:, None], shares[None]))


def in_rounds(kinds: Predicted, steps: jax.Array) -> Predicted:
    """Predict the mean seconds of a step in rounds: an exchange, then local steps.

    Args:
      kinds: the seconds of a step that exchanges at each rung, and of a local one.
      steps: `[rounds]` float32, how many steps a round has.

    Returns:
      The mean seconds, `[rounds * rungs]`, and their covariance with those of each
      kind, `[rounds * rungs, kinds]`.
    """

    def mean(of: jax.Array) -> jax.Array:
        each = steps.reshape(-1, *[1] * of.ndim)
        means = (of[None, :-1] + (each - 1) * of[None, -1:]) / each
        return means.reshape(-1, *of.shape[1:])

    return Predicted(mean(kinds.seconds), mean(kinds.covariance))


def least_compute(timing: Timing) -> jax.Array:
    """Return a lower bound of the seconds of compute, `[]` float32; 0 if unknown."""
    deviation = jnp.sqrt(jnp.maximum(timing.covariance[0, 0], 0))
    least = jnp.maximum(timing.scale[0] - 2 * deviation, 0)
    return jnp.where(timing.times == 0, 0.0, least)


def observe(
    timing: Timing, guess: jax.Array, rung: jax.Array | int, seconds: jax.Array
) -> tuple[Timing, jax.Array]:
    """Learn from the time of a step.

    The first time sets the scale of all parts. An outlier counts for at most three
    standard deviations. Several outliers in a row mean that the network has changed,
    and what was known about it counts less.

    Args:
      timing: the state.
      guess: `[rungs, parts]` float32, seconds by the cost model.
      rung: `[]` int32, the row of the step in `guess`.
      seconds: `[]` float32, its time; nothing is learned from NaN.

    Returns:
      The new state, and whether the network has changed, `[]` bool.
    """
    is_first = timing.times == 0
    shares, start = _normal(timing, guess)
    at = shares[rung]
    guessed = _dot(at, start)
    ratio = jnp.where(guessed > 0, seconds / guessed, 1.0)
    scale = start * jnp.where(is_first, ratio, 1.0)
    nothing_guessed = is_first & ~(guessed > 0)
    scale += _each(COMPUTE) * jnp.where(nothing_guessed, seconds, 0.0)
    # Any part may be all of a step, unless no rung has any of it.
    whole = seconds * jnp.any(shares > 0, axis=0).astype(jnp.float32)
    limit = jnp.where(at > 0, seconds / jnp.where(at > 0, at, 1), jnp.inf)
    likely = jnp.clip(scale, 0, jnp.maximum(limit, 0))
    # A part that was believed to be zero may turn out not to be.
    drift = _each(DRIFT) * jnp.maximum(likely, LEAST_PART * whole)
    covariance = timing.covariance + _diagonal(drift)
    covariance += _diagonal(jnp.where(is_first, whole, 0.0))

    expected = jnp.maximum(_dot(at, scale), LEAST_SHARE * seconds)
    share = at / expected
    with_time = _dot(covariance, share[None])
    variance = _dot(with_time, share) + timing.noise
    error = (seconds / expected - _dot(share, scale)) / jnp.sqrt(variance)
    error = jnp.clip(error, -OUTLIER, OUTLIER)
    moved = with_time / jnp.sqrt(variance)
    scale += moved * error
    covariance -= jnp.outer(moved, moved)
    scale, covariance = _positive_scale(scale, covariance)

    surprise = (1 - SURPRISE_WEIGHT) * timing.surprise + SURPRISE_WEIGHT * error
    is_alarm = jnp.abs(surprise) > ALARM
    covariance += _diagonal(jnp.where(is_alarm, _each(JUMP) * whole, 0.0))
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
    learned = _arrays.where(is_sound, learned, no_times())
    is_time = seconds > 0  # False for NaN
    return _arrays.where(is_time, learned, timing), is_time & is_alarm


def _noise(timing: Timing, at: jax.Array, seconds: jax.Array) -> jax.Array:
    """Learn the noise from two times in a row at one rung, which need no model."""
    is_pair = (timing.times > 0) & jnp.all(timing.at == at)
    change = 2 * (seconds - timing.seconds) / (seconds + timing.seconds)
    seen = jnp.minimum(jnp.square(change) / 2, OUTLIER**2 * timing.noise)
    weight = jnp.where(is_pair, NOISE_WEIGHT, 0.0)
    return jnp.maximum(timing.noise + weight * (seen - timing.noise), LEAST_NOISE**2)


def _positive_scale(
    scale: jax.Array, covariance: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Move the most negative part half the way to 0, and what goes with it."""
    i = jnp.argmin(scale)
    with_part, variance = covariance[i], covariance[i, i]
    is_negative = (scale[i] < 0) & (variance > 0)
    root = jnp.where(is_negative, jnp.sqrt(0.5 / variance), 0.0)
    moved = with_part * root
    return scale - moved * root * scale[i], covariance - jnp.outer(moved, moved)


def _normal(timing: Timing, guess: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the share of each part at each rung, at most 1, and seconds of the parts.

    Compute is the same at all rungs, whatever was predicted.
    """
    largest = jnp.max(guess, axis=0)
    shares = guess / jnp.where(largest > 0, largest, 1)[None]
    scale = jnp.where(timing.times == 0, largest, timing.scale)
    return jnp.where(_each(COMPUTE)[None] > 0, 1, shares), scale


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the sum of products over the parts, the last axis of both."""
    return _arrays.total(a[..., i] * b[..., i] for i in range(len(PARTS)))


def _each(parts: tuple[float, ...]) -> jax.Array:
    return jnp.asarray(parts, jnp.float32)


def _diagonal(deviations: jax.Array) -> jax.Array:
    return jnp.eye(len(PARTS), dtype=jnp.float32) * jnp.square(deviations)[None]
