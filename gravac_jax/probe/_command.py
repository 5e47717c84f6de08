"""The command line: reads the arguments, runs the probe, prints the results."""

import argparse
import inspect
import math
import pkgutil
import sys
from pathlib import Path

import jax

from gravac_jax._mesh import make_mesh
from gravac_jax.probe import _measure, _results, _steps


def main(argv: list[str] | None = None) -> None:
    """Time training steps on these devices and print whether compression pays.

    Args:
      argv: The arguments of the command line. Default: those of this process.

    Raises:
      SystemExit: If an argument is wrong. The message says what to give instead.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if options.headroom and not options.loss:
        parser.error("--headroom needs a computation to compare with: give --loss")
    if not options.loss and options.params < _steps.MIN_PARAMS:
        parser.error(f"--params must be {_steps.MIN_PARAMS} or more: less is too small")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: there is no directory for this file")
    mesh = _mesh(parser, options.mesh or {"data": jax.device_count()})
    if options.loss:
        model = _load(parser, options.loss)
    else:
        model = _steps.stand_in(int(options.params))
    if jax.process_index() == 0:
        sys.stderr.write(f"compiling, then timing for {options.seconds:g} s or more\n")
    exchanges = [] if options.headroom else options.exchanges
    factors = tuple(sorted(set(options.factors)))
    results = _measure.measure(mesh, model, exchanges, factors, options.seconds)
    if jax.process_index() == 0:
        sys.stdout.write(_results.text(results))
        if options.json:
            _results.write(options.json, results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gravac_jax probe",
        description="Tell whether gradient compression will pay on these devices.",
        allow_abbrev=False,
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--params", type=float, help="number of params, such as 66e6")
    help = "MODULE:FUNCTION without arguments that returns (loss_fn, params, batch)"
    model.add_argument("--loss", help=help)
    add = parser.add_argument
    add("--headroom", action="store_true", help="only time dense steps; needs --loss")
    names = list(_steps.EXCHANGES)
    usual = [x for x in names if x not in _steps.ON_REQUEST]
    help = f"default: all but {', '.join(_steps.ON_REQUEST)}"
    add("--exchanges", nargs="+", choices=names, default=usual, help=help)
    few, other = map(_spaced, (_steps.FEW_BITS_FACTORS, _steps.OTHER_FACTORS))
    help = f"all above 1; default: {few} for few-bits, {other} for the others"
    add("--factors", nargs="+", type=float, default=(), help=help)
    help = "the mesh, compressed over its first axis; default: one axis"
    add("--mesh", type=mesh_axes, metavar="AXIS=SIZE,...", help=help)
    add("--seconds", type=float, default=30.0, help="time to spend; default: 30")
    add("--json", type=Path, metavar="FILE", help="file to write all results to")
    return parser


def _spaced(factors: tuple[float, ...]) -> str:
    return " ".join(f"{x:g}" for x in factors)


def mesh_axes(text: str) -> dict[str, int]:
    """Parse `AXIS=SIZE,...`; argparse shows this function's name in its error."""
    pairs = [part.split("=") for part in text.split(",")]
    return {name: int(size) for name, size in pairs}


def _mesh(parser: argparse.ArgumentParser, axes: dict[str, int]) -> jax.sharding.Mesh:
    devices, sizes = jax.device_count(), tuple(axes.values())
    if math.prod(sizes) != devices or sizes[0] < 2:
        parser.error(
            f"the mesh {axes} must have all {devices} devices, and at least 2 along its"
            " first axis. Run the probe where you train, or in two processes, as"
            " python -m gravac_jax.launch -n 2 -m gravac_jax probe."
        )
    return jax.sharding.Mesh(make_mesh().devices.reshape(sizes), tuple(axes))


def _load(parser: argparse.ArgumentParser, name: str) -> _steps.Model:
    try:
        make = pkgutil.resolve_name(name)
        inspect.signature(make).bind()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        must = "--loss must name a function without arguments, as package.module:loss"
        parser.error(f"{must}, got {name} ({error})")
    match make():  # outside the `try`: users see their own errors as they are
        case loss_fn, params, batch:
            return _steps.Model(loss_fn, params, batch)
        case other:
            must = f"--loss {name} must return (loss_fn, params, batch)"
            parser.error(f"{must}, got {other!r:.80}")
