"""Run a benchmark, or make its tables and figures again.

Each folder here asks one question. `NAME` runs the benchmark `NAME/run.py`, and
`NAME.PART` another part of it:

    python examples/benchmarks quality --data-dir DIR --out FILE.jsonl
    python examples/benchmarks quality.report FILE.jsonl
    python examples/benchmarks quality --help

What a run measures is appended to a JSONL file; a run that was cut off goes on with
the same command.
"""

import contextlib
import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tasks, training, quickstart
import tyro


def module_of(name: str) -> ModuleType:
    """Import the module that a name on the command line stands for.

    Raises:
      SystemExit: If there is none.
    """
    known = [x.name for x in pkgutil.iter_modules([str(Path(__file__).parent)])]
    spec = None
    with contextlib.suppress(ModuleNotFoundError):  # of a part of what has none
        spec = importlib.util.find_spec(name)
    if spec is None or name.split(".")[0] not in known:
        names = ", ".join(x for x in known if x not in ("__main__", "common"))
        raise SystemExit(f"there is no benchmark {name!r}; there are: {names}")
    is_folder = spec.submodule_search_locations is not None
    return importlib.import_module(f"{name}.run" if is_folder else name)


def main(arguments: list[str]) -> None:
    """Run what the first argument names with the other arguments."""
    if not arguments or arguments[0] in ("-h", "--help"):
        raise SystemExit(__doc__)
    name, *others = arguments
    module = module_of(name)
    if not hasattr(module, "Args"):  # nothing to choose, or a process of a job
        if {"-h", "--help"} & {*others}:
            print(module.__doc__)
        else:
            module.main(*others)
        return
    program = f"python examples/benchmarks {name}"
    args = tyro.cli(module.Args, prog=program, description=module.__doc__, args=others)
    module.main(args)


if __name__ == "__main__":
    main(sys.argv[1:])
