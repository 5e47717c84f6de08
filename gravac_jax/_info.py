"""StepInfo: what a human wants to know of a step.

It travels inside the optimizer state, so reading it costs nothing until it is read.
"""

from typing import NamedTuple

import jax


class StepInfo(NamedTuple):
    """What the last step sent; the same on every replica.

    Found in any optimizer state by name. Bytes are float32: exact below 2**24 and to
    seven digits above. A skipped step has factor infinity, since it sent none of the
    gradient, and gain 0. With two axes, bytes are those over the slow one, and a
    device's own.

    Attributes:
      factor: `[]` float32, n / k of the compressed leaves; 1 is a dense step.
      gain: `[]` float32, the share of the energy of the error-fed gradient that was
        sent, over all replicas, in [0, 1].
      gains: `[rungs]` float32, the same for every rung of the ladder, had it been
        used in this step, or in the last one that looked at all of them: with GraVAC
        every step does, with `Fastest` one in eight, with `Accordion` and `Scheduled`
        one in a hundred; the first 32 always do.
      payload_bytes: `[]` float32, what one replica put into the collectives, indices
        and dense leaves and evidence included.
      wire_bytes: `[]` float32, what one replica sent for them: N - 1 payloads for an
        all-gather, 2 (N - 1) / N of the buffer for a ring all-reduce.
      dense_bytes: `[]` float32, `payload_bytes` of a float32 mean of all leaves.
      dense_wire_bytes: `[]` float32, `wire_bytes` of a float32 mean of all leaves.
      is_finite: `[]` bool, whether every gradient of every replica was finite, and
        without a clip below 2**50.
      dense_steps: `[]` int32, steps so far that sent everything.
      skipped_steps: `[]` int32, steps so far that sent nothing, because some gradient
        on some replica was not.
      disagreements: `[]` int32, how often `check_every` found that replicas hold
        different params.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> tx = optax.chain(gravac.transform(axis_name=None), optax.sgd(0.1))
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
    skipped_steps: jax.Array
    disagreements: jax.Array
