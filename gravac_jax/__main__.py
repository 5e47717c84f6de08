"""Run one of the tools of gravac_jax.

launch  run a script in several processes, on this machine or a cluster
plot    draw runs that metrics.JsonlWriter recorded
probe   predict what compression may bring, before a run

`python -m gravac_jax TOOL --help` explains the arguments of a tool.
"""

import argparse
import importlib


def main(arguments: list[str] | None = None) -> None:
    """Run the tool that the command line names.

    Args:
      arguments: Arguments of the command line; by default those of this process.

    Raises:
      SystemExit: If there is no such tool, or as the tool raises it.
      ImportError: If a package that the tool needs is not installed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m gravac_jax",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("tool", choices=("launch", "plot", "probe"))
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    importlib.import_module(f"gravac_jax.{options.tool}").main(options.arguments)


if __name__ == "__main__":
    main()
