"""Figures of a step: fetched exactly, written to files, shown in the terminal."""

import functools
import io
import json
import math
import re
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

STEPS = 4
GRAVAC = gravac.GraVAC((gravac.Dense(), gravac.TopK(4)))
ALONE = gravac.transform(None, compress=True, send=GRAVAC)
TX = optax.chain(ALONE, optax.sgd(0.1))
PARAMS = {"w": jnp.arange(1.0, 41.0)}


update = jax.jit(TX.update)
update_donated = jax.jit(TX.update, donate_argnums=1)


def steps_of():
    """Yield the state after each step; the gradient of the second is not finite."""
    state = TX.init(PARAMS)
    for i in range(STEPS):
        _, state = update(grads_of(float(i)), state, PARAMS)
        yield state


def grads_of(i):
    return jax.tree.map(lambda x: x * jnp.where(i == 1, jnp.nan, i + 1), PARAMS)


def expected_of(info):
    """The figures of a `StepInfo`, field by field."""
    found = {}
    for name, x in info._asdict().items():
        x = np.asarray(x)
        parts = {f"/{i}": y for i, y in enumerate(x)} if x.ndim else {"": x}
        found |= {f"gravac/{name}{end}": float(y) for end, y in parts.items()}
    return found


def nnx_optimizer():
    return nnx.Optimizer(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), TX, wrt=nnx.Param)


def placed(run):
    """The state after a step of four replicas."""
    exchange = gravac.transform(compress=True, send=gravac.TopK(4))
    tx = optax.chain(exchange, optax.sgd(0.1))

    def step(params, opt_state, batch):
        grads = jax.tree.map(lambda x: x * batch.mean(), params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return run(step, (PARAMS, tx.init(PARAMS)))


def on_mesh(step, state):
    mesh = jax.make_mesh((4,), ("data",))
    step = gravac.data_parallel(step, mesh, check_vma=False)
    return step(*gravac.place(state, mesh), jnp.arange(8.0))


def under_pmap(step, state):
    state = jax.tree.map(lambda x: jnp.stack([x] * 4), state)
    return jax.pmap(step, "data")(*state, jnp.arange(8.0).reshape(4, 2))


# What a user may hold, and how to find the `StepInfo` in it by other means.
FIND = lambda state: optax.tree.get(state, "StepInfo")
PURE = lambda state: FIND(nnx.as_pure(state.opt_state))
STATES = {
    "chain": (lambda: list(steps_of())[2], FIND),
    "within others": (lambda: {"a": [TX.init(PARAMS), None], "b": jnp.ones(3)}, FIND),
    "info alone": (lambda: FIND(TX.init(PARAMS)), lambda info: info),
    "nnx": (nnx_optimizer, PURE),
    "nnx, split": (
        lambda: nnx.split(nnx_optimizer())[1],
        lambda _: PURE(nnx_optimizer()),
    ),
    "linen": (
        lambda: train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=TX),
        FIND,
    ),
    "mesh": (lambda: placed(on_mesh), FIND),
    "pmap": (
        lambda: placed(under_pmap),
        lambda state: jax.tree.map(lambda x: x[0], FIND(state)),
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_scalars_are_the_fields_of_the_step_info_wherever_it_is(name):
    make, find = STATES[name]
    state = make()
    found = metrics.scalars(state, loss=jnp.float32(0.5))
    assert all(type(x) is float for x in found.values())
    assert found == expected_of(find(state)) | {"loss": 0.5}


def test_scalars_of_the_steps_of_a_scan_are_those_of_each_step():
    def step(state, i):
        _, state = TX.update(grads_of(i), state, PARAMS)
        return state, FIND(state)

    at = jnp.arange(float(STEPS))
    _, infos = jax.lax.scan(step, TX.init(PARAMS), at)
    alone = [metrics.scalars(x, loss=i) for i, x in enumerate(steps_of())]
    assert metrics.scalars_of_steps(infos, loss=at) == alone
    assert {x["gravac/is_finite"] for x in alone} == {0.0, 1.0}


def test_a_state_without_figures_of_one_step_is_refused():
    state = TX.init(PARAMS)
    stacked = jax.tree.map(lambda x: jnp.stack([x] * 4), FIND(state))
    for wrong, said in {
        "found 0 in a dict": {"w": jnp.ones(3)},
        "found 2 in a list": [state, state],
        r"4 entries.*scalars_of_steps": stacked,
    }.items():
        with pytest.raises(ValueError, match=wrong):
            metrics.scalars(said)
    update_donated(PARAMS, state, PARAMS)
    with pytest.raises(RuntimeError, match="deleted"):
        metrics.scalars(state)


def test_a_figure_that_is_not_one_number_is_refused():
    state = TX.init(PARAMS)
    mesh = gravac.make_mesh(devices=jax.devices()[:4])
    put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
    assert metrics.scalars(state, loss=put(jnp.zeros(1), jax.P()))["loss"] == 0
    # Of the last one each device has one entry.
    each = put(jnp.arange(4.0), jax.P("data"))
    for wrong in (None, "high", {"a": 1.0, "b": 2.0}, jnp.ones(3), each):
        with pytest.raises(ValueError, match=r"`loss` must be a number .*leave it out"):
            metrics.scalars(state, loss=wrong)


class Kept(list):
    """A writer that keeps its figures in a list."""

    def write(self, step, scalars):
        self.append((step, dict(scalars)))

    flush = close = lambda self: self.append("closed")


def test_a_recorder_writes_each_step_when_the_next_one_is_recorded():
    alone, kept, state = Kept(), Kept(), TX.init(PARAMS)
    with metrics.Recorder(kept, metrics.first_host()) as recorder:
        for i in range(STEPS):
            _, state = update_donated(PARAMS, state, PARAMS)
            alone.write(i, metrics.scalars(state, loss=2 * i))
            recorder.record(i, state, loss=2 * i)
            assert kept == alone[:i]
    assert kept == alone


def test_a_recorder_without_writers_does_not_look_at_the_state():
    with metrics.Recorder(metrics.first_host()) as recorder:
        recorder.record(0, "no state")


# Names and decisions.


def gains_of(figures):
    """The gains in the figures of a step, by what they are called."""
    prefix = "gravac/gains/"
    return {k.removeprefix(prefix): x for k, x in figures.items() if prefix in k}


@pytest.mark.parametrize(("send", "tx"), [(GRAVAC, ALONE), (gravac.TopK(4), None)])
def test_gains_have_the_names_of_encodings_if_the_recorder_is_told(send, tx):
    tx, kept = tx or gravac.transform(None, compress=True, send=send), Kept()
    _, state = jax.jit(tx.update)(PARAMS, tx.init(PARAMS))
    with metrics.Recorder(kept, send=send) as recorder:
        recorder.record(0, state)
    ((_, figures),) = kept
    ladder = getattr(send, "ladder", (send,))
    gains = optax.tree.get(state, "StepInfo").gains
    assert gains_of(figures) == dict(
        zip(map(repr, ladder), gains.tolist(), strict=True)
    )
    assert not any("predicted" in x for x in figures)
    taken = repr(ladder[int(figures["gravac/rung"])])
    assert (
        f"step 1 of 9, {taken}, factor" in view_of(False, [figures], total_steps=9)[0]
    )
    assert gains_of(metrics.scalars(state)).keys() == set("01"[: len(ladder)])


def test_a_recorder_refuses_what_is_not_the_send_of_the_transform():
    with pytest.raises(TypeError, match=r"`send` must be an encoding.*got 'fastest'"):
        metrics.Recorder(Kept(), send="fastest")
    recorder = metrics.Recorder(Kept(), send=gravac.Bits(2))
    with pytest.raises(ValueError, match=r"the encodings Bits\(2\), .* is of 2\. Give"):
        recorder.record(0, TX.init(PARAMS))


LADDER = gravac.Dense(), gravac.Bits(8), gravac.Bits(2)
CHOOSING = gravac.Fastest(LADDER, least_progress=0.9, rounds=(1, 4))
NAMES = [repr(x) for x in LADDER]
CHOICES = [*NAMES, *(f"{x} every 4 steps" for x in NAMES)]
SLOW = gravac.WireCost(bytes_per_second=1e5)


@functools.cache
def decided():
    """Return the state after each of three steps of two replicas on a slow network."""
    tx = gravac.transform(send=CHOOSING, network=SLOW)
    step = lambda state, grads: tx.update(grads, state)[::-1]
    step = gravac.simulate(step, 2, donate=False)
    grads = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4096)), jnp.float32)
    states = [gravac.place(tx.init(grads[0]), 2)]
    for _ in range(3):
        states.append(step(states[-1], grads)[0])
    return states


@pytest.mark.slow
def test_a_decision_is_explained_by_the_figures_that_it_compared():
    before, *states = decided()
    assert "predicted nothing yet" in metrics.explain(before, CHOOSING)
    own = states[0].controller
    visits = own._replace(current=jnp.full_like(own.current, CHOICES.index("Bits(8)")))
    state = states[0]._replace(controller=visits)
    head, *lines, source = metrics.explain(state, CHOOSING).splitlines()
    assert head.startswith("choice")
    assert source.endswith("gravac.WireCost alone, since no step time was measured.")
    cells, verdicts = [re.split("  +", x) for x in lines], {}
    assert [x[0] for x in cells] == CHOICES
    found = CHOOSING.predictions(states[0].controller)
    for i, (name, *figures) in enumerate(cells):
        seconds, progress = 1e3 * float(found.seconds[i]), float(found.progress[i])
        expected = [f"{seconds:.1f}", f"{progress:.2f}", f"{seconds / progress:.1f}"]
        assert figures[:3] == expected
        verdicts[name] = figures[3:]
    assert verdicts["Bits(2)"] == ["taken"]
    assert verdicts["Bits(8)"] == ["visited, to measure it"]
    assert verdicts["Bits(2) every 4 steps"] == ["too little progress"]
    assert verdicts["Dense()"] == []


def test_what_waits_too_long_at_the_shared_params_is_said():
    send = gravac.Fastest((gravac.Bits(8), gravac.Bits(2), gravac.Bits(1)))
    tx = gravac.transform(None, send=send, network=SLOW)
    verdicts = {}
    for at in ("shared", "own"):
        step = jax.jit(functools.partial(tx.update, at=at))
        _, state = step(jnp.ones(4096), tx.init(jnp.ones(4096)))
        last = metrics.explain(state, send).splitlines()[3]
        assert last.startswith("Bits(1) ")
        verdicts[at] = last.split("  ")[-1]
    assert verdicts["shared"] == "only at own params"
    assert verdicts["own"] != "only at own params"


def test_what_predicts_nothing_cannot_be_explained():
    for wrong in (gravac.Bits(2), GRAVAC):
        said = rf"{re.escape(repr(wrong))} predicts nothing.*gravac\.Fastest\(\)"
        with pytest.raises(TypeError, match=said):
            metrics.explain(TX.init(PARAMS), wrong)
    with pytest.raises(TypeError, match=r"must be.*gravac\.Fastest\(\)"):
        metrics.explain(TX.init(PARAMS), "fastest")


def test_a_recorder_with_the_controller_writes_predictions_and_the_view_says_why():
    kept, states = Kept(), decided()
    with metrics.Recorder(kept, send=CHOOSING) as recorder:
        for i, state in enumerate(states):
            recorder.record(i, state)
    found, (_, figures) = CHOOSING.predictions(states[-1].controller), kept[-1]
    for kind, values in (("seconds", found.seconds), ("progress", found.progress)):
        read = [figures[f"gravac/predicted_{kind}/{x}"] for x in CHOICES]
        assert read == np.asarray(values, np.float64).tolist()
    assert figures["gravac/choice"] == int(found.home)
    lines = view_of(False, [x for _, x in kept], total_steps=4)
    said = [x for x in lines if "taken" in x]
    assert len(said) == 1  # nothing is said before a decision, nor twice of the same
    assert said[0].startswith("step 2: Dense() ")
    assert re.search(r"Bits\(2\) \d+ ms at 0\.\d\d of the progress: taken", said[0])


# Files.


def read_strictly(path):
    """The lines of a file, which must not contain NaN or Infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(x, parse_constant=refuse) for x in path.read_text().splitlines()]


def write(path, steps, run=0):
    with metrics.JsonlWriter(path) as writer:
        for step in steps:
            writer.write(step, {"loss": step / 2, "run": run})


def test_lines_are_strict_json_and_are_read_as_the_same_numbers(tmp_path):
    path = tmp_path / "made" / "run.jsonl"
    figures = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float32(0.1)}
    with metrics.JsonlWriter(path) as writer:
        writer.write(np.int32(7), figures)
        (line,) = read_strictly(path)  # the line is there at once
        writer.write(8, {"loss": jnp.float32(2)})
        writer.flush()
    assert line.pop("seconds") >= 0
    odd = {"a": "NaN", "b": "Infinity", "c": "-Infinity"}
    assert line == {"step": 7, **odd, "d": float(np.float32(0.1))}
    first, second = metrics.read_jsonl(path)
    np.testing.assert_equal({x: first[x] for x in figures}, figures)
    assert second["loss"] == 2


@pytest.mark.parametrize("first", [0, 2, 5, 9])
def test_a_run_that_resumes_replaces_the_steps_that_it_writes_again(tmp_path, first):
    path = tmp_path / "run.jsonl"
    write(path, [0, 1, 2, 2, 3, 4])
    before = path.read_bytes()
    write(path, [])
    assert path.read_bytes() == before
    write(path, [first, first + 1], run=1)
    *kept, one, two = read_strictly(path)
    assert [x["step"] for x in kept] == [x for x in [0, 1, 2, 2, 3, 4] if x < first]
    assert [(x["step"], x["run"]) for x in (one, two)] == [(first, 1), (first + 1, 1)]
    assert before.startswith(b"".join(path.read_bytes().splitlines(True)[:-2]))


@pytest.mark.filterwarnings("ignore:.*the last line was cut off")
def test_a_last_line_that_is_cut_off_anywhere_is_left_out_and_replaced(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, range(3))
    whole = path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for cut in range(start + 1, len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.warns(UserWarning, match=r"run.jsonl: the last line was cut off"):
            assert [x["step"] for x in metrics.read_jsonl(path)] == [0, 1]
        write(path, [2, 3])
        assert [x["step"] for x in read_strictly(path)] == [0, 1, 2, 3]


def test_a_file_of_something_else_is_refused_and_not_changed(tmp_path):
    path = tmp_path / "notes"
    for text in (b"# notes\n", b"{}\n", b"[1]\n", b"\xff\xfe\n"):
        path.write_bytes(text)
        with pytest.raises(ValueError, match=r"line 1, is not a line of metrics\.Json"):
            metrics.JsonlWriter(path)
        assert path.read_bytes() == text


def test_tensorboard_gets_every_figure_and_the_step_at_which_a_run_resumes(tmp_path):
    writer = metrics.TensorBoardWriter(tmp_path / "made")
    writer.write(5, {"loss": 0.5, "gravac/gains/Bits(1, turns=4)": 0.25})
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
    named = (5, "gravac/gains/Bits(1, turns=4)", 0.25)
    expected = [(5, "loss", 0.5), named, (6, "loss", math.nan)]
    np.testing.assert_equal(figures, expected)


def test_a_package_that_is_not_installed_is_named(tmp_path, monkeypatch):
    for module, make in TOOLS.items():
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ImportError, match=rf"needs {module}: pip .*'.\[tools\]'"):
            make(tmp_path)


TOOLS = {
    "tensorboardX": metrics.TensorBoardWriter,
    "rich": lambda _: metrics.LiveView(3),
}


def test_what_is_no_writer_is_refused_when_it_is_given(tmp_path):
    with pytest.raises(TypeError, match=r"writers, such as metrics.JsonlWriter.*'run'"):
        metrics.Recorder("run")
    with (
        metrics.JsonlWriter(tmp_path / "run.jsonl") as writer,
        pytest.raises(TypeError, match=r"such as lambda:.*got a JsonlWriter"),
    ):
        metrics.first_host(writer)


# The live view.


def view_of(is_terminal, figures, **options):
    """The lines that a view of 80 columns leaves after some steps."""
    text = io.StringIO()
    console = Console(file=text, width=80, force_terminal=is_terminal)
    view = metrics.LiveView(console=console, every_seconds=0, **options)
    for i, x in enumerate(figures):
        view.write(i, x)
    view.flush()
    view.close()
    lines = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", text.getvalue()).splitlines()
    return [line for line in lines if line]


FIGURES = [
    {
        "loss": i + 0.5,
        "gravac/rung": 1,
        "gravac/factor": 40.2,
        "gravac/gain": 0.256,
        "gravac/wire_bytes": 1e6,
        "gravac/dense_wire_bytes": 4e6,
        "gravac/bad_steps": i,
        "gravac/gains/Dense()": 1.0,
        'gravac/gains/TopK(100, select="exact")': 0.256,
    }
    for i in range(3)
]
SHOWN = 'TopK(100, select="exact")', "factor 40", "gain 0.26"
SENT = "sent 3.0 MB (dense 12.0 MB, 4.0x)"


def test_the_view_fits_a_terminal_of_80_columns():
    options = {"total_steps": 100_000, "title": "lstm-ptb-small-default-0"}
    bar, figures, sent, alarm = view_of(True, FIGURES, **options)[-4:]
    assert re.search(r"lstm-ptb-small-default-0 .* 3/100000 .* left", bar)
    assert figures.split("  ") == ["loss 1.5000", *SHOWN]
    assert sent == SENT
    assert alarm == "2 bad steps: a gradient was not finite"
    assert len(bar) <= 80


def test_a_local_step_leaves_what_was_sent_last_in_the_view():
    local = {"loss": 0.0, "gravac/rung": 2, "gravac/factor": math.inf}
    line = view_of(False, [*FIGURES, FIGURES[0] | local], total_steps=4)[-1]
    assert f"loss 1.1250, {', '.join(SHOWN)}, sent" in line


def test_gradients_that_are_alike_by_chance_raise_no_alarm():
    for alike, is_loud in ((1, False), (3, True)):
        figures = [{"gravac/alike_steps": alike * (i == 149)} for i in range(150)]
        shown = " ".join(view_of(False, figures, total_steps=200))
        assert ("all replicas had the same gradient" in shown) == is_loud


def test_outside_of_a_terminal_the_view_prints_lines():
    *lines, last = view_of(False, FIGURES, total_steps=3, title="adaptive")
    assert [x[:27] for x in lines] == [f"adaptive, step {i} of 3, loss" for i in (1, 2)]
    assert f"adaptive, step 3 of 3, {', '.join(['loss 1.5000', *SHOWN, SENT])}" in last
    assert last.endswith("2 bad steps: a gradient was not finite")


def test_the_view_shows_the_figures_that_it_is_given_also_a_loss_that_is_not_finite():
    first, last = view_of(False, [{"other": 1.0}, {"loss": math.nan}], total_steps=2)
    assert first == "step 1 of 2"
    assert re.fullmatch(r"step 2 of 2, loss nan, \d+ ms/step", last)


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


def test_if_one_writer_cannot_be_opened_or_closed_the_others_are_closed():
    kept, broken = Kept(), Kept()
    with pytest.raises(ZeroDivisionError):
        metrics.first_host(lambda: kept, lambda: 1 / 0)
    assert kept == ["closed"]
    broken.close = lambda: 1 / 0
    with (
        pytest.raises(ZeroDivisionError),
        metrics.first_host(lambda: kept, lambda: broken),
    ):
        pass
    assert kept == ["closed"] * 2
