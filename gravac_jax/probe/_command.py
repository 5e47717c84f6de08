"""The command line: reads the arguments, runs the probe, prints the results."""

import argparse
import ast
import json
import math
import pkgutil
import sys
from pathlib import Path

import jax

from gravac_jax._encodings import ENCODINGS, Bits, Dense, Encoding, LowRank, TopK
from gravac_jax._mesh import make_mesh
from gravac_jax.probe import _measure, _results

SEND = Bits(8), Bits(2), Bits(1), TopK(100), TopK(1000), LowRank(4), Dense("bfloat16")
MIN_PARAMS = 16_384  # smaller models gain nothing
_KINDS = {kind.__name__: kind for kind in ENCODINGS}


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
    if not options.loss and options.params < MIN_PARAMS:
        parser.error(f"--params must be {MIN_PARAMS} or more: less is too small")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: there is no directory for this file")
    mesh = _mesh(parser, options.mesh or {"data": jax.device_count()})
    given = _load(parser, options.loss) if options.loss else None
    model = given or _measure.stand_in(int(options.params))
    is_first = jax.process_index() == 0
    if is_first:
        sys.stderr.write(f"compiling, then timing for {options.seconds:g} s or more\n")
    send = [] if options.headroom else dict.fromkeys(options.send)
    results = _measure.measure(mesh, model, send, options.seconds, bool(given))
    if is_first:
        sys.stdout.write(_results.text(results))
    if is_first and options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


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
    quoted = " ".join(f"'{x}'" for x in SEND)
    help = f"encodings to time, written as in Python; default: {quoted}"
    add("--send", nargs="+", type=encoding, default=SEND, metavar="X", help=help)
    help = "the mesh, compressed over its first axis; default: one axis"
    add("--mesh", type=mesh_axes, metavar="AXIS=SIZE,...", help=help)
    add("--seconds", type=float, default=30.0, help="time to spend; default: 30")
    add("--json", type=Path, metavar="FILE", help="file to write all results to")
    return parser


def encoding(text: str) -> Encoding:
    """Parse an encoding as one writes it, such as `Bits(1, turns=4)`; runs no code."""
    reason = f"the encodings are {', '.join(_KINDS)}"
    try:
        match ast.parse(text, mode="eval").body:
            case ast.Call(ast.Name(name), values, named) if name in _KINDS:
                options = {str(x.arg): ast.literal_eval(x.value) for x in named}
                return _KINDS[name](*map(ast.literal_eval, values), **options)
    except (SyntaxError, TypeError, ValueError) as error:
        reason = str(error)
    raise argparse.ArgumentTypeError(
        f"must be encodings such as 'Bits(2)' 'TopK(100)', got {text!r} ({reason})"
    )


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


def _load(parser: argparse.ArgumentParser, name: str) -> _measure.Model:
    must = "--loss must name a function without arguments, as package.module:loss"
    try:
        make = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        parser.error(f"{must}, got {name} ({error})")
    match make():  # outside the `try`: users see their own errors as they are
        case loss_fn, params, batch:
            return loss_fn, params, batch
        case other:
            must += " that returns (loss_fn, params, batch)"
            parser.error(f"{must}, got {name}, which returns {other!r:.80}")
