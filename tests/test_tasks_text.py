"""Text is read as words and as bytes, and what is no such text is refused."""

import numpy as np
import pytest
from _task_files import write_ptb
from tasks import DataError
from tasks.text import PTB_FILES, read_bytes, read_ptb

TEXT = bytes(np.random.default_rng(0).integers(32, 127, 1000, dtype=np.uint8))


def write(folder, *texts):
    for name, text in zip(PTB_FILES, texts, strict=True):
        (folder / name).write_text(text)
    return folder


def tokens(windows):
    return np.concatenate([window["tokens"] for window in windows]).tolist()


def test_words_are_numbered_by_frequency_and_then_by_alphabet(tmp_path):
    train = " b c <unk> \n c a \n"
    write(tmp_path, train, " a b \n a \n", " zebra c \n")
    (training, validation, test), size = read_ptb(tmp_path, length=1)
    # Twice each: <eos>, c; once each: <unk>, a, b.
    assert size == 5
    assert tokens(training) == [4, 1, 2, 0, 1, 3]
    assert tokens(validation) == [3, 4, 0, 3]
    assert tokens(test) == [2, 1]


def test_an_example_is_a_window_of_int32_tokens(tmp_path):
    (training, *_), _ = read_ptb(write_ptb(tmp_path), length=6)
    assert training[0].keys() == {"tokens"}
    assert training[0]["tokens"].shape == (7,)
    assert training[0]["tokens"].dtype == np.int32
    assert len(training) == 2400 // 7


def test_an_unknown_word_without_a_stand_in_is_refused(tmp_path):
    write(tmp_path, " a b \n", " a zebra \n", " a b \n")
    with pytest.raises(DataError, match=r"valid\.txt holds 'zebra'.*no.*<unk>"):
        read_ptb(tmp_path, length=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a b \n\0\n", "is not text: it holds NUL bytes"),
        (b"a \xff \n", "is not UTF-8 text"),
        (b" a b \n a", "seems truncated.* after 8 characters"),
        (b"", "is empty"),
        (b" a b \n", "3 tokens does not fill one window of 6"),
    ],
)
def test_a_foreign_or_truncated_file_of_words_is_refused(tmp_path, content, message):
    path = write_ptb(tmp_path) / "ptb.test.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path}.*{message}"):
        read_ptb(tmp_path, length=5)


def test_bytes_are_split_by_position_into_windows_that_share_none(tmp_path):
    path = tmp_path / "anything.txt"
    path.write_bytes(TEXT)
    parts, size = read_bytes(path, length=6)
    assert size == 256
    # 900, 50 and 50 bytes, of which windows of 7 leave 4, 1 and 1.
    expected = [TEXT[:896], TEXT[900:949], TEXT[950:999]]
    assert [bytes(tokens(part)) for part in parts] == expected
    assert parts[0][0]["tokens"].dtype == np.int32


def test_bytes_too_few_for_a_window_of_each_part_are_refused_with_the_figure(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(TEXT[:139])
    with pytest.raises(DataError, match="139 bytes; windows of 7 need at least 140"):
        read_bytes(path, length=6)
    path.write_bytes(TEXT[:140])
    assert [len(part) for part in read_bytes(path, length=6)[0]] == [18, 1, 1]
