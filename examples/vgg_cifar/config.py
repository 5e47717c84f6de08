"""Hyper-parameters of the VGG."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Config:
    """GraVAC's second workload (Tyagi and Swany, 2023, Table 1).

    The paper states model, batch, momentum, decay and learning rate; the clip is ours.
    Its size, 528 MB, is that of torchvision's `vgg16()` or, as in the authors' code,
    `vgg16_bn()` as they come, with a head of 1,000 classes; CIFAR-100 uses a hundred of
    them.

    Args:
      data: The data set.
      stages: Channels of each convolution; a pooling ends a stage.
      hidden: Units of each of the two layers before the head.
      head: The number of outputs, at least as many as classes.
      pooled: The side of what these layers get; by default that of ImageNet.
      dropout: The share of units dropped after each of them, as torchvision has it.
      rows: Images per replica.
      learning_rate: The learning rate; fixed.
      momentum: The momentum of SGD.
      weight_decay: Decay that is added to the gradient.
      clip: The bound of the averaged gradient's norm. The paper mentions none;
        without it dense steps at its learning rate diverged within eight steps, from
        these initial params and from torchvision's (one replica, 64 images).
      steps: Steps of a run; the paper's curves go as far.
      evaluate_every: Steps from one evaluation to the next.
      evaluation_rows: Images per replica; the 10,000 of the test divide by 4, 16 and
        100 of them.
    """

    data: Literal["cifar10", "cifar100"] = "cifar100"
    stages: tuple[tuple[int, ...], ...] = (
        *((64, 64), (128, 128)),
        *((256, 256, 256), (512, 512, 512), (512, 512, 512)),
    )
    hidden: int = 4096
    head: int = 1000
    pooled: int = 7
    dropout: float = 0.5
    rows: int = 32
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    clip: float | None = 1.0
    steps: int = 10_000
    evaluate_every: int = 500
    evaluation_rows: int = 25


PRESETS = {
    "paper": Config(),
    # On the ten classes that the ResNet has, too. The learning rate is the best of
    # 0.005, 0.01 and 0.02 for dense steps, after 200. Over so few steps dropout slows
    # what is to be learned, and compressed steps more than dense ones.
    "small": Config(
        data="cifar10",
        stages=((16,), (32,), (64, 64), (128, 128), (128, 128)),
        hidden=256,
        head=10,
        pooled=1,
        dropout=0.0,
        rows=16,
        learning_rate=0.01,
        clip=None,
        steps=500,
        evaluate_every=100,
    ),
}
