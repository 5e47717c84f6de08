"""An optimizer before the exchange: replicas exchange steps, not gradients."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gravac_jax import _checks
from gravac_jax._error_feedback.residual import ErrorFeedback

LARGEST = 1e18  # a gradient entry counts for at most this, so that squares are finite


class StepsState(NamedTuple):
    """The state of `Steps` on one replica.

    Attributes:
      optimizer: the state of the optimizer, for a flat vector `[n]` of params.
      residual: `[n]` float32, what this replica still has to send.
    """

    optimizer: Any
    residual: jax.Array


@dataclasses.dataclass(frozen=True)
class Steps(ErrorFeedback):
    """Lets each replica run an optimizer of its own, and exchanges its steps.

    After an exchange that sends little, an optimizer sees gradients that are sparse,
    rounded or late: Adam's second moment would be that of what arrives, and momentum
    would begin when a gradient arrives. Here each replica's optimizer sees its own
    gradients as they are, and its steps are added to what the replica holds back. What
    the exchange does not send stays, and is sent later.

    It takes the place of the optimizer: `gravac.adamw` and `gravac.sgd` are whole
    chains. Take gradients at `gravac.local_params`, as `gravac.train_step` does. At the
    shared params a replica would ask again for the steps that it holds back.

    Any transformation of Optax will do that works entry by entry and needs no params:
    it sees the buckets, flat vectors, in place of the params. SGD, Adam, Lion and
    RMSProp do; Adafactor, LAMB and Muon look at whole matrices and do not. Decoupled
    weight decay and the learning rate may come after `gravac.transform` in the chain.

    Law:
      The sum of what was sent plus what is held is the sum of the optimizer's steps.
      With one replica that sends everything it is the optimizer itself; an entry of a
      gradient counts for at most 1e18. With N replicas, what is sent is the mean of
      steps, not the step of a mean. For SGD with momentum both are the same. A single
      replica's gradients are noisier than their mean, so Adam's steps are shorter here,
      by up to sqrt(N).

    Cost:
      The optimizer's state and 4 bytes, per parameter and replica: 8 bytes of state in
      all for momentum, 12 for Adam.

    Args:
      optimizer: a transformation of Optax, such as `optax.scale_by_adam()`.

    Raises:
      TypeError: if `optimizer` is not a transformation of Optax.
      ValueError: if it needs params, as weight decay does.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> memory = gravac.Steps(optax.scale_by_adam())
      >>> gradient = jnp.array([3.0, -0.1])
      >>> compensated, state = memory.compensate(gradient, memory.init(2))
      >>> [round(x, 3) for x in compensated.tolist()]
      [1.0, -1.0]

    References:
      Tang et al., 1-bit Adam, ICML 2021, which exchanges compressed momentum; Basu et
      al., Qsparse-local-SGD, NeurIPS 2019, which exchanges compressed steps.
    """

    optimizer: optax.GradientTransformation = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        _checks.component(
            self.optimizer, optax.GradientTransformation, "optimizer", "optax.sgd(0.1)"
        )
        one = jax.ShapeDtypeStruct((1,), jnp.float32)
        try:
            jax.eval_shape(self.compensate, one, jax.eval_shape(lambda: self.init(1)))
        except ValueError as error:
            raise ValueError(
                f"gravac.Steps cannot run this optimizer on a flat vector without"
                f" params: {error} Put what needs params, such as"
                f" optax.add_decayed_weights(1e-4), after gravac.transform."
            ) from error

    def init(self, n: int) -> StepsState:
        """Return the optimizer's first state and an empty residual."""
        optimizer = self.optimizer.init(jnp.zeros(n, jnp.float32))
        return StepsState(optimizer, jnp.zeros(n, jnp.float32))

    def compensate(
        self, gradient: jax.Array, state: StepsState
    ) -> tuple[jax.Array, StepsState]:
        """Return the residual plus this replica's own step."""
        gradient = jnp.clip(gradient, -LARGEST, LARGEST)
        # Optax mixes dtypes, which a strict setting of the user's would refuse.
        with jax.numpy_dtype_promotion("standard"):
            step, optimizer = self.optimizer.update(gradient, state.optimizer)
        return state.residual + jnp.asarray(step), state._replace(optimizer=optimizer)
