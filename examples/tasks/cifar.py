"""Readers of the binary versions of CIFAR-10 and CIFAR-100.

A record is its label bytes (CIFAR-100 has two, the coarse and the fine class), then
3,072 bytes of pixels: the red, the green and the blue plane, each 32 rows of 32. The
official files hold 10,000 records each, those of CIFAR-100 50,000 and 10,000; any whole
number is read. The python versions are not read: they are pickles, which may run code.
"""

import dataclasses
from pathlib import Path

import numpy as np

from tasks.files import find
from tasks.task import DataError

SIDE = 32  # pixels
PIXEL_BYTES = 3 * SIDE * SIDE
MARGIN = 4  # pixels that a crop may be off, as in He et al., 2016
HELD_OUT = 10  # one training image in so many validates: 5,000 of the official ones


@dataclasses.dataclass(frozen=True)
class Layout:
    """The files of one data set.

    Args:
      folder: The folder that the archive unpacks to.
      train: The files of training images.
      test: The file of test images.
      labels: Classes per label byte; the last byte is the one to predict.
      archive: The archive's name.
    """

    folder: str
    train: tuple[str, ...]
    test: str
    labels: tuple[int, ...]
    archive: str


CIFAR10 = Layout(
    folder="cifar-10-batches-bin",
    train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    test="test_batch.bin",
    labels=(10,),
    archive="cifar-10-binary.tar.gz",
)
CIFAR100 = Layout(
    folder="cifar-100-binary",
    train=("train.bin",),
    test="test.bin",
    labels=(20, 100),
    archive="cifar-100-binary.tar.gz",
)


class Images:
    """Images with labels, as examples.

    An example is `{"image": [32, 32, 3] uint8, "label": [] int32}`. Bytes stay bytes
    until they are on the device, where the model scales them.
    """

    def __init__(self, records: np.ndarray):
        self._labels = records[:, -PIXEL_BYTES - 1].astype(np.int32)
        planes = records[:, -PIXEL_BYTES:].reshape(-1, 3, SIDE, SIDE)
        self._images = planes.transpose(0, 2, 3, 1)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return the image and the label at `index`."""
        return {"image": self._images[index], "label": self._labels[index]}

    def augment(
        self, example: dict[str, np.ndarray], rng: np.random.Generator
    ) -> dict[str, np.ndarray]:
        """Return a random crop of the padded image, flipped half of the time."""
        padded = np.zeros((SIDE + 2 * MARGIN, SIDE + 2 * MARGIN, 3), np.uint8)
        padded[MARGIN:-MARGIN, MARGIN:-MARGIN] = example["image"]
        top, left = rng.integers(0, 2 * MARGIN + 1, 2)
        image = padded[top : top + SIDE, left : left + SIDE]
        return example | {"image": image[:, :: rng.choice([-1, 1])]}


def read_cifar(data_dir: Path, layout: Layout) -> tuple[list[Images], int]:
    """Read the images of one data set; the last tenth of the training images validates.

    Args:
      data_dir: The folder with the files, or the one that holds that folder.
      layout: The data set, `CIFAR10` or `CIFAR100`.

    Returns:
      Training, validation and test images, and the number of classes.

    Raises:
      DataError: If a file is missing, is no whole number of records, or holds a label
        beyond its classes.
    """
    try:
        paths = find(data_dir, [*layout.train, layout.test], ["", layout.folder])
    except DataError as error:
        raise DataError(f"{error} It takes {layout.archive}, unpacked.") from error
    *train, test = [_records(path, layout) for path in paths]
    train = np.concatenate(train)
    kept = len(train) - len(train) // HELD_OUT
    parts = train[:kept], train[kept:], test
    return [Images(records) for records in parts], layout.labels[-1]


def _records(path: Path, layout: Layout) -> np.ndarray:
    record = len(layout.labels) + PIXEL_BYTES
    content = np.fromfile(path, np.uint8)
    whole, rest = divmod(len(content), record)
    if rest or not whole:
        raise DataError(
            f"{path} holds {len(content)} bytes, expected a multiple of {record}; "
            f"it is truncated, or not of {layout.archive}. Fetch it again."
        )
    records = content.reshape(whole, record)
    is_foreign = records[:, : len(layout.labels)] >= np.asarray(layout.labels)
    if is_foreign.any():
        row, column = np.argwhere(is_foreign)[0]
        raise DataError(
            f"{path}: the label of record {row} is {records[row, column]}, expected "
            f"one below {layout.labels[column]}. Is it of {layout.archive}?"
        )
    return records
