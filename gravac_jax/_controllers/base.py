"""The interface of controllers, and the laws that hold for all of them.

A controller sees only scalars that were reduced over the replicas. So all replicas
decide alike; a decision that differed between devices would hang the job.
"""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _refuse
from gravac_jax._encodings.base import Encoding
from gravac_jax._encodings.dense import Dense

LOOK_FIRST = 32  # steps; arbitrary
DROP = 0.7  # of a learning rate in one step; arbitrary: smooth schedules fall less


class Evidence(NamedTuple):
    """What a controller may know about a step; the same on every replica.

    Attributes:
      step: `[]` int32, steps before this one.
      replicas: N, static.
      first_sparse: `[]` int32, the lowest rung that does not send everything. Rungs
        below it are dense steps whatever their encodings, because with so many replicas
        their payloads would weigh more.
      energies: `[rungs]` float32, the mean over replicas of the energy that each rung
        would have sent in this step. If the controller does not look at the bucket
        (`looks_at`), or the step does not (`looks`), only that of the rung taken is
        right.
      energy: `[]` float32, the mean energy of the error-fed gradient.
      gradient_energy: `[]` float32, the mean energy of the gradient after clip and
        decay, without residual and momentum.
      gradient_energies: `[rungs]` float32, the energy that an exchange by chance would
        have sent of that gradient, in which entries wait as long as at each rung
        (`Encoding.waits`), plus that of the leaves that go dense; with a delay, of the
        gradient that this exchange sends. Zeros if the controller does not look at
        gradients, and if the step of that gradient did not look.
      predicted_parts: `[rungs, 4]` float32, seconds of compute, selection, messages and
        bytes in a step at each rung, by the cost model.
      measured_seconds: `[rungs]` float32, the mean of the step times that were handed
        to `update` since the last decision, at the rung that they measured; NaN at
        other rungs.
      wire_bytes: `[rungs]` float32, the bytes that one replica sends in a step at each
        rung.
      local_seconds: `[]` float32, the mean of measured times of local steps, which
        exchange nothing. NaN if unknown; None without rounds.
      steps: steps since the last decision: 1, unless some are local.
      at_own_params: `[]` bool or static, whether gradients are known to be taken at
        own params.

    Example:
      See `gravac.Controller`.
    """

    step: jax.Array
    replicas: int
    first_sparse: jax.Array
    energies: jax.Array
    energy: jax.Array
    gradient_energy: jax.Array
    gradient_energies: jax.Array
    predicted_parts: jax.Array
    measured_seconds: jax.Array
    wire_bytes: jax.Array
    local_seconds: jax.Array | None = None
    steps: Any = 1
    at_own_params: jax.Array | bool = False

    @property
    def effective_step(self) -> jax.Array:
        """The step at which the decision takes effect, `[]` int32: three exchanges on.

        The next exchange agrees on it. A host with a program for each rung reads it
        during the exchange after that. With rounds it is the last step of one, if all
        stay as long as the last one was.
        """
        return self.step + 3 * self.steps

    @property
    def predicted_seconds(self) -> jax.Array:
        """Seconds of a step at each rung by the cost model, `[rungs]` float32."""
        return self.predicted_parts.sum(-1)


class Predictions(NamedTuple):
    """What a controller predicted of its choices at the last decision.

    Attributes:
      names: the encoding of each choice, as `repr` shows it, static.
      steps: the steps of a round of each choice, static.
      seconds: `[choices]` float32, the mean seconds of a step.
      progress: `[choices]` float32, what a step is worth, in dense steps; zeros before
        the first decision.
      is_allowed: `[choices]` bool, whether that is enough for the choice to be taken.
      waits_too_long: `[choices]` bool, whether its entries wait for longer than they
        may at the shared params.
      fits: `[choices]` bool, whether its bytes are within the budget.
      home: `[]` int32, the choice believed to be fastest.
      current: `[]` int32, the choice that was decided on; another one than home is
        visited to measure it.
      times: `[]` int32, measured step times so far. Without any, the seconds are those
        of the cost model.

    Example:
      See `gravac.Controller`.
    """

    names: tuple[str, ...]
    steps: tuple[int, ...]
    seconds: jax.Array
    progress: jax.Array
    is_allowed: jax.Array
    waits_too_long: jax.Array
    fits: jax.Array
    home: jax.Array
    current: jax.Array
    times: jax.Array


class Controller(abc.ABC):
    """Chooses the rung of each step. Subclass it to write your own.

    Law:
      The rung is on the ladder; another number is taken for the nearest rung. The state
      keeps its shapes and dtypes, and nothing in it depends on one replica alone.

    Attributes:
      ladder: the encodings to choose from, by falling bytes.
      uses_seconds: whether it decides by how long steps take, measured or predicted.
      looks_at: what it needs to know of rungs that are not taken, for which steps look
        at a sample: "gradient" for `Evidence.gradient_energies`, "bucket" for
        `Evidence.energies` of all rungs, of the error-fed gradient, or "nothing".
      look_every: steps from one look to the next.

    Example:
      >>> import dataclasses, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> @dataclasses.dataclass(frozen=True, repr=False)
      ... class EveryTenthDense(gravac.Controller):
      ...     ladder: tuple = (gravac.Dense(), gravac.TopK(100))
      ...     def init(self):
      ...         return jnp.int32(0), ()
      ...     def decide(self, evidence, state):
      ...         is_sparse = evidence.effective_step % 10 > 0
      ...         return is_sparse.astype(jnp.int32), state
      >>> tx = gravac.transform(send=EveryTenthDense())
    """

    uses_seconds: ClassVar[bool] = False
    looks_at: ClassVar[Literal["gradient", "bucket", "nothing"]] = "nothing"
    look_every: ClassVar[int] = 1
    ladder: tuple[Encoding, ...]

    @property
    def is_fixed(self) -> bool:
        """Whether there is but one rung, so that steps need no branches."""
        return len(self.ladder) == 1

    def reach(self, at_own_params: bool) -> tuple[int, ...]:
        """Return the rungs that it may take, rising: a step is compiled for no others.

        Args:
          at_own_params: whether gradients are known to be taken at own params.
        """
        del at_own_params
        return tuple(range(len(self.ladder)))

    @property
    def has_rounds(self) -> bool:
        """Whether it chooses how long rounds are, so that some steps are local."""
        return False

    def round_steps(self, step: jax.Array, state: Any) -> Any:
        """Return how long a round shall be, if it `has_rounds`.

        Every exchange asks for the round after the next exchange. So all replicas have
        agreed on it before it begins, and a host can read it without waiting.

        Args:
          step: `[]` int32, steps before the first one of that round.
          state: the controller's state.

        Returns:
          `[]` int32, the steps of the round, of which the last one exchanges.
        """
        del step, state
        return 1

    def looks(self, step: jax.Array, local_steps: Any = 0) -> jax.Array | bool:
        """Return whether a step looks at rungs that it does not take.

        The first 32 steps always look.

        Args:
          step: `[]` int32, steps before this one.
          local_steps: `[]` int32, steps since the last exchange, which cannot look.
        """
        if self.look_every == 1:
            return True
        return (step < LOOK_FIRST) | (step % self.look_every <= local_steps)

    @abc.abstractmethod
    def init(self) -> tuple[jax.Array, Any]:
        """Return the rung of the first three exchanges, and the state before them.

        A state may have a method `moved(fresh)`. It returns the state for a run that is
        restored on other devices; `fresh` is the state from `init`.
        """

    @abc.abstractmethod
    def decide(self, evidence: Evidence, state: Any) -> tuple[jax.Array, Any]:
        """Choose the rung of a coming step, `evidence.effective_step`.

        Args:
          evidence: what is known after this step.
          state: from `init` or the last step.

        Returns:
          rung: `[]` int32.
          state: the new state.
        """

    def __repr__(self) -> str:
        """Return the constructor, with what differs from the defaults."""
        return _arrays.constructor(self)

    def predictions(self, state: Any) -> Predictions | None:
        """Return what the last decision predicted, or None if it predicts nothing.

        Args:
          state: from `decide`.
        """
        del state
        return None


def check_ladder(
    value: Any, owner: str, least: int = 1, most: float = math.inf
) -> None:
    """Refuse what is no tuple of encodings, each of them once."""
    is_tuple = isinstance(value, tuple)
    if not is_tuple or not all(isinstance(x, Encoding) for x in value):
        raise TypeError(
            f"the ladder of {owner} must be a tuple of encodings, such as"
            f" (gravac.Dense(), gravac.Bits(8)), got {_arrays.brief(value)}: for one"
            f" alone write gravac.transform(send=gravac.Bits(2))."
        )
    if not least <= len(value) <= most or len(set(value)) < len(value):
        wanted = f"{least} encodings" + " or more" * (most > least)
        raise ValueError(
            f"the ladder of {owner} must have {wanted}, each of them once, got"
            f" {_arrays.brief(value)}: for one alone write"
            f" gravac.transform(send=gravac.Bits(2))."
        )


def check_dense_first(ladder: tuple[Encoding, ...], owner: str) -> None:
    """Refuse a ladder from which a controller could not fall back to dense."""
    if not isinstance(ladder[0], Dense):
        raise ValueError(
            f"the ladder of {owner} must begin with gravac.Dense(), the step that it"
            f" falls back to, got {_arrays.brief(ladder)}."
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Only(Controller):
    """Takes the only rung of a ladder, in every step."""

    ladder: tuple[Encoding]

    def init(self) -> tuple[jax.Array, Any]:
        """Return the only rung, and no state."""
        return jnp.zeros((), jnp.int32), ()

    def decide(self, evidence: Evidence, state: Any) -> tuple[jax.Array, Any]:
        """Return the only rung."""
        del evidence
        return jnp.zeros((), jnp.int32), state


def controller_of(send: Any) -> Controller:
    """Return what chooses among encodings; of one encoding, what always takes it."""
    if isinstance(send, Encoding):
        return Only((send,))
    if not isinstance(send, Controller):
        raise TypeError(
            f"`send` must be an encoding such as gravac.Bits(2), or a controller such"
            f" as gravac.Fastest((gravac.Dense(), gravac.Bits(2))) or gravac.Fastest(),"
            f" got {_refuse.shown(send)}."
        )
    return send


def has_dropped(
    learning_rate: Callable[[Any], Any], step: jax.Array, steps: int
) -> jax.Array:
    """Return whether the rate fell below 0.7 of itself in the last `steps` steps."""
    at = jax.vmap(lambda step: jnp.asarray(learning_rate(step), jnp.float32))
    last = jnp.maximum(step - jnp.arange(steps, dtype=jnp.int32), 0)
    return jnp.any(at(last) < DROP * at(jnp.maximum(last - 1, 0)))
