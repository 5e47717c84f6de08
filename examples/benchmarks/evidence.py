"""What evidence predicts quality? Runs at fixed factors, with all that could tell.

Every line has the held-out loss, and means since the line before of what a controller
might look at: energies of gradients, payloads and residuals, and how well what was sent
points along what a dense step would have sent. `evidence_report.py` compares them as
predictors of the loss.

    python examples/benchmarks/evidence.py --data-dir DIR --out FILE.jsonl
"""

import dataclasses
import functools
import itertools
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[1]))
from journal import Journal, Line
from quality_run import OPTIMIZERS, Bench, Setting, Trial, learning_rate_at
from training.methods import after, arguments

import gravac_jax as gravac

SETTING = Setting(schedule="constant")


@dataclasses.dataclass(frozen=True)
class Args:
    """What to run, on what, for how long."""

    data_dir: Path
    """Where the task's files are."""
    out: Path
    """JSONL; runs that are in it are not made again."""
    methods: tuple[str, ...] = ("dense", "fixed10", "fixed30", "fixed100", "fixed300")
    """Names as in methods.py; a "dense" run is what others are compared with."""
    seeds: int = 1
    """Seeds 0, 1, ..."""
    learning_rate: float | None = None
    """Of all methods; None for the task's own."""
    setting: Annotated[Setting, tyro.conf.OmitArgPrefixes] = SETTING


class Sums(NamedTuple):
    """Since the last evaluation: what was sent, and what a dense step would have."""

    sent: Any
    dense: Any


def compressed(tree: Any) -> jax.Array:
    """The leaves that `gravac.transform` compresses, as one vector."""
    chosen = gravac.matrices()
    leaves = jax.tree.leaves_with_path(tree)
    return jnp.concatenate([jnp.ravel(x) for path, x in leaves if chosen(path, x)])


def compile_step(bench: Bench, name: str) -> tuple[Any, Any]:
    """Make what starts the state of a run, and its step."""
    setting, chosen = bench.setting, arguments(name)
    memory = chosen.get("memory", gravac.Residual())
    exchange = gravac.transform(**chosen)
    optimizer = OPTIMIZERS[setting.optimizer]()
    rest = optax.chain(optax.identity(), *after(chosen, optimizer, setting.clip))

    def init(params: Any) -> tuple[Any, ...]:
        nothing = jnp.zeros_like(compressed(params))
        dense = memory.init_dense(nothing.size)
        state = params, (exchange.init(params), rest.init(params), dense)
        return *gravac.place(state, setting.replicas), Sums(nothing, nothing * 1)

    def step(
        params: Any, states: Any, sums: Sums, batch: Any, *, rate: Any, is_first: Any
    ) -> Any:
        own, rest_state, dense_state = states
        loss, grads = gravac.value_and_grad(bench.task.loss)(params, batch)
        mean, own = exchange.update(grads, own, params)
        sent, flat = compressed(mean), compressed(grads)
        dense = jax.lax.pmean(flat, "data")
        followed, dense_state = memory.follow(dense, dense_state)
        since = lambda x, new: jnp.where(is_first, 0, x) + new
        sums = jax.tree.map(since, sums, Sums(sent, followed))
        updates, rest_state = rest.update(mean, rest_state, params)
        params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        info = optax.tree.get(own, "StepInfo")
        metrics = {
            "training_loss": loss,
            "gain": info.gain,
            "gradient_energy": energy(flat),
            "whole_energy": sum(map(energy, map(jnp.ravel, jax.tree.leaves(grads)))),
            "dense_energy": energy(dense),
            "followed_energy": energy(followed),
            "sent_energy": energy(sent),
            "sent_dense": jnp.vdot(sent, dense),
            "sent_followed": jnp.vdot(sent, followed),
            "residual_energy": sum(energy(x.residual) for x in own.local.memory)
            if hasattr(own.local.memory[0], "residual")
            else 0.0,
            "wire_bytes": info.wire_bytes,
            "dense_wire_bytes": info.dense_wire_bytes,
        }
        return params, (own, rest_state, dense_state), sums, metrics

    return init, gravac.simulate(step, setting.replicas)


def energy(x: jax.Array) -> jax.Array:
    """Sum of squares."""
    return jnp.vdot(x, x)


def window(sums: Sums) -> Line:
    """How well what was sent since the last evaluation makes up for the gradients."""
    sent, dense = map(float, map(energy, sums))
    return {
        "window_sent": sent,
        "window_dense": dense,
        "window_inner": float(jnp.vdot(*sums)),
    }


def curve(gradient: np.ndarray, factor: float) -> Line:
    """What one replica's own gradient says of a factor, whatever is in use."""
    squares = np.sort(np.square(gradient.astype(np.float64)))[::-1]
    n, whole = squares.size, squares.sum()
    k = round(n / factor)
    return {"raw_gain": squares[:k].sum() / whole, "predicted_wait": wait(squares, k)}


def wait(squares: np.ndarray, k: int) -> float:
    """Mean steps that energy waits, if entries are random walks sent at a threshold.

    An entry whose square grows by q a step is sent every t / q steps, if its square
    waits for a threshold t; together they are k a step.

    Args:
      squares: `[n]`, falling.
      k: entries sent a step.
    """
    whole = squares.sum()
    if k >= squares.size:
        return 0.0
    # If the j largest go in every step, t is (sum of the rest) / (k - j).
    rest = whole - np.append(0, np.cumsum(squares[: k - 1]))
    thresholds = rest / (k - np.arange(k))
    t = thresholds[np.argmax(thresholds >= squares[:k])]
    return float(t * np.count_nonzero((squares < t) & (squares > 0)) / whole)


def run(trial: Trial, bench: Bench, compiled: Any, journal: Journal) -> None:
    """One run, whole; `compiled` is its start and step, and a gradient."""
    setting, name, seed = bench.setting, trial.method, trial.seed
    (init, step), gradient_of = compiled
    stream = bench.batches(seed)
    state = init(bench.init(jax.random.key(seed)))
    every = setting.steps // setting.evaluations
    factor = arguments(name)["controller"].ladder[-1]
    seen: list[Any] = []
    for i in track(range(setting.steps), f"{name}, seed {seed}", transient=True):
        now = jnp.float32(learning_rate_at(i, trial, setting.schedule))
        batch = next(stream)
        is_first = jnp.asarray(i % every == 0)
        *state, metrics = step(*state, batch, rate=now, is_first=is_first)
        seen.append(metrics)
        if (i + 1) % every:
            continue
        figures = jax.device_get(seen)
        means = {x: float(np.mean([y[x] for y in figures])) for x in metrics}
        one = jax.tree.map(lambda x: x[: len(x) // setting.replicas], batch)
        gradient = np.asarray(gradient_of(state[0], one))
        line = {"method": name, "seed": seed, "step": i + 1, "factor": factor}
        line |= {"loss": bench.evaluate(state[0], "test"), **means, **window(state[2])}
        journal.append(rounded(line | curve(gradient, factor)))
        seen.clear()


def rounded(line: Line) -> Line:
    """With six digits."""
    return {
        k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in line.items()
    }


def main(args: Args) -> None:
    """Make the runs that are missing."""
    bench = Bench(args.setting, args.data_dir)
    steps = functools.cache(functools.partial(compile_step, bench))
    gradient = jax.jit(lambda p, x: compressed(jax.grad(bench.task.loss)(p, x)))
    rate = args.learning_rate or bench.task.learning_rate
    own = {"learning_rate": rate, "data": bench.digest()}
    journal = Journal(args.out, {**dataclasses.asdict(args.setting), **own})
    console = Console()
    for seed, name in itertools.product(range(args.seeds), args.methods):
        mine = lambda x, seed=seed, name=name: (x["method"], x["seed"]) == (name, seed)
        if any(mine(x) and x["step"] == args.setting.steps for x in journal.lines):
            continue
        journal.drop(mine)
        trial = Trial("test", name, rate, seed, args.setting.steps)
        run(trial, bench, (steps(name), gradient), journal)
        console.print(f"{name}, seed {seed}: {journal.lines[-1]['loss']}")


if __name__ == "__main__":
    main(tyro.cli(Args))
