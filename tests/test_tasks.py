"""Tasks of the examples: files, batches, and models at their first params."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _harness import assert_same, choices
from _task_files import TEXT, records, write_all
from tasks import TASKS, DataError, load
from tasks.cifar import CIFAR10, CIFAR100, read_cifar
from tasks.lstm import LSTMLanguageModel, recur
from tasks.pipeline import batches, evaluation, tracks
from tasks.text import PTB_FILES, read_bytes, read_ptb
from tasks.transformer import TransformerLanguageModel

# Files. ---------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "count"), [(CIFAR10, 8), (CIFAR100, 80)])
def test_every_image_is_read_and_the_last_tenth_validates(layout, count, data_dir):
    parts, classes = read_cifar(data_dir, layout)
    files = [records(count, layout.labels, i) for i in range(1, len(layout.train) + 2)]
    train, n = np.concatenate(files[:-1]), count * len(layout.train) * 9 // 10
    assert classes == layout.labels[-1]
    for part, expected in zip(parts, (train[:n], train[n:], files[-1]), strict=True):
        for example, row in zip(part, expected, strict=False):
            image = row[-3072:].reshape(3, 32, 32).transpose(1, 2, 0)
            assert_same(example, {"image": image, "label": np.int32(row[-3073])})
        assert len(part) == len(expected)


def tokens(windows):
    return np.concatenate([window["tokens"] for window in windows]).tolist()


def test_words_are_numbered_by_frequency_and_then_by_alphabet(tmp_path):
    texts = " b c <unk> \n c a \n", " a b \n a \n", " zebra c \n"
    for name, text in zip(PTB_FILES, texts, strict=True):
        (tmp_path / name).write_text(text)
    parts, size = read_ptb(tmp_path, length=1)
    # Twice each: <eos>, c; once each: <unk>, a, b.
    assert size == 5
    numbers = [[4, 1, 2, 0, 1, 3], [3, 4, 0, 3], [2, 1]]
    assert [tokens(part) for part in parts] == numbers
    assert parts[0][0]["tokens"].dtype == np.int32


def test_bytes_are_split_by_position_into_windows_that_share_none(data_dir):
    parts, size = read_bytes(data_dir, length=6)
    # 11520, 640 and 640 bytes, of which windows of 7 leave 5, 3 and 3.
    expected = [TEXT[:11515], TEXT[11520:12157], TEXT[12160:12797]]
    assert ([bytes(tokens(part)) for part in parts], size) == (expected, 256)


READERS = {
    "input.txt": functools.partial(read_bytes, length=6),
    "ptb": functools.partial(read_ptb, length=6),
    CIFAR10.folder: functools.partial(read_cifar, layout=CIFAR10),
    CIFAR100.folder: functools.partial(read_cifar, layout=CIFAR100),
}
BATCH, TEST = f"{CIFAR10.folder}/data_batch_2.bin", f"{CIFAR100.folder}/test.bin"
with_label = lambda at, label: lambda x: x[:at] + bytes([label]) + x[at + 1 :]


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("ptb/ptb.test.txt", lambda x: x + b"\0\n", "is not text: it holds NUL bytes"),
        ("ptb/ptb.test.txt", lambda x: b"a \xff \n", "is not UTF-8 text"),
        ("ptb/ptb.test.txt", lambda x: b" a \n a", "seems truncated.* 6 characters"),
        ("ptb/ptb.test.txt", lambda x: b"", "is empty"),
        ("ptb/ptb.test.txt", lambda x: b" a b \n", "3 tokens .* one window of 7"),
        ("ptb/ptb.train.txt", lambda x: b" all \n", r"valid\.txt holds .*an <unk>"),
        ("input.txt", lambda x: x[:139], "139 bytes; windows of 7 need at least 140"),
        (BATCH, lambda x: x[:-100], "24484 bytes.*multiple of 3073"),
        (BATCH, lambda x: b"", "holds 0 bytes"),
        (TEST, with_label(2 * 3074, 20), "record 2 is 20, .*below 20"),
        (TEST, with_label(2 * 3074 + 1, 100), "record 2 is 100, .*below 100"),
    ],
)
def test_a_foreign_or_truncated_file_is_refused(name, damage, message, tmp_path):
    path = write_all(tmp_path) / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=f"{path.parent}.*{message}"):
        READERS[name.partition("/")[0]](tmp_path)


# Batches. -------------------------------------------------------------------------

WORDS = np.arange(100, dtype=np.int32)  # eight tracks of 12 words, and four over
PER_EPOCH = 5  # batches of eight examples, and five examples over


class Squares:
    """Numbers with their squares, and noise that is drawn for each."""

    def __len__(self):
        return 45

    def __getitem__(self, index):
        return {"x": np.int32(index), "square": np.full(3, index**2, np.float32)}

    def augment(self, example, rng):
        return example | {"noise": rng.random(2)}


SOURCES = {
    "batches": functools.partial(batches, Squares(), rows=2, replicas=4, seed=0),
    "tracks": functools.partial(tracks, WORDS, rows=2, replicas=4, length=3),
    "evaluation": functools.partial(evaluation, Squares(), 2, replicas=4),
}


def take(iterator, count):
    return list(itertools.islice(iterator, count))


def test_every_epoch_shows_each_example_once_in_another_order_and_drops_others():
    drawn = np.stack([x["x"] for x in take(SOURCES["batches"](), 4 * PER_EPOCH)])
    orders = [tuple(x) for x in drawn.reshape(4, 8 * PER_EPOCH).tolist()]
    assert all(len(set(order)) == len(order) for order in orders)
    assert len({*orders, tuple(sorted(orders[0]))}) == 5
    assert len({frozenset(order) for order in orders}) > 1
    other = take(SOURCES["batches"](seed=1), PER_EPOCH)
    assert tuple(np.concatenate([x["x"] for x in other])) != orders[0]


def test_evaluation_goes_once_through_the_source_in_order_and_drops_the_rest():
    drawn = np.concatenate([x["x"] for x in SOURCES["evaluation"]()])
    assert drawn.tolist() == list(range(40))


def test_every_row_of_a_text_goes_on_where_it_ended():
    windows = take(SOURCES["tracks"](), 6)
    read = np.concatenate([x["tokens"][:, :-1] for x in windows[:3]], axis=1)
    np.testing.assert_array_equal(read, WORDS[:96].reshape(8, 12)[:, :9])
    begins = [x["is_first"].tolist() for x in windows]
    assert begins == [[i % 3 == 0] * 8 for i in range(6)]
    assert_same(windows[:3], windows[3:])
    assert_same(windows[:3], list(SOURCES["tracks"](epochs=1)))


@pytest.mark.parametrize("parts", [[1, 1, 1, 1], [2, 2], [1, 3]], ids=str)
@pytest.mark.parametrize("name", SOURCES)
def test_processes_together_see_what_one_process_sees(name, parts):
    ends = itertools.pairwise(itertools.accumulate(parts, initial=0))
    shares = [take(SOURCES[name](local=range(*x)), 12) for x in ends]
    together = jax.tree.map(lambda *x: np.concatenate(x), *shares)
    assert_same(together, take(SOURCES[name](), 12))


@pytest.mark.parametrize("name", ["batches", "tracks"])
def test_cut_anywhere_a_resumed_iterator_goes_on_with_the_same_batches(name):
    whole = take(SOURCES[name](), 14)
    for cut in range(0, 12, 3):
        first, resumed = SOURCES[name](), SOURCES[name]()
        assert_same(take(first, cut), whole[:cut])
        take(resumed, 2)
        resumed.set_state(first.get_state())
        assert_same(take(resumed, 14 - cut), whole[cut:])


# Models. --------------------------------------------------------------------------

# Keys of this kind compile in a fraction of the time of the default ones.
KEY = jax.random.key(0, impl="unsafe_rbg")
CLASSES = {"bytes": 256, "ptb": 12, "cifar10": 10, "cifar100": 100}
QUICK = "lstm-bytes", "resnet-cifar10"
LARGE = {"gpt-bytes", "resnet18-cifar10"}  # as others, and take long to compile


SMALL = [name for name in TASKS if name not in LARGE]


@pytest.mark.parametrize("name", choices(SMALL, QUICK.__contains__))
def test_a_fresh_model_guesses_the_class_or_the_next_token(name, data_dir):
    task = load(name, data_dir, length=None if "cifar" in name else 16)
    params = jax.jit(task.init)(KEY)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    batch = next(batches(task.train, rows=4, replicas=2, seed=0))
    metrics = jax.jit(task.metrics)(params, batch)
    assert metrics.keys() == ({"loss", "accuracy"} if "image" in batch else {"loss"})
    assert metrics["loss"] == pytest.approx(np.log(CLASSES[name.split("-")[-1]]), 0.4)
    if name == "lstm-bytes":
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        logits = LSTMLanguageModel(256, 128, 2).apply({"params": params}, inputs)
        chosen = np.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
        assert metrics["loss"] == pytest.approx(-chosen.mean(), 1e-5)


def plain_recurrence(inputs, recurrent, state):
    """One layer of an LSTM, as in the books."""
    hidden, cell = state
    outputs = []
    for x in inputs:
        i, f, g, o = jnp.split(x + hidden @ recurrent, 4, axis=1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        outputs.append(hidden)
    return jnp.stack(outputs), (hidden, cell)


def test_the_recurrence_and_its_gradient_are_those_of_an_lstm():
    rng = np.random.default_rng(0)
    draw = lambda *shapes: [rng.normal(size=x).astype("f") for x in shapes]
    inputs, recurrent, *state = draw((5, 3, 16), (4, 16), (3, 4), (3, 4))
    cotangents = draw((5, 3, 4), (3, 4), (3, 4))

    def outcome(f):
        outputs, pull = jax.vjp(jax.jit(f), inputs, recurrent, tuple(state))
        return outputs, pull((cotangents[0], tuple(cotangents[1:])))

    outcomes = outcome(recur), outcome(plain_recurrence)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 1e-5), *outcomes)


@pytest.mark.parametrize("kind", [LSTMLanguageModel, TransformerLanguageModel])
def test_a_language_model_sees_the_past_and_not_the_future(kind):
    heads = {"heads": 2} if kind is TransformerLanguageModel else {}
    model, tokens = kind(11, width=8, layers=2, **heads), jnp.arange(10)[None]
    params, apply = jax.jit(model.init)(KEY, tokens), jax.jit(model.apply)
    logits, changed = apply(params, tokens), apply(params, tokens.at[0, 5].set(10))
    assert jnp.any(logits != changed, axis=(0, 2)).tolist() == [False] * 5 + [True] * 5
