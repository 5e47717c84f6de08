"""Train GraVAC's ResNet-101 on CIFAR-10; the loop is in training/images.py.

python examples/resnet_cifar/train.py --data-dir DIR --preset paper
"""

import sys
from pathlib import Path

import optax

sys.path.insert(0, str(Path(__file__).parents[1]))
from resnet_cifar.config import PRESETS, Config
from resnet_cifar.model import ResNet
from tasks import cifar
from training import Options, images, main


def train(config: Config, options: Options) -> dict[str, float]:
    """Train one model, and return its loss and accuracies on the test images."""
    sizes = config.blocks, config.width, config.has_imagenet_stem, config.head
    model = ResNet(*sizes, dtype=options.dtype)
    drops = {round(share * config.steps): 0.1 for share in config.drops}
    schedule = optax.piecewise_constant_schedule(config.learning_rate, drops)
    return images.train("resnet_cifar", model, cifar.CIFAR10, schedule, config, options)


if __name__ == "__main__":
    main(train, PRESETS)
