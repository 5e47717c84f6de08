"""The binary versions of CIFAR are read, and everything else is refused."""

import numpy as np
import pytest
from _task_files import records, write_cifar10, write_cifar100
from tasks import DataError
from tasks.cifar import CIFAR10, CIFAR100, read_cifar


def as_record(example):
    kinds = {name: (x.shape, x.dtype.name) for name, x in example.items()}
    assert kinds == {"image": ((32, 32, 3), "uint8"), "label": ((), "int32")}
    planes = example["image"].transpose(2, 0, 1)
    return [int(example["label"]), *planes.ravel().tolist()]


def test_every_record_of_cifar10_is_read_and_the_last_tenth_validates(tmp_path):
    (train, validation, test), classes = read_cifar(write_cifar10(tmp_path), CIFAR10)
    assert classes == 10
    written = np.concatenate([records(8, (10,), i) for i in range(1, 6)]).tolist()
    assert [as_record(x) for x in train] == written[:36]
    assert [as_record(x) for x in validation] == written[36:]
    assert [as_record(x) for x in test] == records(8, (10,)).tolist()


def test_cifar100_is_labelled_by_its_fine_classes(tmp_path):
    (train, *_), classes = read_cifar(write_cifar100(tmp_path), CIFAR100)
    assert classes == 100
    written = records(40, (20, 100), 1)[:, 1:].tolist()
    assert [as_record(x) for x in train] == written[:36]


def test_a_truncated_file_is_refused_with_both_sizes(tmp_path):
    path = write_cifar10(tmp_path) / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=f"{path} holds 24484 bytes.*multiple of 3073"):
        read_cifar(tmp_path, CIFAR10)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="holds 0 bytes"):
        read_cifar(tmp_path, CIFAR10)


@pytest.mark.parametrize(("column", "bound"), [(0, 20), (1, 100)])
def test_a_label_beyond_its_classes_is_refused(tmp_path, column, bound):
    content = records(8, (20, 100))
    content[2, column] = bound
    (write_cifar100(tmp_path) / "test.bin").write_bytes(content.tobytes())
    with pytest.raises(DataError, match=f"record 2 is {bound}, .*below {bound}"):
        read_cifar(tmp_path, CIFAR100)


def variants(image):
    """Every crop of the image with a margin of 4, straight and flipped."""
    padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
    crops = [padded[i : i + 32, j : j + 32] for i in range(9) for j in range(9)]
    return [x.tobytes() for crop in crops for x in (crop, crop[:, ::-1])]


def test_an_augmented_image_is_one_of_its_shifts_straight_or_flipped(tmp_path):
    train = read_cifar(write_cifar10(tmp_path), CIFAR10)[0][0]
    example, rng = train[3], np.random.default_rng(0)
    before = example["image"].tobytes()
    possible = variants(example["image"])
    drawn = [train.augment(example, rng) for _ in range(1000)]
    seen = {possible.index(x["image"].tobytes()) for x in drawn}
    assert len(seen) > 150  # of 162
    assert {int(x["label"]) for x in drawn} == {int(example["label"])}
    assert example["image"].tobytes() == before
