"""Adam before the exchange: replicas exchange steps, not gradients."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _checks
from gravac_jax._error_feedback.residual import ErrorFeedback

LARGEST = 1e18  # a gradient entry counts for at most this, so that squares are finite


class AdamState(NamedTuple):
    """The state of `Adam` on one replica.

    Attributes:
      first_moment: `[n]` float32, the mean of its own gradients.
      second_moment: `[n]` float32, their mean square.
      residual: `[n]` float32, what it still has to send.
      fed_steps: `[]` int32, gradients so far.
    """

    first_moment: jax.Array
    second_moment: jax.Array
    residual: jax.Array
    fed_steps: jax.Array


class DenseAdamState(NamedTuple):
    """The state of `Adam` for leaves that go dense, as for `optax.scale_by_adam`.

    Attributes:
      dense_first_moment: `[m]` float32.
      dense_second_moment: `[m]` float32.
      followed_steps: `[]` int32.
    """

    dense_first_moment: jax.Array
    dense_second_moment: jax.Array
    followed_steps: jax.Array


@dataclasses.dataclass(frozen=True)
class Adam(ErrorFeedback):
    """Adam of each replica's own gradients, whose steps are exchanged.

    After a sparse exchange Adam's second moment would be estimated from sparse, delayed
    gradients. Here every replica runs an Adam of its own: with the bias-corrected
    moments m and s of its gradients, m / (sqrt(s) + eps) is added to what it holds
    back, and entries are selected from the sum.

    It takes the place of the optimizer; `gravac.adamw` is the whole chain. Take
    gradients at `gravac.local_params`. At the shared params a replica would ask again
    and again for the steps that it holds back, and lose most of the gain.

    Law:
      With one replica that sends everything it is `optax.scale_by_adam`. The sum of
      what was sent plus what is kept is the sum of the steps, in which an entry of a
      gradient counts for at most 1e18. A replica's gradients are noisier than their
      mean, so steps of compressed leaves are shorter than Adam's, by up to sqrt(N).
      Leaves that go dense get Adam's step of their mean.

    Cost:
      12 bytes of state per compressed parameter and replica, and 8 per other parameter.
      Adam after the exchange has 8, and the residual 4.

    Args:
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: number added to the square root of the second moment.

    Raises:
      ValueError: if a decay is not in [0, 1), or `eps` not above 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> memory = gravac.Adam()
      >>> gradient = jnp.array([3.0, -0.1])
      >>> compensated, state = memory.compensate(gradient, memory.init(2))
      >>> [round(x, 3) for x in compensated.tolist()]
      [1.0, -1.0]

    References:
      Kingma and Ba, Adam, ICLR 2015, Algorithm 1.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _checks.decay(self.b1, "b1")
        _checks.decay(self.b2, "b2")
        why = "It is added to a root mean square that may be 0."
        _checks.above_zero(self.eps, "eps", why)

    def init(self, n: int) -> AdamState:
        """Return zero moments and an empty residual."""
        # Each field has an array of its own: a buffer that occurs twice in a state
        # cannot be donated.
        return AdamState(
            first_moment=jnp.zeros(n, jnp.float32),
            second_moment=jnp.zeros(n, jnp.float32),
            residual=jnp.zeros(n, jnp.float32),
            fed_steps=jnp.zeros((), jnp.int32),
        )

    def _step(
        self,
        gradient: jax.Array,
        first: jax.Array,
        second: jax.Array,
        steps: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return Adam's step, and both moments after it."""
        t = steps.astype(jnp.float32)
        gradient = jnp.clip(gradient, -LARGEST, LARGEST)
        first = self.b1 * first + (1 - self.b1) * gradient
        second = self.b2 * second + (1 - self.b2) * jnp.square(gradient)
        root = jnp.sqrt(second / (1 - self.b2**t))
        return first / (1 - self.b1**t) / (root + self.eps), first, second

    def compensate(
        self, gradient: jax.Array, state: AdamState
    ) -> tuple[jax.Array, AdamState]:
        """Return the residual plus this replica's own step."""
        steps = state.fed_steps + 1
        step, first, second = self._step(
            gradient, state.first_moment, state.second_moment, steps
        )
        return state.residual + step, AdamState(first, second, state.residual, steps)

    def init_dense(self, n: int) -> DenseAdamState:
        """Return zero moments."""
        return DenseAdamState(
            dense_first_moment=jnp.zeros(n, jnp.float32),
            dense_second_moment=jnp.zeros(n, jnp.float32),
            followed_steps=jnp.zeros((), jnp.int32),
        )

    def follow(
        self, mean: jax.Array, state: DenseAdamState
    ) -> tuple[jax.Array, DenseAdamState]:
        """Return Adam's step of the mean."""
        steps = state.followed_steps + 1
        step, first, second = self._step(
            mean, state.dense_first_moment, state.dense_second_moment, steps
        )
        return step, DenseAdamState(first, second, steps)
