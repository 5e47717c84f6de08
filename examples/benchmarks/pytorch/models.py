"""The tasks' models in PyTorch, of the same shapes."""

# pyright: reportMissingImports=false

from typing import Any

import torch
from torch import nn

VOCABULARY = {"lstm-ptb": 10_000, "lstm-bytes": 256}
LENGTH = {"lstm-ptb": 35, "lstm-bytes": 64}
WIDTH = 128  # of the LSTM
WIDTHS = (16, 32, 64)  # of the residual network
ROWS = 8  # of a batch


def language_model(task: str) -> Any:
    """Return `tasks.lstm`'s model, but for a second bias in each layer."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY[task], WIDTH)
            self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
            self.head = nn.Linear(WIDTH, VOCABULARY[task])

        def forward(self, tokens: Any) -> Any:
            hidden, _ = self.lstm(self.embed(tokens[:, :-1]))
            logits, targets = self.head(hidden), tokens[:, 1:]
            return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

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


def random_batch(task: str, rows: int) -> Any:
    """Return inputs of the task's shapes."""
    if task in VOCABULARY:
        return torch.randint(VOCABULARY[task], (rows, LENGTH[task] + 1))
    return torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,))


def build(task: str) -> nn.Module:
    """Return a fresh model of a task."""
    return language_model(task) if task in VOCABULARY else residual_network()
