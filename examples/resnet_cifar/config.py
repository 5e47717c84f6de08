"""Hyper-parameters of the ResNet."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """GraVAC's first workload (Tyagi and Swany, 2023, Table 1).

    The paper states model, batch, momentum, decay, learning rate and its drops. Its
    size, 170 MB, is that of torchvision's `resnet101()` as it comes, which is made for
    ImageNet: with that stem and a head of 1,000 classes, of which CIFAR-10 uses ten.

    Args:
      blocks: Bottlenecks of each stage.
      width: The width of the first stage; each has twice that of the one before.
      has_imagenet_stem: Whether a convolution of 7 x 7 and a pooling, both with stride
        2, come first; else one convolution of 3 x 3.
      head: The number of outputs, at least as many as classes.
      rows: Images per replica.
      learning_rate: The learning rate at first.
      drops: Shares of the steps after which it is divided by ten: 9,000 and 14,000 of
        42,000.
      momentum: The momentum of SGD.
      weight_decay: Decay that is added to the gradient.
      clip: The bound of the averaged gradient's norm; the paper mentions none.
      steps: Steps of a run; the paper's curves go as far.
      evaluate_every: Steps from one evaluation to the next.
      evaluation_rows: Images per replica; the 10,000 of the test divide by 4, 16 and
        100 of them.
    """

    blocks: tuple[int, ...] = (3, 4, 23, 3)
    width: int = 64
    has_imagenet_stem: bool = True
    head: int = 1000
    rows: int = 32
    learning_rate: float = 0.1
    drops: tuple[float, ...] = (9 / 42, 14 / 42)
    momentum: float = 0.9
    weight_decay: float = 1e-4
    clip: float | None = None
    steps: int = 42_000
    evaluate_every: int = 1000
    evaluation_rows: int = 25


PRESETS = {
    "paper": Config(),
    # 0.51 million params. The learning rate is the best of 0.01, 0.02 and 0.05 for
    # dense steps, after 150.
    "small": Config(
        blocks=(1, 1, 1, 1),
        width=16,
        has_imagenet_stem=False,
        head=10,
        rows=16,
        learning_rate=0.02,
        drops=(2 / 3, 5 / 6),
        steps=300,
        evaluate_every=100,
    ),
}
