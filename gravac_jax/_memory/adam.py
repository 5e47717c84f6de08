"""Adam before the exchange: what is delayed was divided when it was new."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _checks
from gravac_jax._memory.base import MASKINGS, Accelerated

LARGEST = 1e18  # of what is squared, so that no square is infinite


class AdamState(NamedTuple):
    """What one replica remembers.

    Attributes:
      velocity: `[n]` float32, the mean of its own preconditioned gradients.
      second_moment: `[n]` float32, the mean square of its own gradients.
      residual: `[n]` float32, what it still has to deliver.
      fed_steps: `[]` int32, gradients so far.
    """

    velocity: jax.Array
    second_moment: jax.Array
    residual: jax.Array
    fed_steps: jax.Array


class DenseAdamState(NamedTuple):
    """That of the leaves that go dense.

    Attributes:
      dense_velocity: `[m]` float32.
      dense_second_moment: `[m]` float32.
      followed_steps: `[]` int32.
    """

    dense_velocity: jax.Array
    dense_second_moment: jax.Array
    followed_steps: jax.Array


@dataclasses.dataclass(frozen=True)
class Adam(Accelerated):
    """Adam's update of each replica's own gradients, with error feedback.

    Adam after a sparse exchange divides rare, late entries by a second moment that is
    not that of the gradients. Here every replica divides its own gradient when it is
    new, and what waits is a part of an update: s = b2 s + (1 - b2) g^2,
    u = b1 u + (1 - b1) g / sqrt(s), and v + u is selected from. Both means begin
    without bias, as Adam's.

    It takes the place of the optimizer: `optax.chain(gravac.transform(
    memory=gravac.Adam()), optax.add_decayed_weights(1e-4),
    optax.scale_by_learning_rate(1e-3))`, with decay as AdamW has it.

    Law:
      Of what was fed, sent + kept is the sum of u, in which an entry of a gradient
      counts for at most 1e18. A replica's gradients are noisier than their mean, so
      that its steps are shorter than Adam's, up to sqrt(N) times; leaves that go dense
      get Adam's update of their mean, which are not.

    Cost:
      12 bytes of state per compressed parameter and replica, where Adam after the
      exchange has 8 and the residual 4; 8 per other parameter.

    Args:
      b1: decay of the mean.
      b2: decay of the mean square.
      eps: added to the square root.
      masking: as for `gravac.Momentum`.

    Raises:
      ValueError: if a decay is not in [0, 1), `eps` not above 0, or `masking` unknown.

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
    masking: str = "none"

    def __post_init__(self) -> None:
        _checks.decay(self.b1, "b1")
        _checks.decay(self.b2, "b2")
        why = "It is added to a root mean square that may be 0."
        _checks.above_zero(self.eps, "eps", why)
        _checks.one_of(self.masking, "masking", MASKINGS)

    def init(self, n: int) -> AdamState:
        """At rest, with nothing held back."""
        # An array each: a buffer that stands twice in a state cannot be donated.
        return AdamState(
            velocity=jnp.zeros(n, jnp.float32),
            second_moment=jnp.zeros(n, jnp.float32),
            residual=jnp.zeros(n, jnp.float32),
            fed_steps=jnp.zeros((), jnp.int32),
        )

    def _update(
        self,
        gradient: jax.Array,
        velocity: jax.Array,
        second_moment: jax.Array,
        steps: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What a gradient adds, the new velocity and second moment."""
        t = steps.astype(jnp.float32)
        gradient = jnp.clip(gradient, -LARGEST, LARGEST)
        square = self.b2 * second_moment + (1 - self.b2) * jnp.square(gradient)
        root = jnp.sqrt(square / (1 - self.b2**t))
        velocity = self.b1 * velocity + (1 - self.b1) * gradient / (root + self.eps)
        return velocity / (1 - self.b1**t), velocity, square

    def compensate(
        self, gradient: jax.Array, state: AdamState
    ) -> tuple[jax.Array, AdamState]:
        """The residual and this replica's own update."""
        steps = state.fed_steps + 1
        added, velocity, square = self._update(
            gradient, state.velocity, state.second_moment, steps
        )
        after = AdamState(velocity, square, state.residual, steps)
        return state.residual + added, after

    def init_dense(self, n: int) -> DenseAdamState:
        """At rest."""
        return DenseAdamState(
            dense_velocity=jnp.zeros(n, jnp.float32),
            dense_second_moment=jnp.zeros(n, jnp.float32),
            followed_steps=jnp.zeros((), jnp.int32),
        )

    def follow(
        self, mean: jax.Array, state: DenseAdamState
    ) -> tuple[jax.Array, DenseAdamState]:
        """Adam's update of the mean."""
        steps = state.followed_steps + 1
        added, velocity, square = self._update(
            mean, state.dense_velocity, state.dense_second_moment, steps
        )
        return added, DenseAdamState(velocity, square, steps)
