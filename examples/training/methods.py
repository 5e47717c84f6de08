"""The methods that programs compare: a recipe, and what replicas send.

A method is called by its recipe and the `repr` of its encoding or controller:
"adamw Bits(2, turns=4)", "own TopK(100)", "Fastest()". `RECIPES` has the recipes. The
first one has no name: gradients are taken at the shared params and exchanged, and the
optimizer follows. "dense" is `Dense()` by that recipe, the baseline of all programs.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import optax

import gravac_jax as gravac
from training.sends import parse

DENSE = "dense"
MAX_NORM = 1.0
CLIP = gravac.ClipByGlobalNorm(MAX_NORM)
# What follows an exchange of gradients, but for its learning rate.
OPTIMIZERS = {
    "sgd": optax.trace(0.9, nesterov=True),
    "adam": optax.scale_by_adam(),
    "lion": optax.scale_by_lion(),
    # What is no matrix takes steps of Adam, at a fifth of the learning rate.
    "muon": optax.chain(
        optax.contrib.muon(1.0, adam_learning_rate=0.2), optax.scale(-1.0)
    ),
}


class Recipe(NamedTuple):
    """How a method makes an optimizer of what is sent.

    Attributes:
      words: What a reader calls it.
      make: Takes what is sent, what may follow, its learning rate, the axis of the
        replicas, and `clip`, and returns the whole optimizer.
      is_own: Whether gradients are taken at each replica's own params.
      brings_loss: Whether the exchange of a step can bring the mean loss of that step.
    """

    words: str
    make: Callable[..., optax.GradientTransformation]
    is_own: bool = True
    brings_loss: bool = True


def _at_shared(send: Any, after: Any, rate: Any, axis_name: Any, clip: Any) -> Any:
    return optax.chain(
        gravac.transform(axis_name, send=send),
        optax.clip_by_global_norm(clip.max_norm),
        after,
        optax.scale_by_learning_rate(rate),
    )


def _own(send: Any, after: Any, rate: Any, axis_name: Any, **how: Any) -> Any:
    exchange = gravac.transform(axis_name, send=send, **how)
    return optax.chain(exchange, after, optax.scale_by_learning_rate(rate))


def _momentum(send: Any, after: Any, rate: Any, axis_name: Any, **how: Any) -> Any:
    del after
    memory = gravac.Momentum(0.9, nesterov=True)
    exchange = gravac.transform(axis_name, send=send, memory=memory, **how)
    return optax.chain(exchange, optax.scale_by_learning_rate(rate))


def _dgc(send: Any, after: Any, rate: Any, axis_name: Any, **how: Any) -> Any:
    del after
    exchange = gravac.dgc(axis_name, send=send, nesterov=True, **how)
    return optax.chain(exchange, optax.scale_by_learning_rate(rate))


def _adamw(send: Any, after: Any, rate: Any, axis_name: Any, **how: Any) -> Any:
    del after
    return gravac.adamw(rate, axis_name, weight_decay=0, send=send, **how)


def _sgd(send: Any, after: Any, rate: Any, axis_name: Any, **how: Any) -> Any:
    del after
    return gravac.sgd(rate, axis_name, nesterov=True, send=send, **how)


def _sized(optimizer: str, *, by_leaf: bool) -> Callable[..., Any]:
    """Return `make` of a recipe whose optimizer gives its steps a size."""

    def make(send: Any, after: Any, rate: Any, axis_name: Any, **how: Any) -> Any:
        del after
        tx = optax.chain(OPTIMIZERS[optimizer], optax.scale_by_learning_rate(rate))
        steps = gravac.OwnOptimizer(tx, by_leaf=by_leaf, keeps_norm=True)
        return gravac.transform(axis_name, send=send, memory=steps, **how)

    return make


def _diloco(send: Any, after: Any, rate: Any, axis_name: Any, **how: Any) -> Any:
    inner = optax.chain(after, optax.scale_by_learning_rate(rate))
    return gravac.diloco(inner, 30, axis_name, send=send, **how)


_AT_OWN = {
    "own": ("gradients at own params", _own),
    "adamw": ("AdamW's steps", _adamw),
    "sgd": ("steps of SGD with momentum", _sgd),
    "lion": ("Lion's steps", _sized("lion", by_leaf=False)),
    "muon": ("Muon's steps", _sized("muon", by_leaf=True)),
}
_HOW: dict[str, dict[str, Any]] = {
    "": {},
    "late": {"delay": 1},
    "every 4": {"every": 4},
    "every 16": {"every": 16},
}


def _how(make: Callable[..., Any], how: dict[str, Any]) -> Callable[..., Any]:
    return lambda *given, **more: make(*given, **how, **more)


RECIPES = {
    "": Recipe("gradients at the shared params", _at_shared, is_own=False),
    "momentum": Recipe("momentum before the exchange", _momentum, is_own=False),
    "dgc": Recipe("Deep Gradient Compression, no warm-up", _dgc, is_own=False),
    "diloco": Recipe("DiLoCo in rounds of 30 steps", _diloco, brings_loss=False),
    **{
        f"{prefix} {name}".strip(): Recipe(
            f"{words} {prefix}".strip(), _how(make, how), brings_loss=not how
        )
        for prefix, how in _HOW.items()
        for name, (words, make) in _AT_OWN.items()
    },
}


@dataclasses.dataclass(frozen=True)
class Method:
    """A recipe, and what it sends.

    Attributes:
      name: The name, as `method` takes it.
      recipe: A key of `RECIPES`.
      send: The encoding or the controller.
    """

    name: str
    recipe: str
    send: gravac.Encoding | gravac.Controller

    @property
    def is_own(self) -> bool:
        """Whether gradients are taken at each replica's own params."""
        return RECIPES[self.recipe].is_own

    @property
    def brings_loss(self) -> bool:
        """Whether the exchange of a step can bring the mean loss of that step."""
        return RECIPES[self.recipe].brings_loss

    @property
    def ladder(self) -> tuple[gravac.Encoding, ...]:
        """The encodings that it may take."""
        send = self.send
        return send.ladder if isinstance(send, gravac.Controller) else (send,)

    @property
    def is_told(self) -> bool:
        """Whether its course depends on the seconds of its steps."""
        return isinstance(self.send, gravac.Controller) and self.send.uses_seconds

    def optimizer(
        self,
        after: Any,
        learning_rate: Any,
        axis_name: str | None = "data",
        clip: gravac.ClipByGlobalNorm = CLIP,
    ) -> optax.GradientTransformationExtraArgs:
        """Return the whole optimizer.

        Args:
          after: What follows an exchange of gradients, one of `OPTIMIZERS`; recipes of
            steps have optimizers of their own.
          learning_rate: The learning rate, or its schedule.
          axis_name: The axis of the replicas; None for one alone.
          clip: What bounds gradients, of each replica or of their mean.
        """
        given = self.send, after, learning_rate, axis_name
        made = RECIPES[self.recipe].make(*given, clip=clip)
        return optax.with_extra_args_support(made)


def method(name: str) -> Method:
    """Return the method of that name.

    Raises:
      SystemExit: If there is none, or the name is not as `repr` writes it.
    """
    if name == DENSE:
        return Method(DENSE, "", gravac.Dense())
    recipe, send = re.fullmatch(r"(?:([^A-Z]*) )?(.*)", name).groups("")  # type: ignore[union-attr]
    if recipe not in RECIPES:
        known = "; ".join(f"{x or '(none)'}: {y.words}" for x, y in RECIPES.items())
        raise SystemExit(f"{name!r} has no recipe; recipes are {known}")
    made = Method(name, recipe, parse(send))
    if name != f"{recipe} {made.send!r}".strip():
        raise SystemExit(f"{name!r} is called {f'{recipe} {made.send!r}'.strip()!r}")
    return made
