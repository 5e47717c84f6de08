"""Batches are the same wherever they are made, and after every interruption."""

import doctest
import itertools

import numpy as np
import pytest
from tasks import pipeline
from tasks.pipeline import batches, evaluation, tracks

SIZE, ROWS, REPLICAS = 45, 2, 4  # five batches an epoch, and five examples over
PER_EPOCH = SIZE // (ROWS * REPLICAS)


class Squares:
    """Numbers with their squares, and noise that is drawn for each."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return {"x": np.int32(index), "square": np.full(3, index**2, np.float32)}

    def augment(self, example, rng):
        return example | {"noise": rng.random(2)}


def make(source=None, local=None, seed=0):
    source = Squares() if source is None else source
    return batches(source, rows=ROWS, replicas=REPLICAS, seed=seed, local=local)


def take(iterator, count):
    return list(itertools.islice(iterator, count))


def assert_same(some, others):
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].dtype == other[name].dtype
            np.testing.assert_array_equal(one[name], other[name])


def epoch(drawn, number):
    part = drawn[number * PER_EPOCH : (number + 1) * PER_EPOCH]
    return np.concatenate([batch["x"] for batch in part]).tolist()


def test_every_epoch_shows_each_example_once_in_another_order_and_drops_others():
    drawn = take(make(), 4 * PER_EPOCH)
    orders = [epoch(drawn, number) for number in range(4)]
    assert all(len(set(order)) == PER_EPOCH * ROWS * REPLICAS for order in orders)
    assert all(order != sorted(order) for order in orders)
    assert all(one != two for one, two in itertools.combinations(orders, 2))
    assert len({frozenset(order) for order in orders}) > 1


def test_the_seed_decides_everything():
    assert_same(take(make(seed=3), 12), take(make(seed=3), 12))
    assert epoch(take(make(seed=3), 5), 0) != epoch(take(make(seed=4), 5), 0)


@pytest.mark.parametrize("parts", [[1, 1, 1, 1], [2, 2], [1, 3]], ids=str)
def test_processes_together_see_what_one_process_sees(parts):
    ends = list(itertools.accumulate(parts, initial=0))
    shares = [make(local=range(a, b)) for a, b in itertools.pairwise(ends)]
    shares = [take(share, 12) for share in shares]
    together = [
        {name: np.concatenate([x[name] for x in same]) for name in same[0]}
        for same in zip(*shares, strict=True)
    ]
    assert_same(together, take(make(), 12))


@pytest.mark.parametrize("cut", range(0, 12, 3))
def test_cut_anywhere_a_resumed_iterator_goes_on_with_the_same_batches(cut):
    whole = take(make(), 14)
    first = make()
    assert_same(take(first, cut), whole[:cut])
    resumed = make()
    take(resumed, 2)
    resumed.set_state(first.get_state())
    assert_same(take(resumed, 14 - cut), whole[cut:])


def test_evaluation_goes_once_through_the_source_in_order_and_drops_the_rest():
    drawn = list(evaluation(Squares(), rows=8))
    assert [batch["x"].tolist() for batch in drawn] == [
        list(range(start, start + 8)) for start in range(0, 40, 8)
    ]
    assert "noise" not in drawn[0]
    assert len(list(evaluation(Squares(), rows=SIZE))) == 1


def test_processes_together_evaluate_what_one_process_does():
    whole = evaluation(Squares(), 2, replicas=4)
    shares = [
        evaluation(Squares(), 2, replicas=4, local=range(*ends))
        for ends in ((0, 1), (1, 4))
    ]
    for batch, *parts in zip(whole, *shares, strict=True):
        together = np.concatenate([part["x"] for part in parts])
        assert together.tolist() == batch["x"].tolist()


WORDS = np.arange(100, dtype=np.int32)


def read(local=None, epochs=None, **changed):
    arguments = {"rows": 2, "replicas": 3, "length": 4} | changed
    return tracks(WORDS, local=local, epochs=epochs, **arguments)


def test_every_row_goes_on_where_it_ended():
    windows = take(read(), 7)
    firsts = [window["tokens"] for window in windows[:3]]
    # Six tracks of 16 words: three windows of four predictions each.
    np.testing.assert_array_equal(firsts[0][:, 0], WORDS[:96:16])
    for row in np.concatenate([x[:, :-1] for x in firsts], axis=1):
        np.testing.assert_array_equal(row, np.arange(row[0], row[0] + 12))
    for one, other in itertools.pairwise(firsts):
        np.testing.assert_array_equal(one[:, -1], other[:, 0])
    begins = [window["is_first"].all() for window in windows]
    assert begins == [window["is_first"].any() for window in windows]
    assert begins == [True, False, False, True, False, False, True]
    assert_same(windows[:3], windows[3:6])
    assert_same(windows[:3], list(read(epochs=1)))


def test_each_process_reads_the_tracks_of_its_replicas():
    shares = [take(read(range(a, b)), 4) for a, b in ((0, 1), (1, 3))]
    together = [
        {name: np.concatenate([x[name] for x in same]) for name in same[0]}
        for same in zip(*shares, strict=True)
    ]
    assert_same(together, take(read(), 4))


@pytest.mark.parametrize("cut", range(5))
def test_text_goes_on_from_where_it_was_cut(cut):
    whole, first, resumed = take(read(), 8), read(), read()
    take(first, cut)
    resumed.set_state(first.get_state())
    assert_same(take(resumed, 8 - cut), whole[cut:])


def test_the_examples_of_its_docstrings_run():
    result = doctest.testmod(pipeline)
    assert (result.attempted, result.failed) == (8, 0)
