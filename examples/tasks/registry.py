"""The tasks by name, and the sizes that they come in."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from tasks import cifar, text
from tasks.lstm import LSTMLanguageModel
from tasks.resnet import ResNet
from tasks.task import Batch, Params, Source, Task
from tasks.transformer import TransformerLanguageModel


@dataclasses.dataclass(frozen=True)
class Preset:
    """A size of a model, and how to train it."""

    size: dict[str, Any]
    rows: int
    learning_rate: float


# "paper" is GraVAC's LSTM, and ResNet-18 where GraVAC has ResNet-101, with its rows.
# Neither paper trains a transformer: that one has the size of GPT-2's smallest.
# The learning rates of "tiny" did well over 200 to 600 dense steps on bytes and on
# CIFAR-10; those of larger presets are guesses.
LSTM = {
    "tiny": Preset({"width": 128, "layers": 2}, rows=8, learning_rate=2.0),
    "small": Preset({"width": 384, "layers": 2}, rows=16, learning_rate=1.0),
    "paper": Preset({"width": 1500, "layers": 2}, rows=20, learning_rate=1.0),
}
TRANSFORMER = {
    "tiny": Preset({"width": 128, "layers": 2, "heads": 4}, 8, 0.3),
    "small": Preset({"width": 256, "layers": 4, "heads": 4}, 16, 0.1),
    "paper": Preset({"width": 768, "layers": 12, "heads": 12}, 20, 0.1),
}
RESNET = {
    "tiny": Preset({"widths": (16, 32, 64), "blocks": 1}, 8, 0.05),
    "small": Preset({"widths": (32, 64, 128), "blocks": 3}, 16, 0.1),
    "paper": Preset({"widths": (64, 128, 256, 512), "blocks": 2}, 32, 0.1),
}
PRESETS = tuple(LSTM)
BYTES, WORDS = 64, 35  # predictions per window; GraVAC has 35 words


def load(
    name: str, data_dir: Path, *, preset: str = "tiny", length: int | None = None
) -> Task:
    """A task: reads the files and sets up the model, initializes nothing.

    Params, losses and gradients are float32, and every function is pure, so that a step
    runs under `gravac.data_parallel` and `gravac.simulate`. A batch for `loss` is
    `{"tokens": [rows, length + 1] int32}`, or `{"image": [rows, 32, 32, 3] uint8,
    "label": [rows] int32}`, as `tasks.pipeline` makes them.

    Args:
      name: one of `TASKS`.
      data_dir: where the files are; see `tasks.text` and `tasks.cifar`.
      preset: one of `PRESETS`. "tiny" trains on two CPU cores.
      length: predictions per window of text. Default: 64 bytes or 35 words.

    Returns:
      The task.

    Raises:
      ValueError: if there is no such task or preset, `length` is below 1, or given for
        images.
      DataError: if a file is missing, truncated or foreign.
    """
    for kind, given, known in [("task", name, TASKS), ("preset", preset, PRESETS)]:
        if given not in known:
            raise ValueError(f"no {kind} {given!r}; there are: {', '.join(known)}.")
    if length is not None and length < 1:
        raise ValueError(f"`length` must be at least 1, got {length}.")
    return TASKS[name](name, Path(data_dir), preset, length)


def _language(
    model: type[nn.Module],
    presets: dict[str, Preset],
    read: Callable[..., Any],
    default: int,
    unit: str,
) -> Callable[..., Task]:
    def build(name: str, data_dir: Path, preset: str, length: int | None) -> Task:
        parts, vocabulary = read(data_dir, default if length is None else length)
        module = model(vocabulary, **presets[preset].size)

        def init(key: jax.Array) -> Params:
            return module.init(key, parts[0][0]["tokens"][None, :-1])["params"]

        def metrics(params: Params, batch: Batch) -> dict[str, jax.Array]:
            inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
            logits = module.apply({"params": params}, inputs)
            return {"loss": cross_entropy(logits, targets)}

        return _task(name, parts, init, metrics, presets[preset], unit)

    return build


def _images(
    model: type[nn.Module], presets: dict[str, Preset], layout: cifar.Layout
) -> Callable[..., Task]:
    def build(name: str, data_dir: Path, preset: str, length: int | None) -> Task:
        if length is not None:
            raise ValueError(f"`length` is for text, and {name} has images.")
        parts, classes = cifar.read_cifar(data_dir, layout)
        module = model(classes, **presets[preset].size)

        def init(key: jax.Array) -> Params:
            return module.init(key, parts[0][0]["image"][None])["params"]

        def metrics(params: Params, batch: Batch) -> dict[str, jax.Array]:
            logits = module.apply({"params": params}, batch["image"])
            hits = logits.argmax(-1) == batch["label"]
            return {
                "loss": cross_entropy(logits, batch["label"]),
                "accuracy": hits.astype(jnp.float32).mean(),
            }

        return _task(name, parts, init, metrics, presets[preset], "nats an image")

    return build


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over all predictions."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _task(
    name: str,
    parts: list[Source],
    init: Callable[[jax.Array], Params],
    metrics: Callable[[Params, Batch], dict[str, jax.Array]],
    preset: Preset,
    unit: str,
) -> Task:
    train, validation, test = parts
    return Task(
        name=name,
        train=train,
        validation=validation,
        test=test,
        init=init,
        loss=lambda params, batch: metrics(params, batch)["loss"],
        metrics=metrics,
        rows=preset.rows,
        unit=unit,
        learning_rate=preset.learning_rate,
    )


_BYTES = (text.read_bytes, BYTES, "nats a byte")
_WORDS = (text.read_ptb, WORDS, "nats a word")
TASKS = {
    "lstm-bytes": _language(LSTMLanguageModel, LSTM, *_BYTES),
    "lstm-ptb": _language(LSTMLanguageModel, LSTM, *_WORDS),
    "transformer-bytes": _language(TransformerLanguageModel, TRANSFORMER, *_BYTES),
    "transformer-ptb": _language(TransformerLanguageModel, TRANSFORMER, *_WORDS),
    "resnet-cifar10": _images(ResNet, RESNET, cifar.CIFAR10),
    "resnet-cifar100": _images(ResNet, RESNET, cifar.CIFAR100),
}
