"""Train a small language model with adaptively compressed gradients, and densely.

The text is the source code of the running Python's standard library, byte by byte, or
any file given with --data. On a CPU the replicas are virtual devices; where there are
enough GPUs or TPUs they are real ones. There is no network between them: the controller
chooses for one that `gravac.WireCost` models, and so are the times on it. Lines marked
`# gravac` are all that a training loop needs.

    python examples/quickstart.py --help
    python -m gravac_jax.launch -n 2 examples/quickstart.py  # in two processes
"""

import collections
import contextlib
import dataclasses
import functools
import signal
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import tyro
from flax import nnx
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import gravac_jax as gravac
from gravac_jax import metrics

matplotlib.use("Agg")
from matplotlib import pyplot as plt


@dataclasses.dataclass(frozen=True)
class Config:
    """Train with compressed gradients, train densely, compare."""

    replicas: int | None = None
    """Replicas of the model, each with its own batches; default: 4, or one on every
    device of a job of several processes."""
    steps: int = 600
    """Steps of each run."""
    controller: Literal["fastest", "gravac", "fixed"] = "fastest"
    """Who chooses the factor; "fixed" stays on the last rung of the ladder."""
    bandwidth_mbit: float = 1000
    """Of the network that is modeled, between all replicas."""
    least_progress: float = gravac.Fastest.least_progress
    """What a step must be worth to Fastest, in dense steps."""
    ladder: tuple[float, ...] = gravac.GraVAC.ladder
    """Factors to choose from: 10 sends one gradient entry in ten, 1 sends all."""
    epsilon: float = gravac.GraVAC.epsilon
    """Smallest gain that GraVAC may send."""
    window: int = gravac.GraVAC.window
    """Steps between two of GraVAC's moves."""
    data: Path | None = None
    """Any text file, the last tenth held out; default: Python's own library."""
    seed: int = 0
    """Of the initial params and the order of the batches."""
    compare: bool = False
    """Also run static factors 10 and 100."""
    out: Path = Path("runs/quickstart.png")
    """The picture."""
    metrics: Path | None = None
    """Folder for a JSON line of every step, in a file for each run."""
    batch: int = 8
    """Sequences per replica and step."""
    length: int = 64
    """Bytes per sequence."""
    learning_rate: float = 0.3
    """Peak, after a short warm-up and before a cosine decay."""


class ByteModel(nnx.Module):
    """Predicts the next byte by gated causal convolutions of growing reach.

    0.8 million params, nearly all in matrices; each block looks 1, 2, 4, ... bytes
    further back.
    """

    def __init__(self, rngs: nnx.Rngs, width: int = 128, gate: int = 192):
        """Six blocks of `width` channels with `gate` gated units each."""
        self.embed = nnx.Embed(256, width, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(6)])
        self.inner = nnx.List(
            [nnx.Linear(2 * width, 2 * gate, rngs=rngs) for _ in range(6)]
        )
        self.outer = nnx.List([nnx.Linear(gate, width, rngs=rngs) for _ in range(6)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`[batch, length]` bytes to `[batch, length, 256]` logits."""
        x = self.embed(tokens)
        blocks = zip(self.norms, self.inner, self.outer, strict=True)
        for i, (norm, inner, outer) in enumerate(blocks):
            y = norm(x)
            past = jnp.pad(y, ((0, 0), (2**i, 0), (0, 0)))[:, : -(2**i)]
            value, gate = jnp.split(inner(jnp.concatenate([past, y], axis=-1)), 2, -1)
            x = x + outer(value * nnx.silu(gate))
        return self.head(self.norm(x))


@functools.cache
def read_text(path: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out bytes; the library is split by file, a file by position."""
    if path is not None:
        text = np.frombuffer(path.read_bytes(), np.uint8)
        if len(text) < 10_000:
            raise SystemExit(f"{path} holds {len(text)} bytes; give at least 10,000")
        cut = len(text) * 9 // 10
        return text[:cut], text[cut:]
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in root.rglob("*.py") if "site-packages" not in p.parts)
    np.random.default_rng(0).shuffle(files)
    cut = len(files) * 9 // 10
    parts = [b"".join(p.read_bytes() for p in x) for x in (files[:cut], files[cut:])]
    return np.frombuffer(parts[0], np.uint8), np.frombuffer(parts[1], np.uint8)


def draw(text: np.ndarray, rows: int, length: int, seed: int) -> Iterator[np.ndarray]:
    """Endless batches `[rows, length + 1]` int32 of random places in `text`."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - length, rows)
        yield text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def loss_of_model(graph: Any) -> Callable[[Any, jax.Array], jax.Array]:
    """The mean cross-entropy of `[batch, length + 1]` bytes, given params and batch."""

    def loss_of(params: Any, batch: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params)(batch[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        return losses.mean()

    return loss_of


@dataclasses.dataclass
class Run:
    """What one run left behind: a writer of metrics that keeps them."""

    name: str
    config: Config
    parameters: int = 0
    held_out: float = float("nan")
    step_seconds: float = float("nan")
    figures: dict[str, list[float]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the figures of a step, and its seconds on the modeled network."""
        del step
        for name, x in scalars.items():
            self.figures[name.removeprefix("gravac/")].append(x)
        wire_bytes, factor = scalars["gravac/wire_bytes"], scalars["gravac/factor"]
        messages = 5 * (self.config.replicas - 1)  # about: of three rings
        parts = wire_of(self.config).parts(wire_bytes, messages, factor == 1)
        self.figures["network_seconds"].append(sum(parts))

    def flush(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    @property
    def loss(self) -> list[float]:
        """Of every step."""
        return self.figures["loss"]

    def smaller(self, what: str) -> float:
        """Dense bytes over bytes of the whole run; `what` is "payload" or "wire"."""
        dense = {"payload": "dense_bytes", "wire": "dense_wire_bytes"}[what]
        return sum(self.figures[dense]) / max(sum(self.figures[f"{what}_bytes"]), 1)


def train(name: str, controller: Any, config: Config, console: Console) -> Run:
    """Train one model under one controller; Ctrl-C ends it early."""
    training_text, held_out_text = read_text(config.data)
    graph, params = nnx.split(ByteModel(nnx.Rngs(config.seed)), nnx.Param)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, max(1, config.steps // 20), max(2, config.steps)
    )
    tx = optax.chain(
        gravac.transform(controller=controller, wire=wire_of(config)),  # gravac
        optax.clip_by_global_norm(1.0),
        optax.sgd(schedule, momentum=0.9, nesterov=True),
    )

    loss_of = loss_of_model(graph)

    def train_step(params: Any, opt_state: Any, batch: jax.Array) -> Any:
        loss, grads = gravac.value_and_grad(loss_of)(params, batch)  # gravac
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    run = Run(name, config, sum(x.size for x in jax.tree.leaves(params)))
    step, place = replicated(train_step, config.replicas)
    state = place((params, tx.init(params)))  # gravac
    rows = config.replicas * config.batch
    batches = draw(training_text, rows, config.length, config.seed + 1)
    # Every process draws the same batches and takes its own rows of them.
    own = np.split(np.arange(rows), jax.process_count())[jax.process_index()]
    ends: list[float] = []
    with ctrl_c() as stop, writers(name, config, console) as shown:
        with metrics.Recorder(run, shown) as recorder:
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
    test = next(draw(held_out_text, 256, 256, seed=0))
    alone = jax.device_get(state[0])
    run.held_out = float(jax.jit(loss_of)(alone, test))
    return run


def writers(name: str, config: Config, console: Console) -> Any:
    """Where the first process writes what it does: the terminal, and a file."""
    live = functools.partial(metrics.LiveView, title=name, console=console)
    opened = [lambda: live(config.steps, transient=True)]
    if config.metrics is not None:
        opened += [lambda: metrics.JsonlWriter(config.metrics / f"{name}.jsonl")]
    return metrics.first_host(*opened)


@contextlib.contextmanager
def ctrl_c() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets; a second Ctrl-C interrupts as usual.

    An exception could come between a step that has taken its state's memory and the
    assignment of the new state.
    """
    event = threading.Event()

    def handle(*_: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def replicated(train_step: Any, replicas: int) -> tuple[Any, Any]:
    """The step and the placement on real devices, or all replicas on one."""
    if len(jax.devices()) < replicas:
        step = gravac.simulate(train_step, replicas)  # gravac
        return step, lambda tree: gravac.place(tree, replicas)
    mesh = jax.make_mesh((replicas,), ("data",), devices=jax.devices()[:replicas])
    step = gravac.data_parallel(train_step, mesh)  # gravac
    return step, lambda tree: gravac.place(tree, mesh)


def wire_of(config: Config) -> gravac.WireCost:
    """The network that there might be."""
    return gravac.WireCost(bytes_per_second=125e3 * config.bandwidth_mbit)


def summary(runs: list[Run], bandwidth_mbit: float) -> Table:
    """The table at the end; gaps are against the dense run."""
    dense = next((run.held_out for run in runs if run.name == "dense"), float("nan"))
    table = Table(
        box=SIMPLE,
        title="Same model, same batches, same number of steps",
        caption="payload: handed to the collectives; wire: sent for them by one;\n"
        f"network: modeled, of {bandwidth_mbit:g} Mbit/s, with 10 ms of compute",
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("run", no_wrap=True)
    columns = "held-out\nloss|gap|payload\nkB/step|payload\nfactor|wire\nfactor"
    for title in (*columns.split("|"), "network\nms/step", "steps", "ms/\nstep"):
        table.add_column(title, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            run.name,
            f"{run.held_out:.4f}",
            f"{100 * (run.held_out / dense - 1):+.1f}%" if dense > 0 else "-",
            f"{np.mean(run.figures['payload_bytes']) / 1e3:,.0f}",
            f"{run.smaller('payload'):.1f}",
            f"{run.smaller('wire'):.1f}",
            f"{1e3 * np.mean(run.figures['network_seconds']):.0f}",
            f"{len(run.loss)}",
            f"{1e3 * run.step_seconds:.0f}",
        )
    return table


def draw_picture(runs: list[Run], config: Config) -> None:
    """Loss over seconds, factor and gain over steps, legible in gray."""
    path = config.out
    fig, axes = plt.subplots(3, 1, figsize=(8, 8), layout="constrained")
    axes[1].sharex(axes[2])
    for run, line in zip(runs, ("-", "--", ":", "-."), strict=False):
        window = min(20, len(run.loss))
        smooth = np.convolve(run.loss, np.ones(window) / window, "valid")
        seconds = np.cumsum(run.figures["network_seconds"])[window - 1 :]
        axes[0].plot(seconds, smooth, line, label=run.name)
        for axis, name in zip(axes[1:], ("factor", "gain"), strict=True):
            course = run.figures[name]
            axis.plot(np.arange(len(course)) + 1, course, line, linewidth=1)
    axes[0].set(ylabel="training loss, nats a byte\n(mean of 20 steps)")
    axes[0].set(
        xlabel=f"seconds on a network of {config.bandwidth_mbit:g} Mbit/s, modeled"
    )
    axes[0].legend()
    axes[1].set(ylabel="factor\n(entries / entries sent)", yscale="log")
    axes[1].tick_params(labelbottom=False)
    axes[2].set(ylabel="gain\n(share of energy sent)", xlabel="step", ylim=(0, 1.05))
    for axis in axes:
        axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)
    plt.close(fig)


def controllers(config: Config) -> dict[str, Any]:
    """The runs to make, by name."""
    chosen = {
        "fastest": lambda: gravac.Fastest(config.ladder, config.least_progress),
        "gravac": lambda: gravac.GraVAC(
            epsilon=config.epsilon, ladder=config.ladder, window=config.window
        ),
        "fixed": lambda: gravac.Fixed(factor=config.ladder[-1]),
    }[config.controller]()
    runs = {"fixed" if config.controller == "fixed" else "adaptive": chosen}
    runs["dense"] = gravac.Fixed(factor=1)
    if config.compare:
        runs |= {f"factor {x}": gravac.Fixed(factor=x) for x in (10, 100)}
    return runs


def count_replicas(asked: int | None) -> int:
    """As many as asked for, on virtual devices here; all devices of a job elsewhere."""
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
    """Make the runs, print the table, draw the picture."""
    config = dataclasses.replace(config, replicas=count_replicas(config.replicas))
    is_first = jax.process_index() == 0
    console, runs = Console(quiet=not is_first), []
    for name, controller in controllers(config).items():
        run = train(name, controller, config, console)
        if run.loss:
            runs.append(run)
        if len(run.loss) < config.steps:
            break
    if runs and is_first:
        console.print(f"{runs[0].parameters:,} params, {config.replicas} replicas")
        console.print(summary(runs, config.bandwidth_mbit))
        draw_picture(runs, config)
        console.print(f"The picture is in {config.out}")
    return runs


if __name__ == "__main__":
    main(tyro.cli(Config))
