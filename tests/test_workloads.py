"""The paper's workloads train, stop and go on, and are of the paper's sizes."""

import dataclasses
import functools
import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import resnet_cifar.config
import resnet_cifar.model
import transformer_lm.model
import vgg_cifar.config
import vgg_cifar.model
from _harness import assert_close, assert_same, choices
from common.training import train_step
from lstm_ptb.model import LanguageModel
from training import Options, Replicas, Run, methods
from training.sends import parse

import gravac_jax as gravac
from gravac_jax import metrics

# Schedules of Optax need it.
pytestmark = pytest.mark.usefixtures("standard_promotion")

KEY = jax.random.key(0, impl="unsafe_rbg")
STEPS, SAVED, CUT = 4, 2, 3
SHORT = {"steps": STEPS, "evaluate_every": 3, "rows": 2, "evaluation_rows": 2}
# What compression begins at: each has a matrix of 16,384 entries.
SIZES = {
    "lstm_ptb": {"layers": 1, "width": 64, "length": 5, "dropout": 0.1},
    "resnet_cifar": {"blocks": (1,), "width": 48, "drops": (0.5,)},
    "vgg_cifar": {"data": "cifar100", "head": 100, "stages": ((4,),) * 5}
    | {"hidden": 128},
    "transformer_lm": {"layers": 1, "width": 64, "heads": 2, "length": 8},
}
HAS_STATISTICS = {"resnet_cifar", "vgg_cifar"}


def train(name, data_dir, out, monkeypatch, cut=None, **asked):
    """A tiny run; one that is cut ends after so many steps as if it were killed."""
    program = importlib.import_module(f"{name}.train")
    config = dataclasses.replace(program.PRESETS["small"], **SHORT | SIZES[name])
    asked |= {"replicas": 2, "save_every": SAVED}
    states, end_step = [], Run.end_step

    def watched(run, step, state, *others):
        states.append(tuple(state))
        if step + 1 == cut:
            raise KeyboardInterrupt
        return end_step(run, step, state, *others)

    with monkeypatch.context() as patched:
        patched.setattr(Run, "end_step", watched)
        tested = program.train(config, Options(data_dir, out=out, **asked))
    return tested, states[-1], metrics.read_jsonl(out / "metrics.jsonl")


def built(package, preset):
    """The model of a preset, an image network."""
    config = package.config.PRESETS[preset]
    made = package.model.ResNet if package is resnet_cifar else package.model.VGG
    fields = {x.name for x in dataclasses.fields(made)} & set(vars(config))
    return made(**{x: getattr(config, x) for x in fields})


LSTM, IMAGE = LanguageModel(10_000, 1500, 2, 0.0), jnp.zeros((1, 32, 32, 3), "uint8")
WORDS, NOT_TRAINING = jnp.zeros((1, 1024), jnp.int32), {"is_training": False}
GPT_2 = transformer_lm.model.LanguageModel(50_257, 1024, 12, 768, 12)


@pytest.mark.parametrize(
    ("model", "inputs", "options", "size"),
    [
        # 66.034 million in PyTorch, which gives every gate two biases.
        (LSTM, (WORDS[:, :35], LSTM.silent(1)), NOT_TRAINING, 66_034_000 - 8 * 1500),
        # torchvision's resnet101() and vgg16_bn(); the next is its README's.
        (built(resnet_cifar, "paper"), (IMAGE,), NOT_TRAINING, 44_549_160),
        (built(vgg_cifar, "paper"), (IMAGE,), NOT_TRAINING, 138_365_992),
        (built(vgg_cifar, "small"), (IMAGE,), NOT_TRAINING, 679_882),
        (GPT_2, (WORDS,), {}, 124_439_808),
    ],
)
def test_models_have_the_papers_sizes(model, inputs, options, size):
    init = functools.partial(model.init, **options)
    shapes = jax.tree.leaves(jax.eval_shape(init, KEY, *inputs)["params"])
    assert sum(math.prod(x.shape) for x in shapes) == size


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.usefixtures("fast_keys")
def test_a_killed_run_goes_on_to_the_same_bits(name, data_dir, tmp_path, monkeypatch):
    sends = {"lstm_ptb": ("TopK(10)", 10), "transformer_lm": ("default", 15.8)}
    send, factor = sends.get(name, ("Bits(2)", 15.8))
    asked = {"send": send, "bfloat16": name == "resnet_cifar"}
    run = functools.partial(train, name, data_dir, monkeypatch=monkeypatch, **asked)
    tested, state, lines = run(out=tmp_path / "whole")
    assert {x.dtype for x in jax.tree.leaves(state[0])} == {jnp.dtype("float32")}
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert [line["step"] for line in lines if "held_out/loss" in line] == [2, 3]
    assert lines[-1]["gravac/factor"] == pytest.approx(factor, rel=0.01)
    # Those of the norms: the same on all replicas, and not as they began.
    for leaf in jax.tree.leaves(state[1]) if name in HAS_STATISTICS else ():
        one, other = (np.asarray(x.data) for x in leaf.addressable_shards)
        np.testing.assert_array_equal(one, other)
        assert not np.all(np.isin(one, (0.0, 1.0)))
    if name == "resnet_cifar":  # the program with statistics and bfloat16
        with pytest.raises(KeyboardInterrupt):
            run(out=tmp_path / "cut", cut=CUT)
        resumed = run(out=tmp_path / "cut")
        assert_same(resumed[1], state)
        assert resumed[0] == tested
        assert [x["loss"] for x in resumed[2]] == [x["loss"] for x in lines]


def test_what_is_sent_can_be_written_as_text():
    for text in (
        "Bits(2, turns=4)",
        'TopK(100, select="exact")',
        "Fastest((Dense(), LowRank(4)), least_progress=-0.0)",
        "GraVAC(TopK.geometric(4, 16))",
    ):
        made = eval(text, vars(gravac).copy())
        assert parse(text) == parse(repr(made)) == made


def test_other_text_is_refused_and_not_run():
    for text, why in (
        ("Bits(3)", "`bits` must be 8 or 4 or 2 or 1"),
        ("Bits(2", "never closed"),
        ("Bits", r"no call: Bits\(\)"),
        ("TopK.geometric(2, 4)", "makes no encoding"),
        ("open('x')", "there is no open"),
        ("Bits(open('x'))", "there is no open"),
        ("Bits(2).exchange(0)", "there is no Bits"),
        ("Bits(1 if 1 else 2)", "malformed"),
        ("Encoding()", "abstract"),
    ):
        with pytest.raises(SystemExit, match=rf"cannot be sent: .*{why}"):
            parse(text)


def test_a_name_is_that_of_a_recipe_and_of_what_is_sent():
    found = methods.method("late adamw Bits(2, turns=4)")
    assert (found.recipe, found.send) == ("late adamw", gravac.Bits(2, turns=4))
    assert (found.is_own, found.is_told) == (True, False)
    found = methods.method("Fastest((Dense(), TopK(100)))")
    assert (found.recipe, found.is_own, found.is_told) == ("", False, True)
    assert found.ladder == (gravac.Dense(), gravac.TopK(100))
    assert methods.method("dense").send == gravac.Dense()
    with pytest.raises(SystemExit, match=r"has no recipe; recipes are .*adamw:"):
        methods.method("adam Bits(2)")
    with pytest.raises(SystemExit, match=r"is called 'own TopK\(10\)'"):
        methods.method("own TopK(10.0)")


# One of each function that makes an optimizer, and each way to exchange.
TRAINED = "adamw", "", "momentum", "dgc", "diloco", "every 4 own", "late sgd", "muon"


@pytest.mark.parametrize("recipe", choices(TRAINED, lambda x: x == "adamw"))
def test_a_recipe_of_each_kind_trains(recipe):
    send = "TopK(2)" if recipe == "dgc" else "Bits(4)"
    found = methods.method(f"{recipe} {send}".strip())
    tx = found.optimizer(methods.OPTIMIZERS["sgd"], 0.02)
    loss = lambda params, batch: jnp.mean((params["w"] - batch.mean()) ** 2)
    step = gravac.data_parallel(train_step(tx, loss, found.is_own), 2)
    params = {"w": jnp.linspace(-1, 0, 64).reshape(8, 8)}
    state, losses = gravac.place((params, tx.init(params)), 2), []
    for _ in range(40):
        *state, value = step(*state, jnp.ones((2, 1)))
        losses.append(float(value.mean()))
    assert losses[-1] < 0.95 * losses[0]


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
    assert_close((parts, states), (whole, end), rtol=1e-5, atol=1e-6)


def test_a_folder_of_another_run_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"send": "Dense()", "seed": 0}')
    config = resnet_cifar.config.PRESETS["small"]
    options = Options(tmp_path, out=tmp_path)
    with pytest.raises(SystemExit, match=r"with .*: give another --out"):
        Run("resnet_cifar", config, options, Replicas(1), batches=None).__enter__()
