"""Adam with a second moment that replicas share, before or after the exchange.

python examples/benchmarks/records/2026-11-22_adam/probe.py --data-dir DIR
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[2]))
from quality_run import Bench, Setting, Trial, learning_rate_at

import gravac_jax as gravac

B1, B2, EPS = 0.9, 0.999, 1e-8
SEED = 1_000_000  # the harness's for tuning: validation loss
TOP_K = {"compressor": gravac.TopK(), "controller": gravac.Fixed(100)}
LOW_RANK = {"exchange": gravac.LowRank(), "controller": gravac.Fixed(25)}


class SharedState(NamedTuple):
    """Adam's, with the exchange's inside."""

    count: jax.Array
    mean: Any
    square: Any
    exchange: Any


def factored(x: jax.Array) -> jax.Array:
    """Adafactor's approximation of a positive matrix by its rows' and columns' means.

    Of matrices only these means would have to travel.
    """
    if x.ndim < 2:
        return x
    flat = x.reshape(-1, x.shape[-1])
    rows, columns = flat.mean(1, keepdims=True), flat.mean(0, keepdims=True)
    return (rows * columns / jnp.maximum(flat.mean(), 1e-30)).reshape(x.shape)


def adam(arguments: dict[str, Any], *, is_before: bool) -> Any:
    """Adam that divides gradients before the exchange, or their means after it."""
    exchange = gravac.transform(**arguments)
    clip = optax.clip_by_global_norm(1.0)

    def init(params: Any) -> SharedState:
        zeros = lambda: jax.tree.map(jnp.zeros_like, params)
        count = jnp.zeros((), jnp.int32)
        return SharedState(count, zeros(), zeros(), exchange.init(params))

    def update(grads: Any, state: SharedState, params: Any = None) -> Any:
        count = state.count + 1
        square = jax.tree.map(
            lambda v, g: B2 * v + (1 - B2) * factored(jax.lax.pmean(g * g, "data")),
            state.square,
            grads,
        )
        divide = lambda x, v: x / (jnp.sqrt(v / (1 - B2**count)) + EPS)
        if is_before:
            grads = jax.tree.map(divide, grads, square)
        sent, inner = exchange.update(grads, state.exchange, params)
        if not is_before:
            sent, _ = clip.update(sent, clip.init(params))
        mean = jax.tree.map(lambda m, g: B1 * m + (1 - B1) * g, state.mean, sent)
        updates = jax.tree.map(lambda m: m / (1 - B1**count), mean)
        if not is_before:
            updates = jax.tree.map(divide, updates, square)
        return updates, SharedState(count, mean, square, inner)

    return optax.GradientTransformation(init, update)


def naive(arguments: dict[str, Any]) -> Any:
    """Adam of what was exchanged."""
    clip = optax.clip_by_global_norm(1.0)
    return optax.chain(gravac.transform(**arguments), clip, optax.scale_by_adam())


VARIANTS = {
    "dense": lambda: naive({"controller": gravac.Fixed(1)}),
    "top-k, naive": lambda: naive(TOP_K),
    "top-k, divided after": lambda: adam(TOP_K, is_before=False),
    "top-k, divided before": lambda: adam(TOP_K, is_before=True),
    "low rank, naive": lambda: naive(LOW_RANK),
    "low rank, divided after": lambda: adam(LOW_RANK, is_before=False),
    "low rank, divided before": lambda: adam(LOW_RANK, is_before=True),
}


@dataclasses.dataclass(frozen=True)
class Args:
    """How long, and how fast."""

    data_dir: Path
    """Where the text is."""
    learning_rates: tuple[float, ...] = (0.003,)
    """Of every variant."""
    steps: int = 1000
    """Of every run."""
    variants: tuple[str, ...] = tuple(VARIANTS)
    """Names of variants."""


def main(args: Args) -> None:
    """Run each variant and print a line of JSON."""
    setting = Setting(task="transformer-bytes", steps=args.steps)
    bench = Bench(setting, args.data_dir)
    for name in args.variants:
        for rate in args.learning_rates:
            loss, wire_factor = run(VARIANTS[name](), rate, bench)
            line = {"variant": name, "learning_rate": rate, "loss": round(loss, 4)}
            print(json.dumps(line | {"wire_factor": round(wire_factor, 1)}), flush=True)


def run(tx: Any, rate: float, bench: Bench) -> tuple[float, float]:
    """The validation loss at the end, and dense wire bytes over wire bytes."""
    setting = bench.setting

    def train_step(params: Any, opt_state: Any, batch: Any, *, rate: Any) -> Any:
        _, grads = gravac.value_and_grad(bench.task.loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        return params, opt_state, optax.tree.get(opt_state, "StepInfo")

    step = gravac.simulate(train_step, setting.replicas)
    params = bench.init(jax.random.key(SEED))
    state = gravac.place((params, tx.init(params)), setting.replicas)
    stream = bench.batches(SEED)
    trial = Trial("tune", "", rate, SEED, setting.steps)
    for i in range(setting.steps):
        now = jnp.float32(learning_rate_at(i, trial, setting.schedule))
        *state, info = step(*state, next(stream), rate=now)
    wire_factor = float(info.dense_wire_bytes / info.wire_bytes)
    return bench.evaluate(state[0], "tune"), wire_factor


if __name__ == "__main__":
    main(tyro.cli(Args))
