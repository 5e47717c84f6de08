"""Find a data set's files, or say what is missing."""

from collections.abc import Sequence
from pathlib import Path

from tasks.task import DataError


def find(data_dir: Path, names: Sequence[str], folders: Sequence[str]) -> list[Path]:
    """Return the files `names` in the first of some folders that has them all.

    Args:
      data_dir: The folder to look in.
      names: The names of the files, all of them needed.
      folders: Folders below `data_dir`; "" stands for itself.

    Returns:
      The paths, as many as there are names.

    Raises:
      DataError: If no folder has them all. The message names the files that are missing
        in the folder that has most of them.
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
