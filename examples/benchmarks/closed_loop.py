"""A controller against every fixed factor: a real model, a simulated clock.

A small network learns which byte of a text comes next, on simulated replicas, so that
residuals are real; seconds are those of a cost model, with noise. For many networks:
the time until a held-out loss is reached, over that of the best fixed factor known
beforehand, and over that of dense steps. When a run reaches a loss is a matter of some
luck, so times are means over seeds.

    python examples/benchmarks/closed_loop.py --data-dir DIR --out FILE.jsonl
"""

import dataclasses
import functools
import itertools
import sys
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[1]))
from journal import Journal, Line
from tasks.files import find

import gravac_jax as gravac

CONTEXT, EMBED, WIDTH = 8, 16, 64  # bytes, and entries of vectors
ROWS = 16  # examples a replica and step
CONTROLLERS = {"fastest": gravac.Fastest(), "gravac": gravac.GraVAC()}
EVERY = 20  # steps from one evaluation to the next
AVERAGED = 0.02  # weight of the newest params in those that are evaluated


@dataclasses.dataclass(frozen=True)
class Args:
    """How many networks, and how long."""

    data_dir: Path
    """The folder with tiny-shakespeare's input.txt."""
    out: Path
    """JSONL; runs that are in it are not made again."""
    controller: Literal["fastest", "gravac"] = "fastest"
    """Which one is compared."""
    networks: int = 100
    """Drawn at random for each number of replicas in turn."""
    replicas: tuple[int, ...] = (2, 4, 8)
    """Simulated."""
    steps: int = 600
    """Of a dense run; the target is its loss after 80% of them."""
    longest: float = 3.0
    """Others run at most so many times as long."""
    seeds: int = 3
    """Of the batches; a time is the mean over them."""
    noise: float = 0.2
    """Standard deviation of the logarithm of a time."""
    learning_rate: float = 0.05
    """Of all runs; momentum SGD."""


class Bench:
    """The text, the model, and one compiled stretch of steps for each controller."""

    def __init__(self, args: Args):
        self.args = args
        (path,) = find(args.data_dir, ["input.txt"], ["", "tinyshakespeare"])
        text = np.frombuffer(path.read_bytes(), np.uint8)
        cut = len(text) * 9 // 10
        self.train, self.held_out = jnp.asarray(text[:cut]), jnp.asarray(text[cut:])
        self.stretch = functools.cache(self._stretch)

    def params(self) -> dict[str, jax.Array]:
        """Of a network with two hidden layers."""
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = {"embed": (256, EMBED), "in": (CONTEXT * EMBED, WIDTH)}
        shapes |= {"hidden": (WIDTH, WIDTH), "out": (WIDTH, 256)}
        draw = lambda key, shape: jax.random.normal(key, shape) / shape[0] ** 0.5
        return dict(zip(shapes, map(draw, keys, shapes.values()), strict=True))

    def loss(self, params: Any, batch: jax.Array) -> jax.Array:
        """Mean nats a byte of `[rows, CONTEXT + 1]` bytes."""
        x = params["embed"][batch[:, :-1]] * 256**0.5
        x = jax.nn.relu(x.reshape(len(x), -1) @ params["in"])
        x = jax.nn.relu(x @ params["hidden"])
        logits = x @ params["out"]
        return jnp.mean(
            optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, -1])
        )

    def draw(self, text: jax.Array, key: jax.Array, rows: int) -> jax.Array:
        """Windows at random places."""
        begin = jax.random.randint(key, (rows, 1), 0, text.size - CONTEXT - 1)
        return text[begin + jnp.arange(CONTEXT + 1)[None]].astype(jnp.int32)

    def transform(self, controller: Any) -> Any:
        """The optimizer."""
        return optax.chain(
            gravac.transform(controller=controller, compress=True),
            optax.clip_by_global_norm(1.0),
            optax.sgd(self.args.learning_rate, momentum=0.9),
        )

    def _stretch(self, controller: Any, replicas: int) -> Any:
        """`EVERY` steps, then an evaluation; times of each rung are an argument."""
        tx = self.transform(controller)

        def train_step(
            params: Any, opt_state: Any, clock: Any, batch: Any, *, table: jax.Array
        ) -> Any:
            last, total, key, average = clock
            _, grads = gravac.value_and_grad(self.loss)(params, batch)
            rung = opt_state[0].rung
            updates, opt_state = tx.update(grads, opt_state, step_seconds=last)
            key, now = jax.random.split(key)
            seconds = table[rung]
            last = seconds * jnp.exp(self.args.noise * jax.random.normal(now))
            params = optax.apply_updates(params, updates)
            mix = lambda x, y: x + AVERAGED * (y - x)
            clock = last, total + seconds, key, jax.tree.map(mix, average, params)
            return params, opt_state, clock, rung

        step = gravac.simulate(train_step, replicas)
        held_out = self.draw(self.held_out, jax.random.key(7), 4096)

        @jax.jit
        def run(state: Any, key: jax.Array, table: jax.Array) -> Any:
            def one(state: Any, key: jax.Array) -> Any:
                batch = self.draw(self.train, key, ROWS * replicas)
                *state, rung = step(*state, batch, table=table)
                return tuple(state), rung

            state, rungs = jax.lax.scan(one, state, jax.random.split(key, EVERY))
            return state, self.loss(state[2][3], held_out), rungs

        return run

    def losses(
        self,
        controller: Any,
        replicas: int,
        table: Any,
        steps: int,
        noise: int = 0,
        seed: int = 0,
    ) -> Any:
        """Losses of averaged params, the clock, and the rungs, stretch by stretch.

        `table` has the seconds of each rung, or is a function of the stretch to it;
        `noise` is a key of the times, `seed` of the batches.
        """
        at = table if callable(table) else lambda _: table
        tx, params = self.transform(controller), self.params()
        # Averaged params, or when the target is reached would be a matter of luck.
        now = jnp.float32(jnp.nan), jnp.float32(0)
        clock = (*now, jax.random.key(noise), jax.tree.map(jnp.copy, params))
        params, opt_state = gravac.place((params, tx.init(params)), replicas)
        state = params, opt_state, clock
        for i in range(steps // EVERY):
            key = jax.random.fold_in(jax.random.key(100 + seed), i)
            state, loss, rungs = self.stretch(controller, replicas)(
                state, key, jnp.asarray(at(i), jnp.float32)
            )
            yield float(loss), float(state[2][1]), np.asarray(rungs).astype(int)


def target_of(losses: list[float]) -> float:
    """What dense steps have reached after 80% of their evaluations."""
    return losses[len(losses) * 4 // 5 - 1]


def reached(losses: list[float], at: list[float], target: float) -> float | None:
    """Where between two of `at` the losses first reach the target; None if nowhere."""
    below = [i for i, x in enumerate(losses) if x <= target]
    if not below or not below[0]:
        return at[0] if below else None
    (x, y), (high, low) = ([z[below[0] - 1], z[below[0]]] for z in (at, losses))
    return x + (y - x) * (high - target) / (high - low)


def tables(replicas: int, entries: int, seed: int) -> np.ndarray:
    """`[rungs]` seconds of a step on a network that is drawn at random."""
    rng = np.random.default_rng(seed)
    draw = lambda low, high: float(10 ** rng.uniform(low, high))
    compute = draw(-3, -1)
    wire = gravac.WireCost(
        bytes_per_second=draw(6, 9),
        latency_seconds=draw(-6, -3.5),
        compute_seconds=compute,
        selection_seconds=0.05 * compute,
    )
    return seconds(wire, entries, gravac.Fastest().ladder, replicas)


def seconds(
    wire: gravac.WireCost, entries: int, ladder: tuple[float, ...], replicas: int
) -> np.ndarray:
    """`[rungs]` seconds of a step with an all-gather."""
    traffic = [gravac.AllGather().traffic(entries, f, replicas) for f in ladder]
    parts = lambda x: wire.parts(x.wire_bytes, x.messages, x.entries == entries)
    return np.array([sum(parts(x)) for x in traffic])


def reference(bench: Bench, replicas: int, journal: Journal) -> list[Line]:
    """Steps to the target at every fixed factor: made once for all networks."""
    args, lines = bench.args, journal.lines
    mine = lambda: [x for x in lines if x["kind"] == "fixed" and x["n"] == replicas]
    done = {(x["seed"], x["factor"]) for x in mine()}
    cases = itertools.product(range(args.seeds), gravac.Fastest().ladder)
    for seed, factor in cases:
        if (seed, factor) in done:
            continue
        dense = [x for x in mine() if (x["seed"], x["factor"]) == (seed, 1)]
        steps = args.steps if factor == 1 else round(args.longest * args.steps)
        losses: list[float] = []
        controller = gravac.Fixed(factor)
        for loss, *_ in bench.losses(controller, replicas, [1.0], steps, seed=seed):
            losses.append(loss)
            if dense and loss <= dense[0]["target"]:
                break
        target = dense[0]["target"] if dense else target_of(losses)
        at = [EVERY * (i + 1.0) for i in range(len(losses))]
        own = {"kind": "fixed", "n": replicas, "seed": seed, "factor": factor}
        taken = reached(losses, at, target)
        journal.append({**own, "target": target, "steps": taken})
    return mine()


def mean_steps(fixed: list[Line], factor: float) -> float:
    """To the target at one factor; infinite if one of the seeds did not reach it."""
    return float(
        np.mean([x["steps"] or np.inf for x in fixed if x["factor"] == factor])
    )


def compared(bench: Bench, network: int, replicas: int, fixed: list[Line]) -> Line:
    """The controller on one network, and the fixed factors there."""
    entries = sum(x.size for x in jax.tree.leaves(bench.params()))
    table = tables(replicas, entries, network)
    steps = [mean_steps(fixed, factor) for factor in gravac.Fastest().ladder]
    times, targets = np.array(steps) * table, {x["seed"]: x["target"] for x in fixed}
    noise = 1000 + network  # of the clock; data and params are those of all runs
    runs = [run(bench, replicas, table, noise, *x) for x in targets.items()]
    taken = [seconds for seconds, _ in runs]
    mean, best = np.mean([x or np.inf for x in taken]), int(np.argmin(times))
    over = lambda other: round(float(mean) / other, 4) if all(taken) else None
    return {
        "kind": "network",
        "network": network,
        "n": replicas,
        "seconds": table.round(6).tolist(),
        "best": best,
        "taken_seconds": taken,
        "over_best": over(times[best]),
        "over_dense": over(times[0]),
        "taken": np.sum([counts for _, counts in runs], axis=0).tolist(),
    }


def run(
    bench: Bench, replicas: int, table: np.ndarray, noise: int, seed: int, target: float
) -> tuple[float | None, np.ndarray]:
    """Seconds of a run to its target, None if it missed it; and steps at each rung."""
    args, losses, clock, seen = bench.args, [], [], []
    for loss, now, rungs in bench.losses(
        CONTROLLERS[args.controller],
        replicas,
        table,
        round(args.longest * args.steps),
        noise,
        seed,
    ):
        losses.append(loss)
        clock.append(now)
        seen += rungs.tolist()
        if loss <= target:
            break
    return reached(losses, clock, target), np.bincount(seen, minlength=len(table))


def main(args: Args) -> None:
    """Make the runs that are missing, then say how they compare."""
    bench, console = Bench(args), Console()
    own = dataclasses.asdict(args)
    del own["data_dir"], own["out"]
    journal = Journal(args.out, own)
    fixed = {n: reference(bench, n, journal) for n in args.replicas}
    cases = list(itertools.islice(itertools.cycle(args.replicas), args.networks))
    made = {x["network"] for x in journal.lines if x["kind"] == "network"}
    every = track(cases, "networks", console=console, transient=True)
    for network, n in enumerate(every):
        if network not in made:
            journal.append(compared(bench, network, n, fixed[n]))
    report(journal.lines, console)


def report(lines: list[Line], console: Console) -> None:
    """How much longer than the best fixed factor, and than dense steps."""
    found = [x for x in lines if x["kind"] == "network"]
    column = lambda name: np.array([x[name] or np.inf for x in found])
    over, dense = column("over_best"), column("over_dense")
    for n in dict.fromkeys(x["n"] for x in lines):
        fixed = [x for x in lines if x["kind"] == "fixed" and x["n"] == n]
        for factor in dict.fromkeys(x["factor"] for x in fixed):
            steps = mean_steps(fixed, factor)
            console.print(f"N = {n}, factor {factor:g}: {steps:.0f} steps")
    console.print(
        f"{len(over)} networks: time to the loss over that of the best fixed factor:"
        f" median {np.median(over):.3f}, 95% {np.quantile(over, 0.95):.3f},"
        f" worst {over.max():.3f}; within 10% on {np.mean(over <= 1.1):.0%}"
    )
    console.print(
        f"over that of dense steps: median {np.median(dense):.3f}, worst"
        f" {dense.max():.3f}; more than 5% longer on {np.mean(dense > 1.05):.0%}"
    )


if __name__ == "__main__":
    main(tyro.cli(Args))
