"""Hyper-parameters of the transformer."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Config:
    """A GPT-2 with AdamW, as people train today; GraVAC's paper has no such workload.

    "paper" is the size of Radford et al.'s (2019) smallest; learning rate, schedule,
    betas, decay and clip are those of Brown et al. (2020) for a GPT-3 of that size.

    Args:
      data: Bytes of any text, or the words of the Penn Treebank.
      layers: The number of blocks.
      width: The width of the model.
      heads: The number of attention heads.
      length: Tokens per window.
      rows: Windows per replica; arbitrary.
      micro_batches: Parts into which a replica's windows are split: all at once need 22
        GB at full size, by XLA's analysis of the gradient's program for a CPU.
      learning_rate: The learning rate at its peak; a cosine leads from there to a
        tenth.
      warm_up_steps: Steps in which the learning rate rises.
      b1: Adam's decay of the first moment.
      b2: Adam's decay of the second moment.
      weight_decay: Decoupled decay of matrices.
      clip: The bound of the averaged gradient's norm.
      steps: Steps of a run; arbitrary.
      evaluate_every: Steps from one evaluation to the next.
      evaluation_rows: Windows per replica.
    """

    data: Literal["bytes", "ptb"] = "bytes"
    layers: int = 12
    width: int = 768
    heads: int = 12
    length: int = 1024
    rows: int = 8
    micro_batches: int = 8
    learning_rate: float = 6e-4
    warm_up_steps: int = 700
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0
    steps: int = 20_000
    evaluate_every: int = 500
    evaluation_rows: int = 2


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
