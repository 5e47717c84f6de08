"""The models and the made-up data of the six loops, and how each is run."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.core import spmd
from flax.linen import spmd as linen_spmd
from flax.training import train_state


class CNN(linen.Module):
    """One convolution, normalized, and two dense layers."""

    @linen.compact
    def __call__(self, x: jax.Array, is_training: bool) -> jax.Array:
        """Map images `[batch, 16, 16, 1]` to logits `[batch, 10]`."""
        x = linen.Conv(8, (3, 3), use_bias=False)(x)
        x = linen.BatchNorm(use_running_average=not is_training, momentum=0.9)(x)
        x = linen.avg_pool(linen.relu(x), (2, 2), strides=(2, 2))
        x = linen.relu(linen.Dense(64)(x.reshape(len(x), -1)))
        return linen.Dense(10)(x)


class TrainState(train_state.TrainState):
    """A Flax training state with the running means of BatchNorm."""

    batch_stats: Any


class DropoutMLP(nnx.Module):
    """Two dense layers, with BatchNorm and dropout between them."""

    def __init__(self, rngs: nnx.Rngs):
        """Make layers for 64 numbers in and 10 classes out."""
        self.inner = nnx.Linear(64, 256, rngs=rngs)
        self.norm = nnx.BatchNorm(256, momentum=0.9, rngs=rngs)
        self.middle = nnx.Linear(256, 256, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.outer = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map rows `[batch, 64]` to logits `[batch, 10]`."""
        x = nnx.relu(self.norm(self.inner(x)))
        return self.outer(self.dropout(nnx.relu(self.middle(x))))


class ResidualMLP(linen.Module):
    """Two blocks of two dense layers each, with residual connections."""

    width: int = 128

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map rows `[batch, 64]` to logits `[batch, 10]`."""
        x = linen.Dense(self.width, name="embed")(x)
        for i in range(2):
            y = linen.LayerNorm(name=f"norm_{i}")(x)
            y = linen.gelu(linen.Dense(2 * self.width, name=f"up_{i}")(y))
            x = x + linen.Dense(self.width, name=f"down_{i}")(y)
        return linen.Dense(10, name="head")(x)


def spec_of(path: Any, leaf: Any) -> jax.P:
    """Return which axis of a `ResidualMLP`'s leaf is cut into slices over "fsdp"."""
    del leaf
    names = jax.tree_util.keystr(path)
    if "kernel" in names and "up_" in names:
        return jax.P("fsdp", None)
    if "kernel" in names and "down_" in names:
        return jax.P(None, "fsdp")
    return jax.P()


class LogicalMLP(linen.Module):
    """Two dense layers whose params and activations have logical axes."""

    dtype: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map rows `[batch, 64]` to logits `[batch, 10]`."""
        x = self._dense(128, None, "embed", "embed")(x)
        x = linen_spmd.with_logical_constraint(x, ("batch", None))
        y = linen.gelu(self._dense(256, "embed", "mlp", "up")(x))
        y = linen_spmd.with_logical_constraint(y, ("batch", "mlp"))
        x = x + self._dense(128, "mlp", "embed", "down")(y)
        return self._dense(10, "embed", None, "head")(x)

    def _dense(self, width: int, rows: Any, columns: Any, name: str) -> linen.Dense:
        init = linen.initializers.lecun_normal()
        kernel = linen.with_logical_partitioning(init, (rows, columns))
        zeros = linen.initializers.zeros
        bias = linen.with_logical_partitioning(zeros, (columns,))
        return linen.Dense(
            width, kernel_init=kernel, bias_init=bias, dtype=self.dtype, name=name
        )


def cross_entropy(logits: Any, labels: jax.Array) -> jax.Array:
    """Return the mean over a batch."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


def draw_images(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    """Return images of noise; the label is where a coarse view is brightest."""
    image = rng.normal(size=(rows, 16, 16, 1)).astype(np.float32)
    coarse = image.reshape(rows, 4, 4, 4, 4).mean((2, 4)).reshape(rows, 16)
    return {"image": image, "label": coarse[:, :10].argmax(-1).astype(np.int32)}


def draw_rows(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of noise; the label is the largest of its first ten numbers."""
    x = rng.normal(size=(rows, 64)).astype(np.float32)
    return x, x[:, :10].argmax(-1).astype(np.int32)


def batches(draw: Callable[..., Any], rows: int, steps: int) -> Iterator[Any]:
    """Yield a batch for each step, of so many rows for each device."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        yield draw(rng, rows * jax.device_count())


def run(main: Callable[[], list[float]]) -> None:
    """Train on eight virtual devices, and print the first loss and the last."""
    jax.config.update("jax_num_cpu_devices", 8)
    losses = main()
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")


class Transformer(nnx.Module):
    """A small language model whose params and activations have logical axes."""

    def __init__(self, vocabulary: int, width: int, layers: int, rngs: nnx.Rngs):
        """Make the layers; heads are 16 wide."""
        self.embed = _param(rngs, (vocabulary, width), ("vocabulary", None))
        self.blocks = nnx.List([Block(width, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = _param(rngs, (width, vocabulary), ("embed", "heads"))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map tokens `[batch, length]` to logits `[batch, length, vocabulary]`."""
        x = _logical(self.embed[tokens], "batch", None, None)
        for block in self.blocks:
            x = block(x)
        return _logical(self.norm(x) @ self.head, "batch", None, "heads")


class Block(nnx.Module):
    """Causal attention and two dense layers, with residual connections."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        """Make params for `width` numbers a token."""
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(2)])
        self.query_key_value = _param(rngs, (width, 3 * width), ("embed", "heads"))
        self.out = _param(rngs, (width, width), ("heads", "embed"))
        self.up = _param(rngs, (width, 4 * width), ("embed", "mlp"))
        self.down = _param(rngs, (4 * width, width), ("mlp", "embed"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[batch, length, width]` to the same shape."""
        heads = self.norms[0](x) @ self.query_key_value
        heads = _logical(heads.reshape(*x.shape[:2], -1, 48), "batch", None, "heads")
        mixed = jax.nn.dot_product_attention(*jnp.split(heads, 3, -1), is_causal=True)
        x = x + mixed.reshape(x.shape) @ self.out
        hidden = jax.nn.gelu(self.norms[1](x) @ self.up)
        return x + _logical(hidden, "batch", None, "mlp") @ self.down


def _param(rngs: nnx.Rngs, shape: tuple[int, int], names: Any) -> nnx.Param:
    init = nnx.initializers.lecun_normal()
    return nnx.Param(init(rngs.params(), shape), out_sharding=names)


def _logical(x: jax.Array, *names: str | None) -> jax.Array:
    rules = dict(spmd.get_logical_axis_rules())
    spec = jax.P(*(rules.get(name or "") for name in names))
    return jax.lax.with_sharding_constraint(x, spec)


def draw_tokens(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Return rows of 33 tokens below 64, each the one before plus a step of the row."""
    first, step = rng.integers(0, 64, (2, rows, 1))
    return ((first + (1 + step % 3) * np.arange(33)) % 64).astype(np.int32)
