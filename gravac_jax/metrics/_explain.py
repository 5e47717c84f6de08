"""Why a controller chose what it did, in figures and in words."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from gravac_jax import _chain
from gravac_jax._controllers.base import Controller, Predictions, controller_of
from gravac_jax._encodings.base import Encoding
from gravac_jax.metrics._scalars import on_this_host

SECONDS, PROGRESS = "gravac/predicted_seconds/", "gravac/predicted_progress/"
HOME = "gravac/choice"


def explain(opt_state: Any, send: Encoding | Controller) -> str:
    """Return what the controller predicted of each choice, as a table in words.

    The figures are those that the last decision compared; nothing is predicted anew.
    The choice with the fewest seconds for the progress of a dense step is the fastest.
    Waits until the step is done.

    Args:
      opt_state: the state after the step, with exactly one `gravac.transform` in it.
      send: the transform's `send`, a controller.

    Returns:
      A line for each choice, and one line about where the seconds come from. One
      sentence if nothing was predicted yet.

    Raises:
      TypeError: if `send` is not a controller that predicts, as `gravac.Fastest` does.
      ValueError: if `opt_state` holds no `gravac.transform`, or more than one.

    Example:
      >>> import jax
      >>> import gravac_jax as gravac
      >>> from gravac_jax import metrics
      >>> send = gravac.Fastest((gravac.Dense(), gravac.Bits(8), gravac.Bits(2)))
      >>> network = gravac.WireCost(bytes_per_second=1e6)
      >>> tx = gravac.transform(send=send, network=network)
      >>> step = gravac.simulate(lambda state, grads: tx.update(grads, state)[::-1], 4)
      >>> grads = jax.random.normal(jax.random.key(0), (4, 25_600))
      >>> state, _ = step(gravac.place(tx.init(grads[0]), 4), grads)
      >>> print(metrics.explain(state, send))  # doctest: +ELLIPSIS
      choice   ms a step  progress  ms for a dense step's progress
      Dense()      164.3      1.00                           164.3
      Bits(8)       50.3      1.00                            50.3
      Bits(2)       21.5      0.98                            21.9  taken
      The milliseconds are predicted by gravac.WireCost alone, since no step time ...
    """
    found = _predictions(opt_state, send)
    if found is None:
        raise TypeError(
            f"{send!r} predicts nothing, so that there is nothing to explain. Give a"
            " controller that does, such as gravac.Fastest()."
        )
    on_host = [on_this_host("predictions", x) for x in found[2:]]
    arrays: list[Any] = [np.asarray(x).squeeze() for x in on_host]
    found = Predictions(found.names, found.steps, *arrays)
    if not np.any(found.progress):
        return "The controller has predicted nothing yet: it decides after each step."
    lines = [("choice", "ms a step", "progress", "ms for a dense step's progress", "")]
    for i, name in enumerate(_names(found)):
        seconds, progress = 1e3 * found.seconds[i], found.progress[i]
        cost = f"{seconds / progress:.1f}" if progress > 0 else "never"
        row = (name, f"{seconds:.1f}", f"{progress:.2f}", cost, _verdict(found, i))
        lines.append(row)
    first, *rest, _ = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = [
        "  ".join((a.ljust(first), *map(str.rjust, x, rest), z)).rstrip()
        for a, *x, z in lines
    ]
    times = int(found.times)
    source = f"from {times} measured step times" if times else _GUESS
    return "\n".join([*table, f"The milliseconds are predicted {source}."])


_GUESS = "by gravac.WireCost alone, since no step time was measured"


def columns(opt_state: Any, send: Encoding | Controller) -> list[tuple[Any, list[str]]]:
    """Return arrays of what was predicted, each with the names of its entries."""
    found = _predictions(opt_state, send)
    if found is None:
        return []
    names = _names(found)
    return [
        (found.seconds, [SECONDS + x for x in names]),
        (found.progress, [PROGRESS + x for x in names]),
        (found.home, [HOME]),
    ]


def _predictions(opt_state: Any, send: Any) -> Predictions | None:
    controller = controller_of(send)
    if isinstance(send, Encoding):
        return None
    state = _chain.the_transform(opt_state, "gravac_jax.metrics")
    return controller.predictions(state.controller)


def _names(found: Predictions) -> list[str]:
    """Return what each choice is called."""
    rounds = [f" every {x} steps" if x > 1 else "" for x in found.steps]
    return [name + every for name, every in zip(found.names, rounds, strict=True)]


def _verdict(found: Predictions, choice: int) -> str:
    """Return what was done with a choice."""
    if choice == found.home:
        return "taken" if found.fits[choice] else "taken, more than most_bytes"
    if choice == found.current:
        return "visited, to measure it"
    if found.waits_too_long[choice]:
        return "only at own params"
    if not found.fits[choice]:
        return "too many bytes"
    return "" if found.is_allowed[choice] else "too little progress"


def in_words(scalars: Mapping[str, float]) -> str:
    """Return a decision in words, if its predictions are among the figures.

    It has the choice believed to be fastest, the first one, and the next best.
    """
    found = {k: x for k, x in scalars.items() if k.startswith(PROGRESS)}
    progress = {k.removeprefix(PROGRESS): x for k, x in found.items()}
    if not any(progress.values()):
        return ""
    seconds = {name: scalars[SECONDS + name] for name in progress}
    home = list(progress)[int(scalars[HOME])]
    cost = {k: seconds[k] / max(x, 1e-6) for k, x in progress.items()}
    first, *_ = progress
    next_best = min(cost.keys() - {home}, key=cost.__getitem__, default=home)
    told = [x for x in progress if x in (first, home, next_best)]

    def said(name: str) -> str:
        is_whole = progress[name] == 1
        worth = "" if is_whole else f" at {progress[name]:.2f} of the progress"
        taken = ": taken" if name == home else ""
        return f"{name} {1e3 * seconds[name]:.0f} ms{worth}{taken}"

    return ", ".join(map(said, told))
