"""What the transformer is trained with."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Config:
    """What people train today, which GraVAC's paper does not: a GPT-2 with AdamW.

    "paper" is the size of Radford et al.'s (2019) smallest; learning rate, schedule,
    betas, decay and clip are those of Brown et al. (2020) for a GPT-3 of that size.
    """

    data: Literal["bytes", "ptb"] = "bytes"
    """Of any text; or the words of the Penn Treebank."""
    layers: int = 12
    width: int = 768
    heads: int = 12
    length: int = 1024
    """Tokens per window."""
    rows: int = 8
    """Windows per replica; arbitrary."""
    micro_batches: int = 8
    """Parts into which a replica's windows are split: all at once need 22 GB at full
    size, by XLA's analysis of the gradient's program for a CPU."""
    learning_rate: float = 6e-4
    """At its peak; a cosine leads from there to a tenth."""
    warm_up_steps: int = 700
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.1
    """Decoupled, of matrices."""
    clip: float = 1.0
    """Largest global norm of the averaged gradient."""
    steps: int = 20_000
    """Arbitrary."""
    evaluate_every: int = 500
    evaluation_rows: int = 2
    """Windows per replica."""


PRESETS = {
    "paper": Config(),
    # 0.8 million params. The learning rate is the best of 0.001, 0.002 and 0.004 for
    # dense steps, after 200.
    "small": Config(
        layers=4,
        width=128,
        heads=4,
        length=128,
        rows=4,
        micro_batches=1,
        learning_rate=4e-3,
        warm_up_steps=50,
        steps=400,
        evaluate_every=100,
        evaluation_rows=4,
    ),
}
