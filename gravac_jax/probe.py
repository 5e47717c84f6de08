"""Says whether compression will pay, before any code is changed.

    python -m gravac_jax probe --params 66e6

measures collectives and selection on the devices that it runs on, at the size of a
model, and predicts the step of every exchange and factor. For compute, too, it needs
the model's loss: `--loss package.module:function`, of a function that takes nothing and
returns `(loss_fn, params, batch)`, with the batch of one replica. With `--headroom`
dense steps are timed whole, overlap included. On a cluster it runs through the
launcher, as a training script does:

    srun python -m gravac_jax.launch -m gravac_jax probe --loss package.module:function

With `--json FILE` all of it is written down, and a controller can start from there:

    from gravac_jax import probe
    gravac.transform(wire=probe.read(FILE))

The table needs rich, which is an extra: `pip install gravac_jax[tools]`.
"""

import argparse
import importlib
import inspect
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _checks
from gravac_jax._probe import findings, probing, verdict
from gravac_jax._probe.probing import Loss
from gravac_jax._probe.ways import EXCHANGES, Plan
from gravac_jax._throughput import WireCost

__all__ = ["main", "read"]

_LEAST_PARAMS = 16_384  # arbitrary: what is smaller waits for latency alone
_SIDE = 1024  # of the matrices that stand for a model of which only the size is known


class _UsageError(ValueError):
    """Something that was asked for cannot be."""


def read(path: str | os.PathLike[str]) -> WireCost:
    """The network that a probe has measured, for a controller to start from.

    Args:
      path: what was given as `--json`.

    Returns:
      What `gravac.transform(wire=...)` and `gravac.Cheapest` take. Without `--loss`
      its `compute_seconds` are the default's.

    Raises:
      ValueError: if the file cannot be read, or is none of a probe.

    Example:
      >>> import json, pathlib, tempfile
      >>> from gravac_jax import probe
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "probe.json"
      >>> _ = path.write_text(json.dumps({"wire": {"latency_seconds": 0.001}}))
      >>> probe.read(path).latency_seconds
      0.001
    """
    try:
        return WireCost(**json.loads(Path(path).read_text())["wire"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} has no measured network ({error!r}). Give a file that"
            " `python -m gravac_jax probe --json FILE` has written."
        ) from None


def main(argv: list[str] | None = None) -> None:
    """Measure, and print the verdict.

    Args:
      argv: of the command line; default: that of this process.

    Raises:
      SystemExit: if something given cannot be, with a line that says what to do.
    """
    # Only here: `read` is for training, which needs no table.
    from gravac_jax._probe import screen

    parser = _parser()
    options = parser.parse_args(argv)
    try:
        if options.headroom and not options.loss:
            raise _UsageError(
                "--headroom times a step with and without its exchange, and there is"
                " none: give --loss package.module:function"
            )
        _check_writable(options.json)
        mesh = _mesh(options.mesh)
        loss = _load(options.loss) if options.loss else None
        params = _matrices(options.params) if loss is None else loss.params
        rungs = tuple(sorted(set(options.rungs)))
        plan = Plan(mesh, params, rungs, tuple(dict.fromkeys(options.exchanges)))
    except _UsageError as error:
        parser.error(str(error))
    try:
        _checks.compresses_something(sum(plan.buckets.sizes))
    except ValueError as error:
        parser.error(str(error))
    if jax.process_index() == 0:
        seconds = f"{options.seconds:g}"
        sys.stderr.write(f"compiling, which may take a while; then {seconds} s\n")
    measured = probing.measure(plan, options.seconds, loss, options.headroom)
    if jax.process_index() != 0:
        return
    report = findings.report(plan, measured, verdict.predict(measured))
    screen.show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gravac_jax probe",
        description="Say whether gradient compression will pay on these devices.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--params", type=_size, help="of the model, as 66e6")
    help = "MODULE:FUNCTION, which returns (loss_fn, params, batch)"
    model.add_argument("--loss", help=help)
    add("--headroom", action="store_true", help="time whole dense steps, too")
    help = "factors to try, by default 10 100 1000"
    add("--rungs", type=_factor, nargs="+", default=(10.0, 100.0, 1000.0), help=help)
    names = list(EXCHANGES)
    add("--exchanges", nargs="+", choices=names, default=names, help="all by default")
    help = "AXIS=SIZE,..., compressed over the first; by default all devices"
    add("--mesh", type=_axes, help=help)
    help = "to measure for, by default 30; compiling takes longer"
    add("--seconds", type=_seconds, default=30.0, help=help)
    add("--json", type=Path, metavar="FILE", help="to write everything to")
    return parser


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _size(text: str) -> int:
    if not _LEAST_PARAMS <= _number(text) <= 1e13:
        why = f"must be a number of params from {_LEAST_PARAMS} on, as 66e6"
        raise argparse.ArgumentTypeError(f"{why}, got {text}")
    return int(float(text))


def _factor(text: str) -> float:
    if not 1 < _number(text) < math.inf:
        why = "must be factors above 1, as 10: n / k, of n entries sent k"
        raise argparse.ArgumentTypeError(f"{why}, got {text}")
    return float(text)


def _seconds(text: str) -> float:
    if not 0 < _number(text) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return float(text)


def _axes(text: str) -> dict[str, int]:
    axes = [part.partition("=") for part in text.split(",")]
    names = {name for name, _, size in axes if name and size.isdecimal()}
    if len(names) < len(axes):
        why = "must be AXIS=SIZE,..., as dcn=2,ici=8"
        raise argparse.ArgumentTypeError(f"{why}, got {text}")
    return {name: int(size) for name, _, size in axes}


def _check_writable(path: Path | None) -> None:
    if path is None or jax.process_index() != 0:
        return
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a directory")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _UsageError(
            f"--json {path} cannot be written ({error}): give a file in a directory"
            " that is there"
        ) from None


def _mesh(axes: dict[str, int] | None) -> jax.sharding.Mesh:
    devices = jax.device_count()
    axes = axes or {"data": devices}
    if math.prod(axes.values()) != devices:
        product = " x ".join(map(str, axes.values()))
        raise _UsageError(
            f"--mesh must have all {devices} devices, got {product}: give sizes whose"
            f" product is {devices}"
        )
    if next(iter(axes.values())) < 2:
        raise _UsageError(
            f"there is one replica, and nothing to exchange ({devices} devices, mesh"
            f" {axes}): run it where you train, in several processes with python -m"
            " gravac_jax.launch -m gravac_jax probe, or rehearse on virtual devices"
            " with JAX_NUM_CPU_DEVICES=4"
        )
    return jax.make_mesh(tuple(axes.values()), tuple(axes))


def _load(name: str) -> Loss:
    """The loss that a function of the user's returns."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise _UsageError(f"--loss must be package.module:function, got {name}")
    # As `python -m` has it; a launcher does not.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), function)
        inspect.signature(make).bind()
    except (ImportError, AttributeError, TypeError) as error:
        raise _UsageError(
            f"--loss {name} cannot be called ({error}): give an importable module and a"
            " function in it that takes no arguments"
        ) from error
    # What goes wrong inside of it is shown as it is.
    returned = make()
    if not (isinstance(returned, tuple) and len(returned) == 3):
        raise _UsageError(
            f"--loss {name} must return (loss_fn, params, batch), got {returned!r:.80}"
        )
    loss = Loss(*returned)
    _check_arrays(name, loss)
    value = jax.eval_shape(loss.function, loss.params, loss.batch)
    if getattr(value, "shape", None) != ():
        raise _UsageError(
            f"the loss of --loss {name} must be one number, got {value}: let"
            " loss_fn(params, batch) return a mean"
        )
    return loss


def _check_arrays(name: str, loss: Loss) -> None:
    for leaf in jax.tree.leaves(loss.params):
        if not jnp.issubdtype(getattr(leaf, "dtype", int), jnp.inexact):
            raise _UsageError(
                f"params of --loss {name} must be arrays of floats, got {leaf!r:.80}"
            )
    for leaf in jax.tree.leaves(loss.batch):
        if not jnp.ndim(leaf):
            raise _UsageError(
                f"a batch of --loss {name} must be arrays of rows, got {leaf!r:.80}"
            )


def _matrices(params: int) -> Any:
    """As many params, but for a part of the last row."""
    columns = min(_SIDE, math.isqrt(params))
    whole, rest = divmod(params // columns, columns)
    shapes = [(columns, columns)] * whole + [(rest, columns)] * (rest > 0)
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


if __name__ == "__main__":
    main()
