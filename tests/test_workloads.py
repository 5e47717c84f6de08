"""The paper's workloads train, stop and go on, and are of the paper's sizes."""

import dataclasses
import functools
import importlib
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import resnet_cifar.config
import resnet_cifar.model
import transformer_lm.model
import vgg_cifar.config
import vgg_cifar.model
from _task_files import write_all
from lstm_ptb.model import LanguageModel
from paper import report
from paper import run as paper
from training import Options, Replicas, Run, methods

import gravac_jax as gravac
from gravac_jax import metrics

KEY = jax.random.key(0, impl="unsafe_rbg")
STEPS, SAVED, CUT = 4, 2, 3
SHORT = {"steps": STEPS, "evaluate_every": 3, "rows": 2, "evaluation_rows": 2}
# What compression begins at: each has a matrix of 16,384 entries.
SIZES = {
    "lstm_ptb": {"layers": 1, "width": 64, "length": 5, "dropout": 0.1},
    "resnet_cifar": {"blocks": (1,), "width": 48, "drops": (0.5,)},
    "vgg_cifar": {
        "data": "cifar100",
        "head": 100,
        "stages": ((4,),) * 5,
        "hidden": 128,
    },
    "transformer_lm": {"layers": 1, "width": 64, "heads": 2, "length": 8},
}
HAS_STATISTICS = {"resnet_cifar", "vgg_cifar"}
IN_BFLOAT16 = {"resnet_cifar"}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # schedules of Optax need it
        yield


@pytest.fixture
def fast_keys():
    with jax.default_prng_impl("unsafe_rbg"):  # compiles in a fraction of the time
        yield


@dataclasses.dataclass
class Trained:
    """What a run left behind."""

    tested: dict
    state: tuple
    lines: list


def train(name, data_dir, out, monkeypatch, cut=None, **asked):
    """A tiny run; one that is cut ends after so many steps as if it were killed."""
    program = importlib.import_module(f"{name}.train")
    config = dataclasses.replace(program.PRESETS["small"], **SHORT | SIZES[name])
    asked = {"method": "fixed10", "replicas": 2, "save_every": SAVED} | asked
    states, end_step = [], Run.end_step

    def watched(run, step, state, *others):
        states.append(tuple(state))
        if step + 1 == cut:
            raise KeyboardInterrupt
        return end_step(run, step, state, *others)

    with monkeypatch.context() as patched:
        patched.setattr(Run, "end_step", watched)
        tested = program.train(config, Options(data_dir, out=out, **asked))
    return Trained(tested, states[-1], metrics.read_jsonl(out / "metrics.jsonl"))


@pytest.fixture
def on_one_device(monkeypatch):
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)


def count(shapes):
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


def test_the_lstm_has_the_paper_s_size():
    model = LanguageModel(10_000, 1500, 2, 0.0)
    tokens, states = jnp.zeros((1, 35), jnp.int32), model.silent(1)
    init = lambda: model.init(KEY, tokens, states, is_training=False)
    # 66.034 million in PyTorch, which gives every gate two biases.
    assert count(jax.eval_shape(init)) == 66_034_000 - 2 * 4 * 1500


def test_the_networks_for_images_have_the_paper_s_sizes():
    image = jnp.zeros((1, 32, 32, 3), jnp.uint8)
    config = resnet_cifar.config.PRESETS["paper"]
    fields = ("blocks", "width", "has_imagenet_stem", "head")
    resnet = resnet_cifar.model.ResNet(**{x: getattr(config, x) for x in fields})
    config = vgg_cifar.config.PRESETS["paper"]
    fields = ("stages", "hidden", "head", "pooled", "dropout")
    vgg = vgg_cifar.model.VGG(**{x: getattr(config, x) for x in fields})
    small = vgg_cifar.config.PRESETS["small"]
    little = vgg_cifar.model.VGG(**{x: getattr(small, x) for x in fields})
    # torchvision's resnet101() and vgg16_bn(); the last is its README's.
    sizes = [(resnet, 44_549_160), (vgg, 138_365_992), (little, 679_882)]
    for model, size in sizes:
        init = lambda model=model: model.init(KEY, image, is_training=False)["params"]
        assert count(jax.eval_shape(init)) == size


def test_the_transformer_has_the_size_of_gpt_2():
    model = transformer_lm.model.LanguageModel(50_257, 1024, 12, 768, 12)
    init = lambda: model.init(KEY, jnp.zeros((1, 1024), jnp.int32))
    assert count(jax.eval_shape(init)) == 124_439_808


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.usefixtures("fast_keys")
def test_every_program_trains(name, data_dir, tmp_path, monkeypatch):
    asked = {"bfloat16": name in IN_BFLOAT16}
    run = train(name, data_dir, tmp_path, monkeypatch, **asked)
    kinds = {x.dtype for x in jax.tree.leaves(run.state[0])}
    assert kinds == {jnp.dtype("float32")}
    assert [line["step"] for line in run.lines] == list(range(STEPS))
    assert all(math.isfinite(line["loss"]) for line in run.lines)
    evaluated = [line["step"] for line in run.lines if "held_out/loss" in line]
    assert evaluated == [2, 3]
    assert run.lines[-1]["gravac/factor"] == pytest.approx(10, rel=0.01)
    if name in HAS_STATISTICS:
        check_statistics(run.state[1])


@pytest.mark.slow
@pytest.mark.usefixtures("fast_keys")
def test_a_run_that_was_killed_goes_on_to_the_same_bits(
    data_dir, tmp_path, monkeypatch
):
    name = "resnet_cifar"  # which has statistics, too
    whole = train(name, data_dir, tmp_path / "whole", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train(name, data_dir, tmp_path / "cut", monkeypatch, cut=CUT)
    resumed = train(name, data_dir, tmp_path / "cut", monkeypatch)
    jax.tree.map(np.testing.assert_array_equal, whole.state, resumed.state)
    assert resumed.tested == whole.tested
    losses = [[line["loss"] for line in x.lines] for x in (whole, resumed)]
    assert losses[0] == losses[1]


def check_statistics(statistics):
    """Those of the norms: the same on all replicas, and not as they began."""
    for leaf in jax.tree.leaves(statistics):
        one, other = (np.asarray(x.data) for x in leaf.addressable_shards)
        np.testing.assert_array_equal(one, other)
        assert not np.all(np.isin(one, (0.0, 1.0)))


@pytest.mark.slow
@pytest.mark.usefixtures("fast_keys")
def test_simulated_replicas_find_what_devices_find(
    data_dir, tmp_path, monkeypatch, request
):
    name = "lstm_ptb"  # which carries a state from batch to batch
    monkeypatch.setitem(SIZES[name], "dropout", 0.0)  # fast keys are others under vmap
    on_mesh = train(name, data_dir, tmp_path / "mesh", monkeypatch)
    request.getfixturevalue("on_one_device")
    simulated = train(name, data_dir, tmp_path / "simulated", monkeypatch)
    for one, other in zip(on_mesh.lines, simulated.lines, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-3)
    assert simulated.tested == pytest.approx(on_mesh.tested, rel=1e-2)


@pytest.mark.slow
@pytest.mark.usefixtures("fast_keys")
def test_the_results_of_methods_are_recorded_once(
    data_dir, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(paper, "TIMED_STEPS", 4)
    monkeypatch.setattr(paper, "FIRST_TIMED", 1)
    presets = importlib.import_module("lstm_ptb.train").PRESETS
    small = dataclasses.replace(presets["small"], **SIZES["lstm_ptb"])
    monkeypatch.setitem(presets, "small", small)
    ask = lambda *methods: paper.Args(
        data_dir, tmp_path / "out.jsonl", methods=methods, replicas=2, steps=2
    )
    paper.main(ask("dense"))
    first = (tmp_path / "out.jsonl").read_text()
    paper.main(ask("dense", "topk10"))
    text = (tmp_path / "out.jsonl").read_text()
    assert text.startswith(first)
    times, dense, topk = [json.loads(line) for line in text.splitlines()[1:]]
    assert times["dense_ms"] == sorted(times["dense_ms"])
    assert times["dense_ms"][0] > 0
    assert (dense["steps"], dense["dense_steps"], dense["mean_factor"]) == (2, 2, 1)
    assert topk["mean_factor"] == pytest.approx(10, rel=0.01)
    assert topk["wire_bytes"] < dense["wire_bytes"]
    assert topk["dense_wire_bytes"] == dense["dense_wire_bytes"]
    assert [x["step"] for x in topk["evaluations"]] == [2]
    assert dense["course"] == [[0, 1.0]]
    table = report.text(tmp_path / "out.jsonl")
    assert "| topk10 | " in table
    assert "| 22.0, 1x |" in table
    assert capsys.readouterr().out.endswith(f"{table}\n")


def test_wide_before_a_name_gives_entries_of_8_bytes():
    found = methods.arguments("widesampled10")
    assert found["exchange"] == gravac.AllGather(
        gravac.SampledTopK(), values="float32", indices="int32"
    )
    assert found["controller"] == methods.arguments("sampled10")["controller"]
    assert methods.is_local("widelocalmomentum10")


def test_a_name_may_ask_for_rounds_of_the_largest_entries_of_rows():
    found = methods.arguments("every15rowsadam32")
    assert found["exchange"] == gravac.QuantizedTopK()
    assert found["controller"] == gravac.Every(15, gravac.Fixed(32))
    assert isinstance(found["memory"], gravac.Steps)


@pytest.mark.parametrize(("factor", "bits"), [(8, 4), (16, 2), (32, 1)])
def test_a_name_may_ask_for_parts_in_turn(factor, bits):
    found = methods.arguments(f"delayedturns4allreducedadam{factor}")
    assert found["controller"] == gravac.Fixed(4 * factor)
    assert found["exchange"] == gravac.QuantizedAllReduce(least_bits=bits)
    assert found["exchange"].turns(4 * factor) == 4
    assert found["delay"] == 1


@pytest.mark.parametrize("name", ["turns8default", "turns8gravac", "turns8rows64"])
def test_parts_in_turn_need_few_bits(name):
    with pytest.raises(SystemExit, match=r"turns8.* none of the methods"):
        methods.arguments(name)


def test_a_name_may_ask_for_rounds_that_begin_short():
    name = "every4until400then13allreducedadam16"
    rounds = methods.arguments(name)["controller"]
    lengths = [int(rounds.round_steps(jnp.int32(step), ())) for step in (0, 399, 400)]
    assert lengths == [4, 4, 13]
    words = "AdamW's steps in two bits, every 4 steps, from step 400 every 13"
    assert methods.in_words(name) == words


def test_a_name_may_ask_for_a_part_at_the_end_of_each_round():
    name = "insideevery4turns16allreducedadam16"
    controller = methods.arguments(name.removeprefix("inside"))["controller"]
    assert controller == gravac.Every(4, gravac.Fixed(256))
    rounds = methods.in_rounds(name.removeprefix("inside"))
    assert rounds == (4, "turns16allreducedadam16")
    words = "AdamW's steps in two bits, in 16 turns, every 4 steps"
    assert methods.in_words(name) == f"{words}, learning rate inside"


def test_rounds_may_have_many_stages():
    name = "every1until2then4until6then9adam1"
    rounds = methods.arguments(name)["controller"]
    lengths = [
        int(rounds.round_steps(jnp.int32(step), ())) for step in (0, 2, 5, 6, 99)
    ]
    assert lengths == [1, 4, 4, 9, 9]
    assert methods.in_words(name) == "AdamW's steps whole, every 1 to 9 steps"


def test_a_name_may_ask_for_a_published_recipe():
    assert methods.is_recipe("diloco30")
    assert methods.is_recipe("sparseloco15x32")
    assert not methods.is_recipe("every30adam1")
    assert methods.in_words("diloco30momentum0.6") == (
        "DiLoCo, every 30 steps, momentum 0.6"
    )
    assert (
        methods.in_words("sparseloco15x32") == "SparseLoCo, every 15 steps, factor 32"
    )
    assert methods.in_words("onebitadam200") == (
        "1-bit Adam, the first 200 steps dense"
    )
    assert methods.is_local("diloco30")
    assert not methods.is_local("onebitadam200")
    ours = "insideturns4allreducedadam16"
    assert methods.is_recipe(ours)
    assert methods.in_words(ours) == (
        "AdamW's steps in two bits, in 4 turns, learning rate inside"
    )
    with pytest.raises(SystemExit, match="goes before a method of steps only"):
        methods.is_recipe("insidelocalallreduced16")
    params = {"w": jnp.ones(3000)}
    tx = methods.recipe("diloco30", optax.adamw(1e-3), optax.identity())
    assert optax.tree.get(tx.init(params), "info").local_steps == 0


def test_the_course_of_a_factor_is_its_changes():
    assert paper.course([10.0, 10.0, 40.0, math.inf, 10.0, 10.0]) == [
        [0, 10.0],
        [2, 40.0],
        [3, math.inf],
        [4, 10.0],
    ]


def test_a_step_s_time_is_what_was_timed_and_the_network_s():
    sent = {"wire_bytes": 25e6, "dense_wire_bytes": 1e9, "steps": 2, "dense_steps": 1}
    times = {"dense_ms": [1, 40, 50], "fixed100_ms": [1, 46, 50]}
    record = report.Record("lstm_ptb", 2, *report.own_ms(times), [])
    # Half of the steps select; 12.5 MB at 100 Mbit/s; three messages of 0.1 ms.
    assert record.step_ms(sent, 100) == pytest.approx(40 + 3 + 1000 + 0.3)


def ended(method, seed, loss, **figures):
    """The line of a run."""
    return {"method": method, "seed": seed, "test": {"loss": loss}, **figures}


def test_gaps_are_those_of_a_seed():
    runs = [ended("dense", 0, 2.0), ended("dense", 1, 4.0)]
    runs += [ended("fixed10", *x) for x in ((1, 4.4), (0, 2.1), (2, 9.0))]
    record = report.Record("lstm_ptb", 2, 1, 1, runs)
    assert record.gaps("fixed10") == pytest.approx([0.1, 0.05])


@pytest.mark.parametrize(
    ("bytes_sent", "gap"), [(1, 0.3), (10, 0.2), (100, 0.1), (1000, 0.0), (0.1, np.nan)]
)
def test_the_frontier_is_straight_between_static_factors(bytes_sent, gap):
    places = {"dense": (1000, 1.0), "fixed10": (100, 1.1), "fixed1000": (1, 1.3)}
    runs = [
        ended(method, 0, loss, wire_bytes=own, dense_wire_bytes=1000)
        for method, (own, loss) in {**places, "default": (bytes_sent, 9.0)}.items()
    ]
    record = report.Record("lstm_ptb", 2, 1, 1, runs)
    found = record.frontier("default")
    np.testing.assert_allclose(found, gap, rtol=1e-12, atol=1e-12)


def test_the_state_of_the_lstm_goes_on_from_window_to_window():
    model, rng = LanguageModel(11, 8, 2, 0.0), np.random.default_rng(0)
    tokens, silent = rng.integers(0, 11, (3, 12), np.int32), model.silent(3)
    init = functools.partial(model.init, is_training=False)
    draw = lambda x: rng.normal(size=x.shape).astype("f4")
    params = jax.tree.map(draw, jax.eval_shape(init, KEY, tokens, silent))
    apply = jax.jit(functools.partial(model.apply, is_training=False))
    whole, end = apply(params, tokens, silent)
    first, states = apply(params, tokens[:, :6], silent)
    second, states = apply(params, tokens[:, 6:], states)
    parts = np.concatenate([first, second], axis=1)
    np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 1e-6), states, end)


def test_a_folder_of_another_run_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"method": "dense", "seed": 0}')
    config = resnet_cifar.config.PRESETS["small"]
    options = Options(tmp_path, out=tmp_path)
    with (
        pytest.raises(SystemExit, match=r"with .*: give another --out"),
        Run("resnet_cifar", config, options, Replicas(1), batches=None),
    ):
        pass


def test_a_method_at_each_replica_s_own_params_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="at each replica's own params"):
        _ = Options(tmp_path, method="localfixed10").exchange
