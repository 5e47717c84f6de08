"""Figures of a step come out as they are, and stay in files as they came out."""

import functools
import io
import json
import math
import struct
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from rich.console import Console
from tensorboardX.proto import event_pb2

import gravac_jax as gravac
from gravac_jax import metrics
from gravac_jax._metrics import scalars

STEPS = 4
transform = lambda axis_name: gravac.transform(
    axis_name, compress=True, controller=gravac.GraVAC(ladder=(1, 4))
)
TX = optax.chain(transform(None), optax.sgd(0.1))
PARAMS = {"w": jnp.arange(1.0, 41.0)}


def steps_of(tx=TX):
    """The state after each of some steps, of which the second is not finite."""
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    for i in range(STEPS):
        _, state = update(grads_of(float(i)), state, PARAMS)
        yield state


def grads_of(i):
    return jax.tree.map(lambda x: x * jnp.where(i == 1, jnp.nan, i + 1), PARAMS)


def expected_of(info):
    """What must be found, field by field."""
    found = {}
    for name, x in info._asdict().items():
        x = np.asarray(x)
        parts = {f"/{i}": y for i, y in enumerate(x)} if x.ndim else {"": x}
        found |= {f"gravac/{name}{end}": float(y) for end, y in parts.items()}
    return found


@functools.cache
def nnx_optimizer():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    return nnx.Optimizer(model, TX, wrt=nnx.Param)


def linen_state():
    return train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=TX)


def placed(run):
    """The state after a step of four replicas."""
    tx = optax.chain(transform("data"), optax.sgd(0.1))

    def step(params, opt_state, batch):
        grads = jax.tree.map(lambda x: x * batch.mean(), params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return run(step, (PARAMS, tx.init(PARAMS)))


def on_mesh(step, state):
    mesh = jax.make_mesh((4,), ("data",))
    step = gravac.data_parallel(step, mesh, check_vma=False)
    return step(*gravac.place(state, mesh), jnp.arange(8.0))


def simulated(step, state):
    return gravac.simulate(step, 4)(*gravac.place(state, 4), jnp.arange(8.0))


def under_pmap(step, state):
    state = jax.tree.map(lambda x: jnp.stack([x] * 4), state)
    return jax.pmap(step, "data")(*state, jnp.arange(8.0).reshape(4, 2))


STATES = {
    "chain": lambda: list(steps_of())[2],
    "guard": lambda: list(steps_of(gravac.guard(TX)))[2],
    "within others": lambda: {"a": [TX.init(PARAMS), None], "b": jnp.ones(3)},
    "info alone": lambda: optax.tree.get(TX.init(PARAMS), "StepInfo"),
    "nnx": nnx_optimizer,
    "linen": linen_state,
    "mesh": lambda: placed(on_mesh),
    "simulate": lambda: placed(simulated),
}


@pytest.mark.parametrize("name", STATES)
def test_scalars_are_the_fields_of_the_info_wherever_it_is(name):
    state = STATES[name]()
    found = metrics.scalars(state, loss=jnp.float32(0.5))
    pure = nnx.as_pure(state.opt_state) if name == "nnx" else state
    info = pure if name == "info alone" else optax.tree.get(pure, "StepInfo")
    assert all(type(x) is float for x in found.values())
    assert found == expected_of(info) | {"loss": 0.5}


def test_scalars_of_a_split_optimizer_are_its_own():
    optimizer = nnx_optimizer()
    assert metrics.scalars(nnx.split(optimizer)[1]) == metrics.scalars(optimizer)


def test_scalars_of_a_state_under_pmap_are_those_of_a_replica():
    state = placed(under_pmap)
    first = jax.tree.map(lambda x: x[0], optax.tree.get(state, "StepInfo"))
    assert metrics.scalars(state) == expected_of(first)


def test_scalars_of_the_steps_of_a_scan_are_those_of_each():
    def step(state, i):
        _, state = TX.update(grads_of(i), state, PARAMS)
        return state, optax.tree.get(state, "StepInfo")

    at = jnp.arange(float(STEPS))
    _, infos = jax.lax.scan(step, TX.init(PARAMS), at)
    alone = [metrics.scalars(x, loss=i) for i, x in enumerate(steps_of())]
    assert metrics.scalars_of_steps(infos, loss=at) == alone
    assert {x["gravac/factor"] for x in alone} > {math.inf}


def test_all_figures_come_in_one_array():
    names, found = scalars.snapshot(TX.init(PARAMS))
    assert isinstance(found, jax.Array)
    assert found.shape == (1, len(names))


def test_what_has_no_figures_is_refused_with_what_to_do():
    state = TX.init(PARAMS)
    info = optax.tree.get(state, "StepInfo")
    with pytest.raises(ValueError, match=r"found 0 in a dict.* one gravac.transform"):
        metrics.scalars({"w": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"found 2 in a list.*of several give one's"):
        metrics.scalars([state, state])
    with pytest.raises(ValueError, match=r"4 steps or replicas.*scalars_of_steps"):
        metrics.scalars(jax.tree.map(lambda x: jnp.stack([x] * 4), info))
    with pytest.raises(ValueError, match=r"`loss` must have one entry .* \(3,\)"):
        metrics.scalars(state, loss=jnp.ones(3))
    with pytest.raises(ValueError, match=r"gravac/factor.* is being traced"):
        jax.jit(lambda x: metrics.scalars(x))(state)


def test_a_state_that_was_donated_is_refused():
    state = TX.init(PARAMS)
    jax.jit(TX.update, donate_argnums=1)(PARAMS, state)
    with pytest.raises(ValueError, match="was donated to a later step"):
        metrics.scalars(state)


class Kept(list):
    """A writer, in five lines."""

    def write(self, step, scalars):
        self.append((step, dict(scalars)))

    flush = close = lambda self: self.append("closed")


def test_a_recorder_writes_every_step_once_it_is_followed_by_another():
    update = jax.jit(TX.update, donate_argnums=1)
    alone, kept, state = Kept(), Kept(), TX.init(PARAMS)
    with metrics.Recorder(kept, metrics.first_host()) as recorder:
        for i in range(STEPS):
            _, state = update(PARAMS, state)
            alone.write(i, metrics.scalars(state, loss=2 * i))
            recorder.record(i, state, loss=2 * i)
            assert kept == alone[:i]
    assert kept == alone


def test_a_recorder_that_has_nowhere_to_write_looks_at_nothing():
    with metrics.Recorder(metrics.first_host()) as recorder:
        recorder.record(0, "no state")


# Files.


def read(path):
    """The lines, as strict JSON."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(x, parse_constant=refuse) for x in path.read_text().splitlines()]


def write(path, steps, run=0):
    with metrics.JsonlWriter(path) as writer:
        for step in steps:
            writer.write(step, {"loss": step / 2, "run": run})


def test_a_line_is_strict_json_and_reads_as_the_same_numbers(tmp_path):
    path = tmp_path / "made" / "run.jsonl"
    figures = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float32(0.1)}
    with metrics.JsonlWriter(path) as writer:
        writer.write(np.int32(7), figures)
        (line,) = read(path)  # there at once
        writer.write(8, {"loss": jnp.float32(2)})
        writer.flush()
    assert line.pop("seconds") >= 0
    odd = {"a": "NaN", "b": "Infinity", "c": "-Infinity"}
    assert line == {"step": 7, **odd, "d": float(np.float32(0.1))}
    first, second = metrics.read_jsonl(path)
    np.testing.assert_equal({x: first[x] for x in figures}, figures)
    assert second["loss"] == 2


@pytest.mark.parametrize("first", [0, 2, 5, 9])
def test_a_run_that_goes_on_replaces_what_it_writes_again_and_no_more(tmp_path, first):
    path = tmp_path / "run.jsonl"
    write(path, [0, 1, 2, 2, 3, 4])
    before = path.read_bytes().splitlines()
    write(path, [first, first + 1], run=1)
    steps = [(x["step"], x["run"]) for x in read(path)]
    kept = [(x, 0) for x in [0, 1, 2, 2, 3, 4] if x < first]
    assert steps == [*kept, (first, 1), (first + 1, 1)]
    assert path.read_bytes().splitlines()[: len(kept)] == before[: len(kept)]
    assert list(tmp_path.iterdir()) == [path]


def test_opening_and_writing_nothing_changes_nothing(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, range(3))
    before = path.read_bytes()
    write(path, [])
    assert path.read_bytes() == before


def test_a_line_cut_anywhere_is_left_out_and_replaced(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, range(3))
    whole = path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for cut in range(start + 1, len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.warns(UserWarning, match=r"run.jsonl: the last line was cut off"):
            assert [x["step"] for x in metrics.read_jsonl(path)] == [0, 1]
        write(path, [2, 3])
        assert [x["step"] for x in read(path)] == [0, 1, 2, 3]


@pytest.mark.parametrize("text", [b"# notes\n", b"{}\n", b"[1]\n", b"\xff\xfe\n"])
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path, text):
    path = tmp_path / "notes"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=r"notes, line 1, is no line of metrics.Jsonl"):
        metrics.JsonlWriter(path)
    assert path.read_bytes() == text


def test_a_figure_cannot_take_the_place_of_the_step(tmp_path):
    with (
        metrics.JsonlWriter(tmp_path / "run.jsonl") as writer,
        pytest.raises(ValueError, match="cannot be called 'seconds'"),
    ):
        writer.write(0, {"seconds": 1.0})
    assert not (tmp_path / "run.jsonl").read_bytes()


def test_tensorboard_gets_every_figure_and_where_the_run_goes_on(tmp_path):
    writer = metrics.TensorBoardWriter(tmp_path / "made")
    writer.write(5, {"loss": 0.5, "gravac/gain": 0.25})
    writer.write(6, {"loss": math.nan})
    writer.flush()
    writer.close()
    (path,) = (tmp_path / "made").iterdir()
    data, events = path.read_bytes(), []
    while data:  # a length, its checksum, an event, its checksum
        (length,) = struct.unpack("<Q", data[:8])
        events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    starts = [x.step for x in events if x.session_log.status]
    figures = [(x.step, y.tag, y.simple_value) for x in events for y in x.summary.value]
    assert starts == [5]
    expected = [(5, "loss", 0.5), (5, "gravac/gain", 0.25), (6, "loss", math.nan)]
    np.testing.assert_equal(figures, expected)


@pytest.mark.parametrize(
    ("module", "make"),
    [
        ("tensorboardX", lambda folder: metrics.TensorBoardWriter(folder)),
        ("rich.live", lambda _: metrics.LiveView(3)),
    ],
)
def test_a_missing_extra_is_named(tmp_path, monkeypatch, module, make):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"needs .*pip install 'gravac_jax\[tools\]'"):
        make(tmp_path)


# The live view.


def shown(steps, **options):
    """What is on a terminal of 80 columns, and on none, after some steps."""
    screen = Console(
        file=io.StringIO(), width=80, force_terminal=True, color_system=None
    )
    paper = Console(file=io.StringIO(), width=80)
    for console in (screen, paper):
        view = metrics.LiveView(steps, console=console, every_seconds=0, **options)
        for i in range(3):
            sent = {"gravac/wire_bytes": 1e6, "gravac/dense_wire_bytes": 4e6}
            chosen = {"gravac/factor": 40.2, "gravac/gain": 0.256}
            view.write(
                i, {"loss": i + 0.5} | chosen | sent | {"gravac/skipped_steps": i}
            )
        view.flush()
        view.close()
    return [x.file.getvalue().splitlines() for x in (screen, paper)]


def test_the_view_tells_where_the_run_is_in_80_columns():
    screen, paper = shown(100_000, title="adaptive")
    words = " ".join(screen[-4:]).split()
    assert "adaptive 3 / 100000 1.5000 40 0.26 3.0 MB 12.0 MB" in " ".join(words)
    assert "2 steps skipped" in " ".join(words)
    assert "…" not in "".join(screen)
    assert max(map(len, screen[-4:])) <= 80
    assert [x.split(", ")[1] for x in paper] == [
        f"step {i} of 100000" for i in (1, 2, 3)
    ]
    assert "loss 1.5000, factor 40, gain 0.26, sent 3.0 MB, dense 12.0 MB" in paper[-1]


def test_the_view_does_not_hide_that_a_loss_is_not_finite(capsys):
    view = metrics.LiveView(2, every_seconds=0)
    for i, loss in enumerate([1.0, math.nan, math.inf]):  # more than was said
        view.write(i, {"loss": loss})
    view.close()
    said = [line.split(", ")[1] for line in capsys.readouterr().out.splitlines()]
    assert said == ["loss 1.0000", "loss nan", "loss inf"]
    assert "-" not in view._left()


def test_the_view_leaves_out_what_it_has_not_been_given(capsys):
    view = metrics.LiveView(2)
    for i in range(2):
        view.write(i, {"other": 1.0})
    view.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 1 of 2"  # the first, and the last
    assert lines[1].startswith("step 2 of 2, ms/step ")


# Hosts.


def test_only_the_first_host_opens_writers(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with metrics.first_host(lambda: pytest.fail("opened")) as writer:
        writer.write(0, {"loss": 1.0})
        writer.flush()


def test_all_writers_get_everything_and_are_closed():
    both = [Kept(), Kept()]
    with metrics.first_host(*(lambda x=x: x for x in both)) as writer:
        writer.write(3, {"loss": 1.0})
    assert both == [[(3, {"loss": 1.0}), "closed"]] * 2


def test_those_that_are_open_are_closed_if_one_cannot_be():
    kept = Kept()
    with pytest.raises(ZeroDivisionError):
        metrics.first_host(lambda: kept, lambda: 1 / 0)
    assert kept == ["closed"]


def test_those_that_are_open_are_closed_if_closing_one_fails():
    kept, broken = Kept(), Kept()
    broken.close = lambda: 1 / 0
    with (
        pytest.raises(ZeroDivisionError),
        metrics.first_host(lambda: kept, lambda: broken),
    ):
        pass
    assert kept == ["closed"]
