"""Figures of a step: fetched exactly, written to files, shown in the terminal."""

import functools
import io
import json
import math
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from rich.console import Console

import gravac_jax as gravac
from gravac_jax import metrics

STEPS = 4
GRAVAC = gravac.GraVAC((gravac.Dense(), gravac.TopK(4)))
TX = optax.chain(gravac.transform(None, compress=True, send=GRAVAC), optax.sgd(0.1))
PARAMS = {"w": jnp.arange(1.0, 41.0)}
FIND = lambda state: optax.tree.get(state, "StepInfo")
update = jax.jit(TX.update)
update_donated = jax.jit(TX.update, donate_argnums=1)


@functools.cache
def states():
    """Return the state after each step; the gradient of the second is not finite."""
    found = [TX.init(PARAMS)]
    for factor in (1, jnp.nan, 3, 4):
        found.append(update({"w": factor * PARAMS["w"]}, found[-1], PARAMS)[1])
    return found[1:]


def expected_of(info):
    """Return the figures of a `StepInfo`, field by field."""
    found = {}
    for name, x in info._asdict().items():
        x = np.asarray(x)
        parts = {f"/{i}": y for i, y in enumerate(x)} if x.ndim else {"": x}
        found |= {f"gravac/{name}{end}": float(y) for end, y in parts.items()}
    return found


def nnx_optimizer():
    return nnx.Optimizer(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), TX, wrt=nnx.Param)


MESH = gravac.make_mesh(devices=jax.devices()[:4])
# What a user may hold.
HELD = {
    "chain": lambda state: state,
    "within others": lambda state: {"a": [state, None], "b": jnp.ones(3)},
    "info alone": FIND,
    "linen": lambda state: train_state.TrainState(0, None, PARAMS, TX, state),
    "mesh": lambda state: gravac.place(state, MESH),
    "pmap": lambda state: jax.pmap(lambda _: state)(jnp.arange(4)),
    "nnx": lambda _: nnx_optimizer(),
    "nnx, split": lambda _: nnx.split(nnx_optimizer())[1],
}


@pytest.mark.parametrize("held", HELD)
def test_scalars_are_the_fields_of_the_step_info_wherever_it_is(held):
    state = TX.init(PARAMS) if "nnx" in held else states()[2]
    held = HELD[held](state)
    with jax.set_mesh(MESH):
        found = metrics.scalars(held, loss=jnp.float32(0.5))
    assert all(type(x) is float for x in found.values())
    assert found == expected_of(FIND(state)) | {"loss": 0.5}


def test_scalars_of_many_steps_are_refused_and_those_of_each_are_not():
    infos = jax.tree.map(lambda *x: jnp.stack(x), *map(FIND, states()))
    alone = [metrics.scalars(x) for x in states()]
    of_step = lambda i: jax.tree.map(lambda x: x[i], infos)
    assert [metrics.scalars(of_step(i)) for i in range(STEPS)] == alone
    assert {x["gravac/is_finite"] for x in alone} == {0.0, 1.0}
    with pytest.raises(ValueError, match=r"`gravac/rung` must.*x\[i\]"):
        metrics.scalars(infos)


def test_what_has_no_figures_of_one_step_is_refused():
    state = TX.init(PARAMS)
    for found, tree in (("0 in a dict", {"w": jnp.ones(3)}), ("2 in", [state, state])):
        with pytest.raises(ValueError, match=f"found {found}"):
            metrics.scalars(tree)
    put = lambda x, spec: jax.device_put(x, jax.NamedSharding(MESH, spec))
    assert metrics.scalars(state, loss=put(jnp.zeros(1), jax.P()))["loss"] == 0
    for tokens in (3_000_000_000, np.int64(5 * 10**9)):  # beyond 32 bits
        assert metrics.scalars(state, tokens=tokens)["tokens"] == np.float32(tokens)
    each = put(jnp.arange(4.0), jax.P("data"))  # each device has one entry
    for wrong in (None, {"a": 1.0, "b": 2.0}, jnp.ones(3), each):
        with pytest.raises(ValueError, match=r"`loss` must be a number .* its mean"):
            metrics.scalars(state, loss=wrong)
    update_donated(PARAMS, state, PARAMS)
    with pytest.raises(RuntimeError, match="deleted"):
        metrics.scalars(state)


class Kept(list):
    """A writer that keeps its figures in a list."""

    def write(self, step, scalars):
        self.append((step, dict(scalars)))

    def close(self):
        self.append("closed")


def test_a_recorder_writes_each_step_when_the_next_one_is_recorded():
    alone, kept, state = Kept(), Kept(), TX.init(PARAMS)
    with metrics.Recorder(kept) as recorder:
        for i in range(STEPS):
            _, state = update_donated(PARAMS, state, PARAMS)
            alone.write(i, metrics.scalars(state, loss=2 * i))
            recorder.record(i, state, loss=2 * i)
            assert kept == alone[:i]
    assert kept == alone


# Names and decisions.


@pytest.mark.parametrize("send", [GRAVAC, gravac.TopK(4)], ids=repr)
def test_gains_have_the_names_of_encodings_if_the_recorder_is_told(send):
    tx, kept = gravac.transform(None, compress=True, send=send), Kept()
    _, state = jax.jit(tx.update)(PARAMS, tx.init(PARAMS))
    with metrics.Recorder(kept, send=send) as recorder:
        recorder.record(0, state)
    ((_, figures),) = kept
    names = list(map(repr, getattr(send, "ladder", (send,))))
    gains = {k: x for k, x in figures.items() if "gains" in k}
    assert list(gains) == [f"gravac/gains/{name}" for name in names]
    assert list(gains.values()) == FIND(state).gains.tolist()
    taken = names[int(figures["gravac/rung"])]
    (line,) = view_of(False, [figures], total_steps=9)
    assert f"step 1 of 9, {taken}, factor" in line


def test_a_recorder_refuses_what_is_no_writer_or_not_the_send_of_the_transform():
    with pytest.raises(TypeError, match=r"`send` must be an encoding.*got 'fastest'"):
        metrics.Recorder(Kept(), send="fastest")
    with pytest.raises(TypeError, match=r"`send` must be an encoding.*got \(\)"):
        metrics.Recorder(Kept(), send=())
    with pytest.raises(TypeError, match=r"needs `write` and `close`, got 'one.jsonl'"):
        metrics.Recorder("one.jsonl")
    recorder = metrics.Recorder(Kept(), send=gravac.Bits(2))
    with pytest.raises(ValueError, match=r"the encodings Bits\(2\), .* is of 2\. Give"):
        recorder.record(0, states()[0])


def test_a_decision_is_explained_by_the_figures_that_it_compared():
    ladder = (*gravac.Fastest().ladder[:-1], gravac.Bits(1), gravac.TopK(10))
    send = gravac.Fastest(ladder, least_progress=0.45)
    nothing = optax.tree.set(
        states()[0], ladder=jnp.zeros(6, "uint32"), controller=send.init()[1]
    )
    assert "predicted nothing yet" in metrics.explain(nothing, send)
    found = optax.tree.set(
        nothing,
        seconds=jnp.array([1.5, 0.25, 0.0625, 0.125, 0.5, 0.5]),
        progress=jnp.array([1.0, 0.5, 0.625, 0.25, 0.0, 0.5]),
        home=jnp.int32(2),
        current=jnp.int32(1),
    )
    said = metrics.explain(HELD["pmap"](found), send)
    assert [re.split("  +", x) for x in said.splitlines()] == [
        ["sends", "ms a step", "progress", "ms for a dense step's progress"],
        ["Dense()", "1500.0", "1.00", "1500.0"],
        ["Bits(8)", "250.0", "0.50", "500.0", "visited, to measure it"],
        ["Bits(2)", "62.5", "0.62", "100.0", "taken"],
        ["Bits(2, turns=4)", "125.0", "0.25", "500.0", "too little progress"],
        ["Bits(1)", "500.0", "0.00", "never", "only at own params"],
        ["TopK(10)", "500.0", "0.50", "1000.0"],
        [
            "The milliseconds are predicted by gravac.WireCost alone, since no step"
            " time was measured."
        ],
    ]


def test_what_predicts_nothing_cannot_be_explained():
    with pytest.raises(TypeError, match=r"Bits\(2\) predicts.*gravac\.Fastest\(\)"):
        metrics.explain(states()[0], gravac.Bits(2))
    with pytest.raises(ValueError, match=r"has the encodings .*and the state is of"):
        metrics.explain(states()[0], gravac.Fastest())


# Files.


def read_strictly(path):
    """Return the lines of a file, which must not contain NaN or Infinity."""
    lines = path.read_text().splitlines()
    return [json.loads(x, parse_constant=pytest.fail) for x in lines]


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
    with metrics.JsonlWriter(path) as writer, pytest.raises(TypeError):
        writer.write(first, {"seconds": 1.0})
    assert path.read_bytes() == before
    with warnings.catch_warnings(record=True) as said:
        write(path, [first, first + 1], run=1)
    assert ["6 lines, of an earlier" in str(x.message) for x in said] == [True][first:]
    *kept, one, two = read_strictly(path)
    assert [x["step"] for x in kept] == [x for x in [0, 1, 2, 2, 3, 4] if x < first]
    assert [(x["step"], x["run"]) for x in (one, two)] == [(first, 1), (first + 1, 1)]
    assert before.startswith(b"".join(path.read_bytes().splitlines(True)[:-2]))


@pytest.mark.filterwarnings("ignore:.*the last line was cut off")
def test_a_last_line_that_is_cut_off_anywhere_is_left_out_and_replaced(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, range(3))
    whole = path.read_bytes()
    for cut in range(whole[:-1].rindex(b"\n") + 2, len(whole)):
        path.write_bytes(whole[:cut])
        cut_off = r"run.jsonl: the last line was cut off"
        with pytest.warns(UserWarning, match=cut_off) as said:
            assert [x["step"] for x in metrics.read_jsonl(path)] == [0, 1]
        assert said[0].filename == __file__
        write(path, [2, 3])
        assert [x["step"] for x in read_strictly(path)] == [0, 1, 2, 3]


def test_a_file_of_something_else_is_refused_and_not_changed(tmp_path):
    path = tmp_path / "notes"
    for text in (b"# notes\n", b"{}\n", b"[1]\n", b"\xff\xfe\n", b'{"lr": 0.1}'):
        path.write_bytes(text)
        with pytest.raises(ValueError, match=r"line 1 is not a line of metrics\.Json"):
            metrics.JsonlWriter(path)
        assert path.read_bytes() == text


def test_a_damaged_line_is_left_out_and_stays_in_the_file(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, range(4))
    lines = path.read_bytes().splitlines(True)
    too_large = b'{"step": 1' + 400 * b"0" + b"}\n"
    for damaged in (lines[2][:9] + b"\n", 99 * b"\0" + b"\n", too_large):
        path.write_bytes(b"".join([*lines[:2], damaged, *lines[3:]]))
        with pytest.warns(UserWarning, match="line 3 is not a line of .* left out"):
            assert [x["step"] for x in metrics.read_jsonl(path)] == [0, 1, 3]
        with pytest.warns(UserWarning, match="line 3 is not"):
            write(path, [3, 4])
        assert path.read_bytes().startswith(b"".join([*lines[:2], damaged]))
        with pytest.warns(UserWarning, match="line 3 is not"):
            assert [x["step"] for x in metrics.read_jsonl(path)] == [0, 1, 3, 4]


# The live view.


def view_of(is_terminal, figures, **options):
    """Return the lines that a view of 80 columns leaves after some steps."""
    text = io.StringIO()
    console = Console(file=text, width=80, force_terminal=is_terminal)
    with metrics.LiveView(console=console, every_seconds=0, **options) as view:
        for i, x in enumerate(figures):
            view.write(i, x)
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
    assert (sent, alarm) == (SENT, "2 bad steps: a gradient was not finite")
    assert len(bar) <= 80


def test_outside_of_a_terminal_the_view_prints_lines():
    *lines, last = view_of(False, FIGURES, total_steps=3, title="adaptive")
    assert [x[:27] for x in lines] == [f"adaptive, step {i} of 3, loss" for i in (1, 2)]
    assert f"adaptive, step 3 of 3, {', '.join(['loss 1.5000', *SHOWN, SENT])}" in last
    assert last.endswith("2 bad steps: a gradient was not finite")
    # A local step leaves what was sent last.
    local = {"loss": 0.0, "gravac/rung": 2, "gravac/factor": math.inf}
    line = view_of(False, [*FIGURES, FIGURES[0] | local], total_steps=4)[-1]
    assert f"loss 1.1250, {', '.join(SHOWN)}, sent" in line


def test_the_view_shows_the_figures_that_it_is_given_also_a_loss_that_is_not_finite():
    first, last = view_of(False, [{"other": 1.0}, {"loss": math.nan}], total_steps=2)
    assert first == "step 1 of 2"
    assert re.fullmatch(r"step 2 of 2, loss nan, \d+ ms/step", last)


def test_gradients_that_are_alike_by_chance_raise_no_alarm():
    for alike, is_loud in ((1, False), (3, True)):
        figures = [{"gravac/alike_steps": alike * (i == 149)} for i in range(150)]
        shown = " ".join(view_of(False, figures, total_steps=200))
        assert ("all replicas had the same gradient" in shown) == is_loud


# Hosts.


def test_only_the_first_host_opens_writers(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with metrics.first_host(lambda: pytest.fail("opened")) as writer:
        writer.write(0, {"loss": 1.0})
        metrics.Recorder(writer).record(0, "not looked at")


def test_all_writers_get_everything_and_are_closed_also_if_one_cannot_be():
    both = kept, broken = Kept(), Kept()
    with metrics.first_host(*(lambda x=x: x for x in both)) as writer:
        writer.write(3, {"loss": 1.0})
    assert both == ([(3, {"loss": 1.0}), "closed"],) * 2
    kept.clear()
    broken.close = lambda: 1 / 0
    for other in (lambda: 1 / 0, lambda: broken):
        with pytest.raises(ZeroDivisionError), metrics.first_host(lambda: kept, other):
            pass
    assert kept == ["closed"] * 2
