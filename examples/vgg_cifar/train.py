"""Train GraVAC's VGG-16 on CIFAR-100; the loop is in training/images.py.

python examples/vgg_cifar/train.py --data-dir DIR --preset paper
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tasks import cifar
from training import Options, images, main
from vgg_cifar.config import PRESETS, Config
from vgg_cifar.model import VGG


def train(config: Config, options: Options) -> dict[str, float]:
    """Train one model, and return its loss and accuracies on the test images."""
    sizes = config.stages, config.hidden, config.head, config.pooled, config.dropout
    model = VGG(*sizes, dtype=options.dtype)
    layout = {"cifar10": cifar.CIFAR10, "cifar100": cifar.CIFAR100}[config.data]
    return images.train(
        "vgg_cifar", model, layout, config.learning_rate, config, options
    )


if __name__ == "__main__":
    main(train, PRESETS)
