"""Starts the tools: `python -m gravac_jax TOOL`, each with its own `--help`."""

import argparse
import importlib
import importlib.util

_PROGRAM = "python -m gravac_jax"
_TOOLS = {
    "launch": "run a script in several processes, on this machine or a cluster",
    "plot": "draw what runs wrote with metrics.JsonlWriter",
    "probe": "tell before a run what compression may bring",
}


def main(arguments: list[str] | None = None) -> None:
    """Start a tool; only what it needs is imported.

    Args:
      arguments: of the command line; default: those of this process.

    Raises:
      SystemExit: if the tool is not there, or as it ends.
    """
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        usage="%(prog)s TOOL [its own arguments]",
        description="The tools; `TOOL --help` has the arguments of each.",
        epilog="\n".join(f"  {name:<8} {what}" for name, what in _TOOLS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("tool", metavar="TOOL", choices=_TOOLS, help=", ".join(_TOOLS))
    add("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    options = parser.parse_args(arguments)
    module = f"gravac_jax.{options.tool}"
    if importlib.util.find_spec(module) is None:
        parser.error(f"this version of gravac_jax has no {options.tool}")
    try:
        tool = importlib.import_module(module)
    except ImportError as error:
        raise SystemExit(f"{_PROGRAM} {options.tool}: {error}") from error
    tool.main(options.arguments)


if __name__ == "__main__":
    main()
