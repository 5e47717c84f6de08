"""What the ResNet is trained with."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """GraVAC's first workload (Tyagi and Swany, 2023, Table 1).

    The paper states model, batch, momentum, decay, learning rate and its drops. Its
    size, 170 MB, is that of torchvision's `resnet101()` as it comes, which is made for
    ImageNet: with that stem and a head of 1,000 classes, of which CIFAR-10 uses ten.
    """

    blocks: tuple[int, ...] = (3, 4, 23, 3)
    """Of each stage."""
    width: int = 64
    """Of the first stage; each has twice that of the one before."""
    has_imagenet_stem: bool = True
    """A convolution of 7 x 7 and a pooling, both with stride 2; else one of 3 x 3."""
    head: int = 1000
    """Outputs, at least as many as classes."""
    rows: int = 32
    """Images per replica."""
    learning_rate: float = 0.1
    drops: tuple[float, ...] = (9 / 42, 14 / 42)
    """After these shares of the steps it is divided by ten: 9,000 and 14,000 of
    42,000."""
    momentum: float = 0.9
    weight_decay: float = 1e-4
    steps: int = 42_000
    """As far as the paper's curves go."""
    evaluate_every: int = 1000
    evaluation_rows: int = 25
    """Images per replica; the 10,000 of the test divide by 4, 16 and 100 of them."""


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
