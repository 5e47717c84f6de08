"""Two small models: which byte of a text comes next, and what an image shows."""

from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from tasks import cross_entropy
from tasks.cifar import CIFAR10, read_cifar
from tasks.files import find

ROWS = 16  # examples a replica and step
EVERY = 20  # steps from one evaluation to the next
CONTEXT, EMBED, WIDTH = 8, 16, 64  # bytes, and entries of vectors
PATCH, CHANNELS, DEEPER = 4, 32, 64  # pixels, and entries of vectors


class Small(Protocol):
    """Data and a model; `train` and `held_out` are what `draw` takes examples from."""

    train: Any
    held_out: Any

    def params(self) -> dict[str, jax.Array]:
        """Return initial params."""
        ...

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """Return the mean nats of an example."""
        ...

    def draw(self, source: Any, key: jax.Array, rows: int) -> Any:
        """Return random examples."""
        ...


class SmallText:
    """A network of two hidden layers over 8 bytes of a text (32,768 params).

    Args:
      data_dir: The folder with tiny-shakespeare's input.txt.
    """

    def __init__(self, data_dir: Path):
        (path,) = find(data_dir, ["input.txt"], ["", "tinyshakespeare"])
        text = np.frombuffer(path.read_bytes(), np.uint8)
        cut = len(text) * 9 // 10
        self.train, self.held_out = jnp.asarray(text[:cut]), jnp.asarray(text[cut:])

    def params(self) -> dict[str, jax.Array]:
        """Return initial params."""
        shapes = {"embed": (256, EMBED), "in": (CONTEXT * EMBED, WIDTH)}
        shapes |= {"hidden": (WIDTH, WIDTH), "out": (WIDTH, 256)}
        return _normal(shapes, 1)

    def loss(self, params: Any, batch: jax.Array) -> jax.Array:
        """Return the mean nats a byte of `[rows, CONTEXT + 1]` bytes."""
        x = params["embed"][batch[:, :-1]] * 256**0.5
        x = jax.nn.relu(x.reshape(len(x), -1) @ params["in"])
        x = jax.nn.relu(x @ params["hidden"])
        return cross_entropy(x @ params["out"], batch[:, -1])

    def draw(self, source: jax.Array, key: jax.Array, rows: int) -> jax.Array:
        """Return windows at random places."""
        begin = jax.random.randint(key, (rows, 1), 0, source.size - CONTEXT - 1)
        return source[begin + jnp.arange(CONTEXT + 1)[None]].astype(jnp.int32)


class SmallImages:
    """A convolutional network over patches of 4 x 4 pixels (29,824 params).

    Args:
      data_dir: The folder with CIFAR-10's binary files.
    """

    def __init__(self, data_dir: Path):
        (train, _, test), _ = read_cifar(data_dir, CIFAR10)
        self.train, self.held_out = map(patches_of, (train, test))

    def params(self) -> dict[str, jax.Array]:
        """Return initial params."""
        shapes = {"patches": (3 * PATCH**2, CHANNELS), "conv": (9 * CHANNELS, CHANNELS)}
        shapes |= {"deeper": (9 * CHANNELS, DEEPER), "out": (DEEPER, 10)}
        return _normal(shapes, 2)

    def loss(self, params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Return the mean nats of a label."""
        patches, labels = batch
        side = patches.shape[1]
        x = (patches.astype(jnp.float32) / 127.5 - 1) @ params["patches"]
        x = jax.nn.relu(neighbours(jax.nn.relu(x)) @ params["conv"])
        x = x.reshape(len(x), side // 2, 2, side // 2, 2, -1).mean(axis=(2, 4))
        x = jax.nn.relu(neighbours(x) @ params["deeper"])
        return cross_entropy(x.mean(axis=(1, 2)) @ params["out"], labels)

    def draw(self, source: Any, key: jax.Array, rows: int) -> Any:
        """Return random images."""
        places = jax.random.randint(key, (rows,), 0, len(source[1]))
        return tuple(x[places] for x in source)


MODELS = {"text": SmallText, "images": SmallImages}


def patches_of(images: Any) -> tuple[jax.Array, jax.Array]:
    """Return uint8 patches `[images, 8, 8, 3 * PATCH**2]`, and labels."""
    examples = [images[i] for i in range(len(images))]
    pixels = np.stack([x["image"] for x in examples])
    side = pixels.shape[1] // PATCH
    cut = pixels.reshape(-1, side, PATCH, side, PATCH, 3)
    patches = cut.transpose(0, 1, 3, 2, 4, 5).reshape(-1, side, side, 3 * PATCH**2)
    return jnp.asarray(patches), jnp.asarray([x["label"] for x in examples])


def _normal(shapes: dict[str, tuple[int, int]], energy: float) -> dict[str, jax.Array]:
    """Return matrices that multiply the energy of a vector by `energy`."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    draw = lambda key, shape: jax.random.normal(key, shape) / (shape[0] / energy) ** 0.5
    return dict(zip(shapes, map(draw, keys, shapes.values()), strict=True))


def neighbours(x: jax.Array) -> jax.Array:
    """Return the 3 x 3 places around each, `[rows, side, side, 9 * width]`.

    A product with it is a convolution. Replicas have params of their own, and XLA's
    convolution of many kernels is slow on CPUs.
    """
    side = x.shape[1]
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifts = [(i, j) for i in range(3) for j in range(3)]
    parts = [padded[:, i : i + side, j : j + side] for i, j in shifts]
    return jnp.concatenate(parts, axis=-1)
