"""A small network that learns which byte of a text comes next."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tasks import cross_entropy
from tasks.files import find

CONTEXT, EMBED, WIDTH = 8, 16, 64  # bytes, and entries of vectors
ROWS = 16  # examples a replica and step
EVERY = 20  # steps from one evaluation to the next


class Small:
    """The text and the model.

    Args:
      data_dir: The folder with tiny-shakespeare's input.txt.
    """

    def __init__(self, data_dir: Path):
        (path,) = find(data_dir, ["input.txt"], ["", "tinyshakespeare"])
        text = np.frombuffer(path.read_bytes(), np.uint8)
        cut = len(text) * 9 // 10
        self.train, self.held_out = jnp.asarray(text[:cut]), jnp.asarray(text[cut:])

    def params(self) -> dict[str, jax.Array]:
        """Return initial params of a network with two hidden layers."""
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = {"embed": (256, EMBED), "in": (CONTEXT * EMBED, WIDTH)}
        shapes |= {"hidden": (WIDTH, WIDTH), "out": (WIDTH, 256)}
        draw = lambda key, shape: jax.random.normal(key, shape) / shape[0] ** 0.5
        return dict(zip(shapes, map(draw, keys, shapes.values()), strict=True))

    def loss(self, params: Any, batch: jax.Array) -> jax.Array:
        """Return the mean nats a byte of `[rows, CONTEXT + 1]` bytes."""
        x = params["embed"][batch[:, :-1]] * 256**0.5
        x = jax.nn.relu(x.reshape(len(x), -1) @ params["in"])
        x = jax.nn.relu(x @ params["hidden"])
        return cross_entropy(x @ params["out"], batch[:, -1])

    def draw(self, text: jax.Array, key: jax.Array, rows: int) -> jax.Array:
        """Return windows at random places."""
        begin = jax.random.randint(key, (rows, 1), 0, text.size - CONTEXT - 1)
        return text[begin + jnp.arange(CONTEXT + 1)[None]].astype(jnp.int32)
