"""The tasks by name."""

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
from tasks.task import Batch, Params, Task
from tasks.transformer import TransformerLanguageModel
from tasks.vgg import VGG
from tasks.vit import VisionTransformer


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a task's model, and how to train it.

    Args:
      model: Arguments of the model.
      rows: Examples per replica and step.
      learning_rate: The peak, for SGD with momentum 0.9 and a clip at norm 1.
    """

    model: dict[str, Any]
    rows: int
    learning_rate: float


# Two CPU cores are enough. The learning rates did well over 200 to 600 dense steps on
# bytes and on CIFAR-10.
LSTM = Size({"width": 128, "layers": 2}, rows=8, learning_rate=2.0)
TRANSFORMER = Size({"width": 128, "layers": 2, "heads": 4}, rows=8, learning_rate=0.3)
RESNET = Size({"widths": (16, 32, 64), "blocks": 1}, rows=8, learning_rate=0.05)
# ResNet-20, half as wide in its first stage, which costs a CPU most: 259,000 params.
RESNET20 = Size({"widths": (8, 32, 64), "blocks": 3, "over_batch": True}, 16, 0.1)
VGG_STAGES = ((16,), (32,), (64, 64), (128, 128), (128, 128))
SMALL_VGG = Size({"stages": VGG_STAGES, "hidden": 256}, rows=8, learning_rate=0.05)
SMALL_CNN = Size(
    {"stages": ((16,), (32,), (64,)), "hidden": 128, "over_batch": True}, 16, 0.1
)
LENET = Size({"stages": ((16,), (32,)), "hidden": 64}, rows=16, learning_rate=0.05)
SMALL_VIT = Size(
    {"patch": 4, "width": 96, "layers": 3, "heads": 4}, rows=8, learning_rate=0.05
)
# 137,000 params, for many replicas on two cores.
SMALL_GPT = Size({"width": 64, "layers": 2, "heads": 4}, rows=2, learning_rate=0.3)
# What needs a GPU: ResNet-18, and a GPT of 10.9 million params.
RESNET18 = Size(
    {"widths": (64, 128, 256, 512), "blocks": 2}, rows=8, learning_rate=0.05
)
GPT = Size({"width": 384, "layers": 6, "heads": 6}, rows=8, learning_rate=0.3)
BYTES, WORDS = 64, 35  # predictions per window; GraVAC has 35 words


def load(name: str, data_dir: Path, *, length: int | None = None) -> Task:
    """Return a task: reads the files and sets up the model, initializes nothing.

    Params, losses and gradients are float32, and every function is pure, so that a step
    runs under `gravac.data_parallel`. A batch for `loss` is
    `{"tokens": [rows, length + 1] int32}`, or `{"image": [rows, 32, 32, 3] uint8,
    "label": [rows] int32}`, as `tasks.pipeline` makes them.

    Args:
      name: One of `TASKS`.
      data_dir: The folder of the files; see `tasks.text` and `tasks.cifar`.
      length: Predictions per window of text. Default: 64 bytes or 35 words.

    Raises:
      ValueError: If there is no such task, `length` is below 1, or given for images.
      DataError: If a file is missing, truncated or foreign.
    """
    if name not in TASKS:
        raise ValueError(f"no task {name!r}; there are: {', '.join(TASKS)}.")
    if length is not None and length < 1:
        raise ValueError(f"`length` must be at least 1, got {length}.")
    return TASKS[name](name, Path(data_dir), length)


def _language(
    model: type[nn.Module],
    size: Size,
    read: Callable[..., Any],
    default: int,
    unit: str,
) -> Callable[..., Task]:
    def build(name: str, data_dir: Path, length: int | None) -> Task:
        parts, vocabulary = read(data_dir, default if length is None else length)
        module = model(vocabulary, **size.model)

        def init(key: jax.Array) -> Params:
            return module.init(key, parts[0][0]["tokens"][None, :-1])["params"]

        def metrics(params: Params, batch: Batch) -> dict[str, jax.Array]:
            inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
            logits = module.apply({"params": params}, inputs)
            return {"loss": cross_entropy(logits, targets)}

        train, valid, test = parts
        how = size.rows, unit, size.learning_rate
        return Task(name, train, valid, test, init, metrics, *how)

    return build


def _images(
    model: type[nn.Module], size: Size, layout: cifar.Layout
) -> Callable[..., Task]:
    def build(name: str, data_dir: Path, length: int | None) -> Task:
        if length is not None:
            raise ValueError(f"`length` is for text, and {name} has images.")
        parts, classes = cifar.read_cifar(data_dir, layout)
        module = model(classes, **size.model)

        def init(key: jax.Array) -> Params:
            return module.init(key, parts[0][0]["image"][None])["params"]

        def metrics(params: Params, batch: Batch) -> dict[str, jax.Array]:
            logits: Any = module.apply({"params": params}, batch["image"])
            hits = logits.argmax(-1) == batch["label"]
            return {
                "loss": cross_entropy(logits, batch["label"]),
                "accuracy": hits.astype(jnp.float32).mean(),
            }

        train, valid, test = parts
        how = size.rows, "nats an image", size.learning_rate
        return Task(name, train, valid, test, init, metrics, *how)

    return build


def cross_entropy(logits: Any, labels: jax.Array) -> jax.Array:
    """Return the mean over all predictions."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


_BYTES = (text.read_bytes, BYTES, "nats a byte")
_WORDS = (text.read_ptb, WORDS, "nats a word")
TASKS = {
    "lstm-bytes": _language(LSTMLanguageModel, LSTM, *_BYTES),
    "lstm-ptb": _language(LSTMLanguageModel, LSTM, *_WORDS),
    "transformer-bytes": _language(TransformerLanguageModel, TRANSFORMER, *_BYTES),
    "transformer-ptb": _language(TransformerLanguageModel, TRANSFORMER, *_WORDS),
    "small-gpt-bytes": _language(TransformerLanguageModel, SMALL_GPT, *_BYTES),
    "gpt-bytes": _language(TransformerLanguageModel, GPT, *_BYTES),
    "resnet-cifar10": _images(ResNet, RESNET, cifar.CIFAR10),
    "resnet20-cifar10": _images(ResNet, RESNET20, cifar.CIFAR10),
    "resnet18-cifar10": _images(ResNet, RESNET18, cifar.CIFAR10),
    "cnn-cifar10": _images(VGG, SMALL_CNN, cifar.CIFAR10),
    "lenet-cifar10": _images(VGG, LENET, cifar.CIFAR10),
    "vgg-cifar10": _images(VGG, SMALL_VGG, cifar.CIFAR10),
    "vit-cifar10": _images(VisionTransformer, SMALL_VIT, cifar.CIFAR10),
}
