"""Why a controller chose what it did, in figures and in words."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from gravac_jax import _chain, _checks
from gravac_jax._controllers.base import Controller, Predictions
from gravac_jax.metrics._scalars import on_this_host

SECONDS, PROGRESS = "gravac/predicted_seconds/", "gravac/predicted_progress/"
HOME = "gravac/choice"


def explain(opt_state: Any, controller: Controller) -> str:
    """Return what the controller predicted of each choice, as a table in words.

    The figures are those that the last decision compared; nothing is predicted anew.
    The choice with the fewest seconds for the progress of a dense step is the fastest.
    Waits until the step is done.

    Args:
      opt_state: the state after the step, with exactly one `gravac.transform` in it.
      controller: the transform's controller.

    Returns:
      A line for each choice, and one line about where the seconds come from. One
      sentence if nothing was predicted yet.

    Raises:
      TypeError: if `controller` is not a controller that predicts, as `gravac.Fastest`
        does, alone or within another.
      ValueError: if `opt_state` holds no `gravac.transform`, or more than one.

    Example:
      >>> import jax
      >>> import gravac_jax as gravac
      >>> from gravac_jax import metrics
      >>> controller = gravac.Fastest((1, 4, 16))
      >>> wire = gravac.WireCost(bytes_per_second=1e6)
      >>> tx = gravac.transform(controller=controller, compress=True, wire=wire)
      >>> step = gravac.simulate(lambda state, grads: tx.update(grads, state)[::-1], 4)
      >>> grads = jax.random.normal(jax.random.key(0), (4, 25_600))
      >>> state, _ = step(gravac.place(tx.init(grads[0]), 4), grads)
      >>> print(metrics.explain(state, controller))  # doctest: +ELLIPSIS
      choice     ms a step  progress  ms for a dense step's progress
      dense          164.3      1.00                           164.3
      factor 4        50.3      1.00                            50.4
      factor 16       21.5      0.98                            21.9  taken
      The milliseconds are predicted by gravac.WireCost alone, since no step time ...
    """
    found = _predictions(opt_state, controller)
    if not np.any(found.progress):
        return "The controller has predicted nothing yet: it decides after each step."
    lines = [("choice", "ms a step", "progress", "ms for a dense step's progress", "")]
    for i, name in enumerate(_names(found)):
        seconds, progress = 1e3 * found.seconds[i], found.progress[i]
        cost = f"{seconds / progress:.1f}" if progress > 0 else "never"
        row = (name, f"{seconds:.1f}", f"{progress:.2f}", cost, _verdict(found, i))
        lines.append(row)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first, *rest, _ = widths
    table = [
        "  ".join((a.ljust(first), *map(str.rjust, x, rest), z)).rstrip()
        for a, *x, z in lines
    ]
    times = int(found.times)
    source = f"from {times} measured step times" if times else _GUESS
    return "\n".join([*table, f"The milliseconds are predicted {source}."])


_GUESS = "by gravac.WireCost alone, since no step time was measured"


def columns(opt_state: Any, controller: Controller) -> dict[str, tuple[Any, list[str]]]:
    """Return arrays of what was predicted, each with the names of its entries."""
    found = _on_device(opt_state, controller)
    names = _names(found)
    return {
        "seconds": (found.seconds, [SECONDS + x for x in names]),
        "progress": (found.progress, [PROGRESS + x for x in names]),
        "home": (found.home, [HOME]),
    }


def _on_device(opt_state: Any, controller: Controller) -> Predictions:
    example = "the controller of the transform, such as gravac.Fastest()"
    _checks.component(controller, Controller, "controller", example)
    state = _chain.the_transform(opt_state, "gravac_jax.metrics")
    found = controller.predictions(state.controller)
    if found is None:
        raise TypeError(
            f"{controller} predicts nothing, so that there is nothing to explain. Give"
            " a controller that does, such as gravac.Fastest(), or none."
        )
    return found


def _predictions(opt_state: Any, controller: Controller) -> Predictions:
    """Return the predictions as NumPy arrays."""
    found = _on_device(opt_state, controller)
    fetch = lambda x: np.asarray(on_this_host("predictions", x))
    fetched = jax.tree.map(fetch, found._replace(factors=(), steps=()))
    # Under pmap each device has a copy.
    flat = jax.tree.map(lambda x: x.reshape(-1) if x.size > 1 else x.item(), fetched)
    return flat._replace(factors=found.factors, steps=found.steps)


def _names(found: Predictions) -> list[str]:
    """Return what each choice is called."""
    both = zip(found.factors, found.steps, strict=True)
    return [_name(*x) for x in both]


def _name(factor: float, steps: int) -> str:
    name = "dense" if factor == 1 else f"factor {factor:g}"
    return name if steps == 1 else f"{name} every {steps} steps"


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

    It has the choice believed to be fastest, dense steps, and the next best.
    """
    found = {k: x for k, x in scalars.items() if k.startswith(PROGRESS)}
    progress = {k.removeprefix(PROGRESS): x for k, x in found.items()}
    if not any(progress.values()):
        return ""
    seconds = {name: scalars[SECONDS + name] for name in progress}
    home = list(progress)[int(scalars[HOME])]
    cost = {k: seconds[k] / max(x, 1e-6) for k, x in progress.items()}
    dense, *_ = progress
    next_best = min(cost.keys() - {home}, key=cost.__getitem__, default=home)
    told = [x for x in progress if x in (dense, home, next_best)]

    def said(name: str) -> str:
        is_whole = progress[name] == 1
        worth = "" if is_whole else f" at {progress[name]:.2f} of the progress"
        taken = ": taken" if name == home else ""
        return f"{name} {1e3 * seconds[name]:.0f} ms{worth}{taken}"

    return ", ".join(map(said, told))
