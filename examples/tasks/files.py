"""Finding a data set's files, or saying what is missing."""

from collections.abc import Sequence
from pathlib import Path

from tasks.task import DataError


def find(data_dir: Path, names: Sequence[str], folders: Sequence[str]) -> list[Path]:
    """The files `names`, in the first of some folders of `data_dir` that has them all.

    Args:
      data_dir: where to look.
      names: of the files, all of them needed.
      folders: below `data_dir`; "" for itself.

    Returns:
      Their paths, as many as there are names.

    Raises:
      DataError: if no folder has them all; names the files that the likeliest folder,
        the one that has most of them, lacks.
    """
    tried = [[data_dir / folder / name for name in names] for folder in folders]
    missing = [[path for path in paths if not path.is_file()] for paths in tried]
    best = min(range(len(tried)), key=lambda i: len(missing[i]))
    if not missing[best]:
        return tried[best]
    lacking = ", ".join(path.name for path in missing[best])
    places = " or ".join(str(data_dir / folder) for folder in folders)
    if not data_dir.is_dir():
        places += f" ({data_dir} is no folder)"
    raise DataError(f"{lacking} not found in {places}. Is `data_dir` right?")
