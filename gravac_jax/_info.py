"""StepInfo, what a human wants to know about a step, and the figures in it.

It travels inside the optimizer state, so it costs nothing until somebody reads it.
"""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _collectives
from gravac_jax._buckets import Buckets
from gravac_jax._collectives import Traffic
from gravac_jax._controllers.base import Controller, kinds_of_steps
from gravac_jax._controllers.cost_model import WireCost
from gravac_jax._exchanges.base import Exchange


class StepInfo(NamedTuple):
    """What the last step sent; the same on every replica.

    Read it from any optimizer state: `optax.tree.get(opt_state, "StepInfo")`. Bytes are
    float32: exact below 2**24, and to seven digits above. A local step has factor
    infinity, since it sent nothing, and gain 0. With two axes the bytes are those that
    one device sends over the slow axis.

    Attributes:
      factor: `[]` float32, n / k of the compressed leaves; 1 is a dense step.
      gain: `[]` float32 in [0, 1], the share of the energy of the error-fed gradient
        that was sent, over all replicas.
      gains: `[rungs]` float32, the gain of every rung of the ladder, had it been used
        in this step or in the last step that looked at all rungs. With GraVAC every
        step looks, with `Fastest` one in eight, with `Accordion` and `Scheduled` one in
        a hundred; the first 32 steps always look.
      payload_bytes: `[]` float32, bytes that one replica put into the collectives,
        including indices, dense leaves and evidence.
      wire_bytes: `[]` float32, bytes that one replica sent for them: N - 1 payloads for
        an all-gather, 2 (N - 1) / N of the buffer for a ring all-reduce.
      dense_bytes: `[]` float32, `payload_bytes` of a float32 mean of all leaves.
      dense_wire_bytes: `[]` float32, `wire_bytes` of a float32 mean of all leaves.
      is_finite: `[]` bool, whether every gradient of every replica was finite and,
        without a clip, below 2**50. Always True with a delay, rounds or a memory that
        forgets, where replicas are told of a gradient after its step.
      dense_steps: `[]` int32, steps so far that sent everything.
      bad_steps: `[]` int32, steps so far in which a replica left its gradient out,
        because it was not finite. Where replicas are told late, exchanges that told of
        such a step.
      disagreements: `[]` int32, how often `check_every` found that replicas hold
        different params.
      alike_steps: `[]` int32, steps so far in which the gradients of all replicas had
        the same norm. They had been averaged before the exchange, which nothing else
        can tell under `pmap`, or all replicas had the same batch. With a clip in the
        transform, which may give all of them the same norm, no step counts.
      local_steps: `[]` int32, steps since the last exchange; 0 unless `gravac.Every`
        or `gravac.Fastest` makes some steps local.
      mean_wire_bytes: `[]` float32, `wire_bytes` a step over the last round; without
        rounds those of the last step.
      alignment: `[]` float32, how alike the replicas' rounds were at the last exchange:
        the energy of the mean of what they sent, as a share of the mean energy of what
        each of them sent. It is 1 if all sent the same, and about 1/N if they have
        nothing in common. 1 before the first exchange; 1 without rounds, where it is
        not computed.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> exchange = gravac.transform(axis_name=None, controller=gravac.Fixed(100))
      >>> tx = optax.chain(exchange, optax.sgd(0.1))
      >>> params = {"w": jnp.ones((256, 256))}
      >>> updates, opt_state = tx.update(params, tx.init(params))
      >>> info = optax.tree.get(opt_state, "StepInfo")
      >>> float(info.gain) <= 1.0
      True
    """

    factor: jax.Array
    gain: jax.Array
    gains: jax.Array
    payload_bytes: jax.Array
    wire_bytes: jax.Array
    dense_bytes: jax.Array
    dense_wire_bytes: jax.Array
    is_finite: jax.Array
    dense_steps: jax.Array
    bad_steps: jax.Array
    disagreements: jax.Array
    alike_steps: jax.Array
    local_steps: jax.Array
    mean_wire_bytes: jax.Array
    alignment: jax.Array

    @property
    def byte_factor(self) -> jax.Array:
        """How many times fewer bytes than a dense step this one sent: `[]` float32.

        It counts all bytes: those of indices, of dense leaves and of the evidence, and
        an all-gather's to each of N - 1 replicas. It is infinite in a local step, and 1
        with one replica, where a dense step sends nothing either.
        """
        return self._fewer_than_dense(self.wire_bytes)

    @property
    def mean_byte_factor(self) -> jax.Array:
        """How many times fewer bytes than dense steps the last round sent."""
        return self._fewer_than_dense(self.mean_wire_bytes)

    def _fewer_than_dense(self, wire_bytes: jax.Array) -> jax.Array:
        dense = self.dense_wire_bytes
        return jnp.where(dense > 0, jnp.divide(dense, wire_bytes), 1.0)


class Tables(NamedTuple):
    """What each rung sends, and at the end a local step. Static.

    Attributes:
      factors: `[rungs + 1]`, entries over entries sent.
      payload_bytes: `[rungs + 1]`.
      wire_bytes: `[rungs + 1]`.
      messages: `[rungs + 1]`, sent one after the other.
      dense: a float32 mean of all leaves.
    """

    factors: np.ndarray
    payload_bytes: np.ndarray
    wire_bytes: np.ndarray
    messages: np.ndarray
    dense: Traffic


def tables(
    buckets: Buckets,
    exchanges: Sequence[Exchange],
    controller: Controller,
    replicas: int,
    rides: bool,
) -> Tables:
    """Work out what each rung sends, with one exchange per bucket.

    `rides` says that the first exchange also averages what replicas agree on.
    """
    ladder = controller.ladder
    rungs, n = len(ladder), sum(buckets.sizes)
    # Every step averages the dense leaves, a count, an energy, its contrast, the rung
    # and the length of a round, if there are any, for each kind of step a time and how
    # many replicas measured it, and for each rung an energy, if they are asked for.
    scalars = 4 + controller.has_rounds + 2 * kinds_of_steps(controller)
    scalars += rungs * controller.samples_gradient
    figures = buckets.part_sizes[-1] + scalars
    pairs = list(zip(exchanges, buckets.sizes, strict=True))
    rows = []
    for factor in ladder:
        agreed = _collectives.mean_traffic(figures, replicas)
        if rides:
            first, size = pairs[0]
            agreed = first.figures_traffic(size, factor, figures, replicas)
        entries = [x.traffic(size, factor, replicas) for x, size in pairs]
        energies = [
            x.energies_traffic(size, factor, rungs, replicas) for x, size in pairs
        ]
        sent = sum(x.entries for x in entries)
        factor_sent = n / sent if n else 1.0
        rows.append((factor_sent, *_sizes([agreed, *entries, *energies])))
    rows.append((np.inf, 0, 0, 0))
    dense = _collectives.mean_traffic(buckets.total_size, replicas)
    sent = np.asarray(rows, np.float32).T
    return Tables(*sent, dense=dense)


def _sizes(traffic: Sequence[Traffic]) -> np.ndarray:
    """Add up payload bytes, wire bytes and messages."""
    return np.sum(traffic, axis=0)[1:]


def warn_if_dense(
    buckets: Buckets,
    exchanges: Sequence[Exchange],
    ladder: tuple[float, ...],
    replicas: int,
) -> None:
    """Warn about rungs that are dense because their payloads would weigh more."""
    both = list(zip(exchanges, buckets.sizes, strict=True))
    is_replaced = lambda f: any(x.is_replaced(n, f, replicas) for x, n in both)
    if replaced := list(filter(is_replaced, ladder)):
        warnings.warn(
            f"with {replicas} replicas the factors {replaced} would send more bytes"
            " than a dense step, so they are dense steps. That is expected at the start"
            " of a warm-up. Otherwise begin the ladder higher, such as"
            f" Fastest(gravac.geometric({replicas}, {max(1000, 10 * replicas)})),"
            " or choose an exchange whose bytes do not grow with the replicas:"
            " QuantizedAllReduce(), LowRank(), LeaderIndices().",
            stacklevel=2,
        )


def first_sparse(table: Tables) -> jax.Array:
    """Return the lowest rung of a factor above 1, `[]` int32; `rungs` if none."""
    return jnp.int32(int(np.argmax(table.factors > 1)))


def predicted_parts(table: Tables, wire: WireCost) -> jax.Array:
    """Return the seconds of each part of a step by the cost model: `[rungs, 4]`."""
    costs = zip(table.wire_bytes, table.messages, table.factors == 1, strict=True)
    parts = [wire.parts(float(x), float(y), bool(z)) for x, y, z in costs]
    return jnp.asarray(parts[:-1], jnp.float32)


def before_the_first_step(rungs: int) -> StepInfo:
    """Return a report of nothing."""
    # Each field has an array of its own: a buffer that occurs twice in a state cannot
    # be donated.
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
        bad_steps=jnp.zeros((), jnp.int32),
        disagreements=jnp.zeros((), jnp.int32),
        alike_steps=jnp.zeros((), jnp.int32),
        local_steps=jnp.zeros((), jnp.int32),
        mean_wire_bytes=jnp.zeros((), jnp.float32),
        alignment=jnp.ones((), jnp.float32),
    )


def after(
    before: StepInfo,
    table: Tables,
    rung: jax.Array,
    gains: jax.Array,
    alignment: jax.Array,
) -> StepInfo:
    """Return what a step at `rung` sent; `count_faults` adds what went wrong."""
    is_local = rung == gains.size
    at_rung = lambda figures: jnp.asarray(figures)[rung]
    factor = at_rung(table.factors)
    is_dense = (factor == 1).astype(jnp.int32)
    wire_bytes = at_rung(table.wire_bytes)
    steps = before.local_steps + 1
    mean_bytes = wire_bytes / steps.astype(jnp.float32)
    return before._replace(
        factor=factor,
        gain=jnp.append(gains, jnp.float32(0))[rung],
        gains=gains,
        payload_bytes=at_rung(table.payload_bytes),
        wire_bytes=wire_bytes,
        dense_bytes=jnp.float32(table.dense.payload_bytes),
        dense_wire_bytes=jnp.float32(table.dense.wire_bytes),
        dense_steps=before.dense_steps + is_dense,
        local_steps=jnp.where(is_local, steps, 0),
        mean_wire_bytes=jnp.where(is_local, before.mean_wire_bytes, mean_bytes),
        alignment=alignment,
    )


def count_faults(
    info: StepInfo,
    *,
    is_bad: jax.Array,
    is_told_late: bool,
    is_alike: jax.Array,
    apart: jax.Array,
) -> StepInfo:
    """Return `info` with its counters of what went wrong."""
    is_apart = jnp.any(apart).astype(jnp.int32)
    return info._replace(
        is_finite=~is_bad | is_told_late,
        bad_steps=info.bad_steps + is_bad.astype(jnp.int32),
        disagreements=info.disagreements + is_apart,
        alike_steps=info.alike_steps + is_alike.astype(jnp.int32),
    )
