"""StepInfo, what a human wants to know about a step, and the figures in it.

It travels inside the optimizer state, so it costs nothing until somebody reads it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class StepInfo(NamedTuple):
    """What the last step sent; the same on every replica.

    Read it from any optimizer state: `optax.tree.get(opt_state, "StepInfo")`. Bytes are
    float32: exact below 2**24, and to seven digits above. A local step has factor
    infinity, since it sent nothing, and gain 0. With two axes the bytes are those that
    one device sends over the slow axis.

    Attributes:
      rung: `[]` int32, the place on the ladder of the encoding that was taken; the
        number of rungs if the step was local.
      factor: `[]` float32, the papers' compression factor: the bits of a dense payload
        over those of this one, of the compressed leaves; 1 is a dense step.
      gain: `[]` float32 in [0, 1], the share of the energy of the error-fed gradient
        that was sent, of the compressed leaves of all replicas; 0 if there are none.
      gains: `[rungs]` float32, the gain of every rung of the ladder when it was last
        taken, 0 before. With GraVAC, had it been taken in this step.
      wire_bytes: `[]` float32, bytes that one replica sent, including indices, dense
        leaves and evidence: N - 1 payloads for an all-gather, 2 (N - 1) / N of the
        buffer for a ring all-reduce.
      dense_wire_bytes: `[]` float32, `wire_bytes` of a float32 mean of all leaves.
      is_finite: `[]` bool, whether every gradient of every replica was finite, and
        below 2**50. Always True with a delay or rounds, where replicas
        are told of a gradient after its step.
      dense_steps: `[]` int32, exchanges so far in which nothing was encoded.
      bad_steps: `[]` int32, steps so far in which a replica left its gradient out,
        because it was not finite. Where replicas are told late, exchanges that told of
        such a step.
      disagreements: `[]` int32, exchanges so far in which replicas held different
        params, if `update` was given any. Each exchange compares a sample of a few
        leaves. Not compared: slices over a number of devices that is no power of two.
        `gravac.checksum` compares all, and `gravac.resync` mends them. A step that
        skips updates, or scales them, by its own gradient alone makes replicas part for
        good.
      alike_steps: `[]` int32, exchanges so far in which a sample of gradients had the
        same norm on all replicas. They had been averaged before the exchange, which
        nothing else can tell under `pmap`, or all replicas had the same batch.
      local_steps: `[]` int32, steps since the last exchange; 0 unless `every=` makes
        some steps local.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> exchange = gravac.transform(axis_name=None, send=gravac.TopK(100))
      >>> tx = optax.chain(exchange, optax.sgd(0.1))
      >>> params = {"w": jnp.ones((256, 256))}
      >>> updates, opt_state = jax.jit(tx.update)(params, tx.init(params))
      >>> info = optax.tree.get(opt_state, "StepInfo")
      >>> float(info.gain) <= 1.0
      True
    """

    rung: jax.Array
    factor: jax.Array
    gain: jax.Array
    gains: jax.Array
    wire_bytes: jax.Array
    dense_wire_bytes: jax.Array
    is_finite: jax.Array
    dense_steps: jax.Array
    bad_steps: jax.Array
    disagreements: jax.Array
    alike_steps: jax.Array
    local_steps: jax.Array

    @property
    def byte_factor(self) -> jax.Array:
        """How many times fewer bytes than a dense step this one sent: `[]` float32.

        It counts all bytes: those of indices, of dense leaves and of the evidence, and
        an all-gather's to each of N - 1 replicas. It is infinite in a local step, and 1
        with one replica, where a dense step sends nothing either.
        """
        dense = self.dense_wire_bytes
        return jnp.where(dense > 0, jnp.divide(dense, self.wire_bytes), 1.0)


def before_the_first_step(rungs: int) -> StepInfo:
    """Return a report of nothing."""
    # Each field has an array of its own: a buffer that occurs twice in a state cannot
    # be donated.
    whole = {"rung", "disagreements", *(x for x in StepInfo._fields if "steps" in x)}
    dtype = lambda name: jnp.int32 if name in whole else jnp.float32
    nothing = [jnp.zeros((), dtype(name)) for name in StepInfo._fields]
    return StepInfo(*nothing)._replace(
        factor=jnp.ones((), jnp.float32),
        gains=jnp.zeros(rungs, jnp.float32),
        is_finite=jnp.ones((), bool),
    )


def of_a_local_step(before: StepInfo, dense_wire_bytes: float) -> StepInfo:
    """Return the report of a step that sends nothing, by the one before it.

    Args:
      before: the report of the last step.
      dense_wire_bytes: what a float32 mean of all leaves would send.
    """
    nothing = jnp.zeros((), jnp.float32)
    return before._replace(
        rung=jnp.int32(before.gains.size),
        factor=jnp.float32(jnp.inf),
        gain=nothing,
        wire_bytes=nothing,
        dense_wire_bytes=jnp.float32(dense_wire_bytes),
        local_steps=before.local_steps + 1,
    )
