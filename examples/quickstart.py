"""Train a small language model with adaptively compressed gradients, and densely.

The text is the source code of the running Python's standard library, byte by byte, or
any file given with --data. On a CPU the replicas are virtual devices; where there are
enough GPUs or TPUs they are real ones. There is no network between them: the controller
chooses for one that `gravac.WireCost` models, and so are the times on it. Lines marked
`# gravac` are all that a training loop needs.

    python examples/quickstart.py --help
    python -m gravac_jax.launch -n 2 examples/quickstart.py  # in two processes
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from python_source import draw, read_text
from quickstart_output import Run, ctrl_c, draw_picture, summary, verdicts
from rich.console import Console
from training.sends import parse

import gravac_jax as gravac
from gravac_jax import metrics


@dataclasses.dataclass(frozen=True)
class Config:
    """Train with compressed gradients, train densely, compare.

    Args:
      replicas: Replicas of the model, each with its own batches; default: 4, or one on
        every device of a job of several processes.
      steps: Steps of each run.
      send: What to send: an encoding or a controller, such as "Bits(2)", "TopK(100)",
        "GraVAC(window=50)" or "Fastest(least_progress=0.9)". Default: Fastest(), which
        chooses from 32 bits an entry to two bits of an eighth of the entries.
      bandwidth_mbit: Bandwidth of the network that is modeled, between all replicas.
      data: Any text file, the last tenth held out; default: Python's own library.
      seed: Seed of the initial params and the order of the batches.
      compare: Also run two bits an entry, and the largest hundredth of the entries.
      out: The picture.
      metrics: Folder for a JSON line of every step, in a file for each run.
      batch: Sequences per replica and step.
      length: Bytes per sequence.
      learning_rate: Peak, after a short warm-up and before a cosine decay.
    """

    replicas: int | None = None
    steps: int = 300
    send: str = "Fastest()"
    bandwidth_mbit: float = 1000
    data: Path | None = None
    seed: int = 0
    compare: bool = False
    out: Path = Path("runs/quickstart.png")
    metrics: Path | None = None
    batch: int = 8
    length: int = 64
    learning_rate: float = 0.3


class ByteModel(nnx.Module):
    """Predicts the next byte by gated causal convolutions of growing reach.

    0.8 million params, nearly all in matrices; each block looks 1, 2, 4, ... bytes
    further back.
    """

    def __init__(self, rngs: nnx.Rngs, width: int = 128, gate: int = 192):
        """Make six blocks of `width` channels with `gate` gated units each."""
        linear = lambda a, b: nnx.List(nnx.Linear(a, b, rngs=rngs) for _ in range(6))
        self.embed = nnx.Embed(256, width, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(6)])
        self.inner = linear(2 * width, 2 * gate)
        self.outer = linear(gate, width)
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map bytes `[batch, length]` to logits `[batch, length, 256]`."""
        x = self.embed(tokens)
        blocks = zip(self.norms, self.inner, self.outer, strict=True)
        for i, (norm, inner, outer) in enumerate(blocks):
            y = norm(x)
            past = jnp.pad(y, ((0, 0), (2**i, 0), (0, 0)))[:, : -(2**i)]
            value, gate = jnp.split(inner(jnp.concatenate([past, y], axis=-1)), 2, -1)
            x = x + outer(value * nnx.silu(gate))
        return self.head(self.norm(x))


def loss_of_model(graph: Any) -> Callable[[Any, jax.Array], jax.Array]:
    """Return a function from params and bytes `[batch, length + 1]` to their loss."""

    def loss_of(params: Any, batch: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params)(batch[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        return losses.mean()

    return loss_of


def train(name: str, send: Any, config: Config, console: Console) -> Run:
    """Train one model, with gradients sent one way; Ctrl-C ends it early."""
    replicas = config.replicas or jax.device_count()
    rows = replicas * config.batch
    training_text, held_out_text = read_text(config.data)
    batches = draw(training_text, rows, config.length, config.seed + 1)
    graph, params = nnx.split(ByteModel(nnx.Rngs(config.seed)), nnx.Param)
    loss_of = loss_of_model(graph)

    network = gravac.WireCost(bytes_per_second=125e3 * config.bandwidth_mbit)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, max(1, config.steps // 20), max(2, config.steps)
    )
    clip = gravac.ClipByGlobalNorm(1.0)
    tx = optax.chain(
        gravac.transform(send=send, clip=clip, network=network),  # gravac
        optax.sgd(schedule, momentum=0.9, nesterov=True),
    )

    def train_step(params: Any, opt_state: Any, batch: jax.Array) -> Any:
        own = gravac.own_params(tx, params, opt_state)  # gravac
        loss, grads = gravac.value_and_grad(loss_of)(own, batch)  # gravac
        updates, opt_state = tx.update(grads, opt_state, params, at="own")  # gravac
        return optax.apply_updates(params, updates), opt_state, loss

    devices = jax.devices()[:replicas]
    is_mapped = len(devices) == replicas  # otherwise one device simulates all
    where = gravac.make_mesh(devices=devices) if is_mapped else replicas
    step = gravac.data_parallel(train_step, where)  # gravac
    state = gravac.place((params, tx.init(params)), where)  # gravac

    run = Run(name, network, replicas, sum(x.size for x in jax.tree.leaves(params)))
    # Every process draws the same batches and takes its own rows of them.
    own = np.split(np.arange(rows), jax.process_count())[jax.process_index()]
    ends: list[float] = []
    with ctrl_c() as stop, writer(name, config, console) as shown:
        with metrics.Recorder(run, shown, send=send) as recorder:
            for i in range(config.steps):
                *state, loss = step(*state, next(batches)[own])
                recorder.record(i, state, loss=loss)
                ends.append(time.perf_counter())
                if stop.is_set():
                    break
        # From the end of the first step on, which compiles.
        elapsed = float(np.ptp([*ends, time.perf_counter()]))
        run.step_seconds = elapsed / max(1, len(ends) - 1)
    if stop.is_set():
        console.print(f"{name}: stopped at step {len(run.loss)}")
    rows, length = 32 * config.batch, 4 * config.length
    # The learning rate has fallen to zero, so that a flush would deliver nothing.
    test = next(draw(held_out_text, rows, length, seed=0))
    run.held_out = float(jax.jit(loss_of)(jax.device_get(state[0]), test))
    return run


def writer(name: str, config: Config, console: Console) -> Any:
    """Open what the first process writes to: the terminal, and a file."""
    steps, folder = config.steps, config.metrics
    view = lambda: metrics.LiveView(steps, title=name, console=console, transient=True)
    if folder is None:
        return metrics.first_host(view)
    return metrics.first_host(
        view, lambda: metrics.JsonlWriter(folder / f"{name}.jsonl")
    )


def sends(config: Config) -> dict[str, gravac.Encoding | gravac.Controller]:
    """Return what each run sends, by the run's name."""
    chosen, static = parse(config.send), [gravac.Bits(2), gravac.TopK(100)]
    is_adaptive = isinstance(chosen, gravac.Controller)
    return {
        "adaptive" if is_adaptive else repr(chosen): chosen,
        "dense": gravac.Dense(),
        **({repr(x): x for x in static} if config.compare else {}),
    }


def count_replicas(asked: int | None) -> int:
    """Return how many replicas there are, and make as many virtual devices.

    A job of several processes has one replica on each of its devices.
    """
    if not jax.distributed.is_initialized():
        replicas = 4 if asked is None else asked
        jax.config.update("jax_num_cpu_devices", replicas)
        return replicas
    if asked not in (None, jax.device_count()):
        raise SystemExit(
            f"--replicas {asked} in a job of {jax.device_count()} devices, which has "
            "one replica on each; leave --replicas out"
        )
    return jax.device_count()


def main(config: Config) -> list[Run]:
    """Make the runs, print the table, draw the picture, say what was won and lost."""
    config = dataclasses.replace(config, replicas=count_replicas(config.replicas))
    is_first = jax.process_index() == 0
    console, runs = Console(quiet=not is_first), []
    for name, send in sends(config).items():
        console.print(f"{name}: the first of {config.steps} steps compiles")
        run = train(name, send, config, console)
        if run.loss:
            runs.append(run)
        if len(run.loss) < config.steps:
            break
    if runs and is_first:
        console.print(f"{runs[0].parameters:,} params, {config.replicas} replicas")
        console.print(summary(runs, config.bandwidth_mbit))
        draw_picture(runs, config.bandwidth_mbit, config.out)
        console.print(f"The picture is in {config.out}\n")
        for words in verdicts(runs, config.bandwidth_mbit):
            console.print(words, highlight=False)
    return runs


if __name__ == "__main__":
    main(tyro.cli(Config))
