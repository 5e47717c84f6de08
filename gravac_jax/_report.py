"""From a rung to what it sent: the figures of StepInfo."""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax._buckets import Buckets
from gravac_jax._controllers.base import Controller
from gravac_jax._exchanges.base import Exchange, Traffic
from gravac_jax._exchanges.dense import dense_traffic, mean_of_energies
from gravac_jax._info import StepInfo
from gravac_jax._throughput import WireCost


class Tables(NamedTuple):
    """Static figures per rung, and in the last row those of a skipped step.

    Attributes:
      factors: `[rungs + 1]`, entries over entries sent.
      payload_bytes: `[rungs + 1]`.
      wire_bytes: `[rungs + 1]`.
      messages: `[rungs + 1]`, one after the other.
      sample: what is added in a step that looks, of the gradient's energies.
      dense: of a float32 mean of all leaves.
    """

    factors: np.ndarray
    payload_bytes: np.ndarray
    wire_bytes: np.ndarray
    messages: np.ndarray
    sample: Traffic
    dense: Traffic


def tables(
    buckets: Buckets,
    exchanges: Sequence[Exchange],
    controller: Controller,
    replicas: int,
) -> Tables:
    """What each rung sends, with one exchange per bucket."""
    ladder = controller.ladder
    rungs, n, m = len(ladder), sum(buckets.sizes), buckets.dense_size
    # The step's own evidence: a count, an energy and the rung, and per rung a time with
    # its count; then the energies that did not travel with the entries.
    common = dense_traffic(m + 3 + 2 * rungs, replicas)
    pairs = list(zip(exchanges, buckets.sizes, strict=True))
    energies = lambda factor: [
        x.energies_traffic(size, factor, rungs, replicas) for x, size in pairs
    ]
    travel = None not in energies(ladder[0])
    always = [common] if travel else [common, mean_of_energies(rungs, replicas)]
    rows = []
    for factor in ladder:
        entries = [x.traffic(size, factor, replicas) for x, size in pairs]
        sent = sum(x.entries for x in entries)
        sizes = _sizes([*always, *entries, *filter(None, energies(factor))])
        rows.append((n / sent if n else 1.0, *sizes))
    rows.append((np.inf, *_sizes(always)))
    has_sample = controller.samples_gradient
    sample = dense_traffic(rungs, replicas) if has_sample else Traffic(0, 0, 0, 0)
    dense = dense_traffic(n + m, replicas)
    return Tables(*np.asarray(rows, np.float32).T, sample=sample, dense=dense)


def _sizes(traffic: Sequence[Traffic]) -> np.ndarray:
    """Bytes of payloads, bytes on the wire and messages, of all of them together."""
    return np.sum(traffic, axis=0)[1:]


def warn_if_dense(
    buckets: Buckets,
    exchanges: Sequence[Exchange],
    ladder: tuple[float, ...],
    replicas: int,
) -> None:
    """Say so when a rung is dense because its payloads would weigh more."""
    both = list(zip(exchanges, buckets.sizes, strict=True))
    is_replaced = lambda f: any(x.is_replaced(n, f, replicas) for x, n in both)
    if replaced := list(filter(is_replaced, ladder)):
        warnings.warn(
            f"with {replicas} replicas the factors {replaced} would send more bytes"
            " than a dense step, and are dense steps, as those of a warm-up may be. If"
            " that is not meant, begin the ladder higher, such as"
            f" Fastest(gravac.geometric({replicas}, {max(1000, 10 * replicas)})),"
            " or choose an exchange that sends less: AllGather with entries of 4 bytes,"
            " as by default, LeaderIndices(), or Cheapest((AllGather(),"
            " LeaderIndices())).",
            stacklevel=2,
        )


def first_sparse(table: Tables) -> jax.Array:
    """`[]` int32, the lowest rung of a factor above 1; a skipped step's if none is."""
    return jnp.int32(int(np.argmax(table.factors > 1)))


def predicted_parts(table: Tables, wire: WireCost) -> jax.Array:
    """`[rungs, 4]` float32, seconds of what a step consists of, by the cost model."""
    costs = zip(table.wire_bytes, table.messages, table.factors == 1, strict=True)
    parts = [wire.parts(float(x), float(y), bool(z)) for x, y, z in costs]
    return jnp.asarray(parts[:-1], jnp.float32)


def before_the_first_step(rungs: int) -> StepInfo:
    """A report of nothing."""
    # An array each: a buffer that stands twice in a state cannot be donated.
    return StepInfo(
        factor=jnp.ones((), jnp.float32),
        gain=jnp.zeros((), jnp.float32),
        gains=jnp.zeros(rungs, jnp.float32),
        payload_bytes=jnp.zeros((), jnp.float32),
        wire_bytes=jnp.zeros((), jnp.float32),
        dense_bytes=jnp.zeros((), jnp.float32),
        dense_wire_bytes=jnp.zeros((), jnp.float32),
        is_finite=jnp.ones((), bool),
        dense_steps=jnp.zeros((), jnp.int32),
        skipped_steps=jnp.zeros((), jnp.int32),
        disagreements=jnp.zeros((), jnp.int32),
    )


def after(
    before: StepInfo,
    table: Tables,
    rung: jax.Array,
    gains: jax.Array,
    is_finite: jax.Array,
    apart: jax.Array,
    looks: jax.Array | bool,
) -> StepInfo:
    """The report of a step that ran at `rung`, or was skipped: the last row."""
    of_rung = lambda figures: jnp.asarray(figures)[rung]
    extra = lambda size: jnp.where(looks, jnp.float32(size), 0)
    factor = of_rung(table.factors)
    is_dense = (factor == 1).astype(jnp.int32)
    return StepInfo(
        factor=factor,
        gain=jnp.append(gains, 0.0)[rung],
        gains=gains,
        payload_bytes=of_rung(table.payload_bytes) + extra(table.sample.payload_bytes),
        wire_bytes=of_rung(table.wire_bytes) + extra(table.sample.wire_bytes),
        dense_bytes=jnp.float32(table.dense.payload_bytes),
        dense_wire_bytes=jnp.float32(table.dense.wire_bytes),
        is_finite=is_finite,
        dense_steps=before.dense_steps + is_dense,
        skipped_steps=before.skipped_steps + (~is_finite).astype(jnp.int32),
        disagreements=before.disagreements + jnp.any(apart).astype(jnp.int32),
    )
