"""The tasks' models in PyTorch, of the same shapes."""

# pyright: reportMissingImports=false

import functools
from typing import Any

import torch
from torch import nn

VOCABULARY = {"lstm-ptb": 10_000, "lstm-bytes": 256, "transformer-bytes": 256}
LENGTH = {"lstm-ptb": 35, "lstm-bytes": 64, "transformer-bytes": 64}
WIDTH = 128  # of the language models
HEADS, LAYERS = 4, 2
WIDTHS = (16, 32, 64)  # of the residual network
STAGES = ((16,), (32,), (64, 64), (128, 128), (128, 128))  # of the VGG
HIDDEN = 256
ROWS = 8  # of a batch


def next_token_loss(logits: Any, tokens: Any) -> Any:
    """Return the mean cross-entropy of all tokens but the first."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def lstm(task: str) -> Any:
    """Return `tasks.lstm`'s model, but for a second bias in each layer."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY[task], WIDTH)
            self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
            self.head = nn.Linear(WIDTH, VOCABULARY[task])

        def forward(self, tokens: Any) -> Any:
            hidden, _ = self.lstm(self.embed(tokens[:, :-1]))
            return next_token_loss(self.head(hidden), tokens)

    return Model()


def transformer(task: str) -> Any:
    """Return `tasks.transformer`'s model."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
            self.mix = nn.Linear(WIDTH, WIDTH)
            inner = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh")
            self.perceptron = nn.Sequential(*inner, nn.Linear(4 * WIDTH, WIDTH))

        def forward(self, x: Any) -> Any:
            per_head = lambda y: y.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            q, k, v = map(per_head, self.qkv(self.norms[0](x)).chunk(3, dim=-1))
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.mix(mixed.transpose(1, 2).flatten(2))
            return x + self.perceptron(self.norms[1](x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY[task], WIDTH)
            self.positions = nn.Parameter(0.02 * torch.randn(LENGTH[task], WIDTH))
            blocks = (Block() for _ in range(LAYERS))
            self.body = nn.Sequential(*blocks, nn.LayerNorm(WIDTH))
            self.head = nn.Linear(WIDTH, VOCABULARY[task])

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens[:, :-1]) + self.positions
            return next_token_loss(self.head(self.body(x)), tokens)

    return Model()


def residual_network() -> Any:
    """Return `tasks.resnet`'s model."""

    def conv(inputs: int, outputs: int, side: int, stride: int = 1) -> Any:
        filters = nn.Conv2d(inputs, outputs, side, stride, side // 2, bias=False)
        return nn.Sequential(filters, nn.GroupNorm(outputs // 16, outputs))

    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            inner = (
                conv(inputs, outputs, 3, stride),
                nn.ReLU(),
                conv(outputs, outputs, 3),
            )
            self.inner = nn.Sequential(*inner)
            same = inputs == outputs and stride == 1
            self.around = nn.Identity() if same else conv(inputs, outputs, 1, stride)

        def forward(self, x: Any) -> Any:
            return nn.functional.relu(self.inner(x) + self.around(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inputs = WIDTHS[:1] + WIDTHS[:-1]
            strides = (1, *(2 for _ in WIDTHS[1:]))
            blocks = map(Block, inputs, WIDTHS, strides)
            self.body = nn.Sequential(conv(3, WIDTHS[0], 3), nn.ReLU(), *blocks)
            self.head = nn.Linear(WIDTHS[-1], 10)

        def forward(self, batch: Any) -> Any:
            images, labels = batch
            logits = self.head(self.body(images).mean((2, 3)))
            return nn.functional.cross_entropy(logits, labels)

    return Model()


def vgg() -> Any:
    """Return `tasks.vgg`'s model."""

    def conv(inputs: int, outputs: int) -> Any:
        filters = nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False)
        return nn.Sequential(filters, nn.GroupNorm(outputs // 16, outputs), nn.ReLU())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inputs, layers = 3, []
            for widths in STAGES:
                layers += map(conv, (inputs, *widths[:-1]), widths)
                layers.append(nn.MaxPool2d(2))
                inputs = widths[-1]
            hidden = nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN)
            head = nn.ReLU(), nn.Linear(HIDDEN, 10)
            self.body = nn.Sequential(*layers, nn.Flatten(), *hidden, *head)

        def forward(self, batch: Any) -> Any:
            images, labels = batch
            return nn.functional.cross_entropy(self.body(images), labels)

    return Model()


def random_batch(task: str, rows: int) -> Any:
    """Return inputs of the task's shapes."""
    if task in VOCABULARY:
        return torch.randint(VOCABULARY[task], (rows, LENGTH[task] + 1))
    return torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,))


BUILDERS = {
    "lstm-bytes": functools.partial(lstm, "lstm-bytes"),
    "lstm-ptb": functools.partial(lstm, "lstm-ptb"),
    "transformer-bytes": functools.partial(transformer, "transformer-bytes"),
    "resnet-cifar10": residual_network,
    "vgg-cifar10": vgg,
}


def build(task: str) -> nn.Module:
    """Return a fresh model of a task; it maps a batch to its loss.

    Raises:
      SystemExit: If the task has no model in PyTorch.
    """
    if task not in BUILDERS:
        raise SystemExit(f"no model of {task} in PyTorch; there are: {[*BUILDERS]}")
    return BUILDERS[task]()
