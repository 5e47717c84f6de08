"""The benchmark in which the number of replicas changes during training."""

import elastic
import jax
import journal
import pytest

pytestmark = pytest.mark.xdist_group("processes")  # one test of them at a time


@pytest.mark.slow
def test_only_the_number_of_replicas_differs_between_methods(tmp_path, capsys):
    (tmp_path / "input.txt").write_bytes(bytes(range(32, 127)) * 2000)
    args = elastic.Args(
        tmp_path,
        tmp_path / "out.jsonl",
        task="lstm-bytes",
        replicas=(4, 2),
        rows=8,
        steps=8,
        every=2,
        seeds=1,
    )
    with jax.numpy_dtype_promotion("standard"):  # schedules of Optax need it
        elastic.main(args)
    _, lines = journal.read(args.out)
    assert [x["replicas"] for x in lines] == [4, 4, 4, 4] + [4, 4, 2, 2] * 2
    by_method = {
        method: [x["loss"] for x in lines if x["method"] == method]
        for method in elastic.METHODS
    }
    whole, moved, dropped = by_method.values()
    assert whole[:2] == moved[:2] == dropped[:2]
    assert moved[-1] != dropped[-1], "else there was no residual"
    assert abs(moved[-1] - whole[-1]) < 0.1
    before = args.out.read_text()
    elastic.main(args)
    assert args.out.read_text() == before
    assert "residual dropped" in capsys.readouterr().out
