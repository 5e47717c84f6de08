"""Figures for TensorBoard."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoardWriter:
    """Writes the event files that TensorBoard shows.

    When a run resumes at step k, TensorBoard hides what was written for step k and
    later before.

    Args:
      directory: Directory of this run, created if needed. Give `tensorboard --logdir`
        this directory or its parent.

    Raises:
      ImportError: If tensorboardX is not installed.
      OSError: If the directory cannot be created.

    Example:
      >>> import pathlib, tempfile
      >>> from gravac_jax import metrics
      >>> directory = pathlib.Path(tempfile.mkdtemp())
      >>> writer = metrics.TensorBoardWriter(directory)
      >>> writer.write(0, {"loss": 0.5})
      >>> writer.close()
      >>> len(list(directory.glob("events.out.tfevents.*")))
      1
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            from tensorboardX import SummaryWriter
            from tensorboardX.proto import summary_pb2
        except ImportError as error:
            raise ImportError(
                f"metrics.TensorBoardWriter needs {error.name}: pip install"
                " '.[tools]' in the clone"
            ) from error
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._open = SummaryWriter
        self._protocol: Any = summary_pb2
        self._writer: Any = None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the figures of a step."""
        if self._writer is None:
            self._writer = self._open(str(self.directory), purge_step=int(step))
        # `SummaryWriter.add_scalar` would write Bits_2_ for Bits(2).
        summary = self._protocol.Summary()
        for name, x in scalars.items():
            summary.value.add(tag=name, simple_value=float(x))
        self._writer.file_writer.add_summary(summary, int(step))

    def flush(self) -> None:
        """Wait until all figures are in the file."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._writer is not None:
            self._writer.close()
