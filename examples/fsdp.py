"""Two slices of four devices: FSDP within a slice, compressed gradients between them.

Each device owns a slice of every large matrix and of its residual. The compiler gathers
the slices over the fast axis "ici" where they are needed and adds up gradients there,
and only payloads cross the slow axis "dcn". On a CPU the devices are virtual. Lines
marked `# gravac` are all that a training loop needs beyond FSDP itself.

    python examples/fsdp.py
"""

import dataclasses
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from python_source import draw, read_text
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tasks import cross_entropy
from tasks.transformer import TransformerLanguageModel

import gravac_jax as gravac

SLOW, FAST = "dcn", "ici"


@dataclasses.dataclass(frozen=True)
class Config:
    """Train a transformer under FSDP, compressed between slices and dense.

    Args:
      slices: Devices along the slow axis.
      devices: Devices of a slice, along the fast axis.
      steps: Steps of each run, at least one.
      batch: Sequences per device and step.
      length: Bytes per sequence.
      width: Width of the model, which has four layers.
      learning_rate: Learning rate of AdamW.
      data: Any text file; default: Python's own library.
      seed: Seed of the initial params and the order of the batches.
    """

    slices: int = 2
    devices: int = 4
    steps: int = 120
    batch: int = 4
    length: int = 64
    width: int = 128
    learning_rate: float = 3e-3
    data: Path | None = None
    seed: int = 0


class Run(NamedTuple):
    """The figures of one run: means over its last steps, and bytes on one device."""

    name: str
    loss: float
    factor: float
    wire_bytes: float
    residual_bytes: int
    step_seconds: float


def is_large(leaf: Any) -> bool:
    """Return whether a leaf is a matrix of at least 16,384 entries, cut into slices."""
    return leaf.ndim == 2 and leaf.size >= 16_384


def train(name: str, send: Any, config: Config, mesh: Any) -> Run:
    """Train one model by AdamW, whose steps are exchanged in an encoding."""
    model = TransformerLanguageModel(256, config.width, layers=4, heads=4)
    tokens = jnp.zeros((1, config.length), jnp.int32)
    params = model.init(jax.random.key(config.seed), tokens)["params"]
    spec = lambda x: jax.P(FAST) if is_large(x) else jax.P()
    place = lambda x: jax.device_put(x, jax.NamedSharding(mesh, spec(x)))
    params = jax.tree.map(place, params)

    tx = gravac.adamw(  # gravac
        config.learning_rate, SLOW, weight_decay=1e-4, shardings=params, send=send
    )

    def loss_of(params: Any, batch: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, batch[:, :-1])
        return cross_entropy(logits, batch[:, 1:])

    def train_step(params: Any, opt_state: Any, batch: jax.Array) -> Any:
        own = gravac.own_params(tx, params, opt_state)  # gravac
        loss, grads = gravac.value_and_grad(loss_of, SLOW)(own, batch)  # gravac
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    state = (params, tx.init(params))
    params, opt_state = gravac.place(state, mesh, SLOW)  # gravac
    step = gravac.data_parallel(train_step, mesh, SLOW)  # gravac
    lies = jax.NamedSharding(mesh, jax.P((SLOW, FAST)))
    rows = config.slices * config.devices * config.batch
    batches = draw(read_text(config.data)[0], rows, config.length, config.seed + 1)
    losses, ends, wire_bytes, factor = [], [], 0.0, 1.0
    for _ in track(range(config.steps), name, transient=True):
        batch = jax.device_put(next(batches), lies)
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
        ends.append(time.perf_counter())
        info = optax.tree.get(opt_state, "StepInfo")
        wire_bytes, factor = wire_bytes + float(info.wire_bytes), float(info.factor)
    residual = optax.tree.get(opt_state, "local").memory[0].residual
    return Run(
        name=name,
        loss=float(np.mean(losses[-20:])),
        factor=factor,
        wire_bytes=wire_bytes / config.steps,
        residual_bytes=residual.addressable_shards[0].data.nbytes,
        step_seconds=float(np.median(np.diff(ends))) if len(ends) > 1 else np.nan,
    )


def summary(runs: list[Run]) -> Table:
    """Return a table with one line a run."""
    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
    titles = ("run", "last 20\nlosses", "last\nfactor", "kB a step\nand device")
    for i, title in enumerate((*titles, "kB of\nresidual", "ms/\nstep")):
        table.add_column(title, justify="right" if i else "left", no_wrap=True)
    for run in runs:
        table.add_row(
            run.name,
            f"{run.loss:.3f}",
            f"{run.factor:.0f}",
            f"{run.wire_bytes / 1e3:,.0f}",
            f"{run.residual_bytes / 1e3:,.0f}",
            f"{1e3 * run.step_seconds:.0f}",
        )
    return table


def main(config: Config) -> list[Run]:
    """Make both runs and print the table."""
    if not jax.distributed.is_initialized():
        jax.config.update("jax_num_cpu_devices", config.slices * config.devices)
    devices = jax.devices()[: config.slices * config.devices]
    mesh = gravac.make_mesh((SLOW, FAST), hosts=config.slices, devices=devices)
    console = Console()
    console.print(f"{config.slices} slices of {config.devices} devices")
    chosen = {"Bits(2)": gravac.Bits(2), "dense": gravac.Dense()}
    runs = [train(name, x, config, mesh) for name, x in chosen.items()]
    console.print(summary(runs))
    console.print(f"Bytes are those that cross {SLOW!r}.")
    return runs


if __name__ == "__main__":
    main(tyro.cli(Config))
