"""Compare a controller with every fixed factor: a real model, a simulated clock.

A small network learns which byte of a text comes next, on simulated replicas, so that
residuals are real; seconds are those of a cost model, with noise. On many networks
drawn at random, the record has the time until a held-out loss is reached, over that of
the best fixed factor known beforehand, and over that of dense steps. When a run reaches
a loss is a matter of some luck, so times are means over seeds.

    python examples/benchmarks controllers --data-dir DIR --out FILE.jsonl
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common.journal import Journal, Line, configuration
from common.statistics import reached, target_of
from common.training import averaged, size
from rich.progress import track
from tasks import cross_entropy
from tasks.files import find

import gravac_jax as gravac

CONTEXT, EMBED, WIDTH = 8, 16, 64  # bytes, and entries of vectors
ROWS = 16  # examples a replica and step
CONTROLLERS = {"fastest": gravac.Fastest(), "gravac": gravac.GraVAC()}
EVERY = 20  # steps from one evaluation to the next


@dataclasses.dataclass(frozen=True)
class Args:
    """How many networks, and how long.

    Args:
      data_dir: The folder with tiny-shakespeare's input.txt.
      out: The record, JSONL; runs that are in it are not made again.
      controller: The controller that is compared.
      networks: Networks drawn at random, for each number of replicas in turn.
      replicas: Numbers of simulated replicas.
      steps: Steps of a dense run; the target is its loss after 80% of them.
      longest: Others run at most this many times as long.
      seeds: The number of seeds of the batches; a time is the mean over them.
      noise: The standard deviation of the logarithm of a time.
      learning_rate: The learning rate of all runs; momentum SGD.
    """

    data_dir: Path
    out: Path
    controller: Literal["fastest", "gravac"] = "fastest"
    networks: int = 100
    replicas: tuple[int, ...] = (2, 4, 8)
    steps: int = 600
    longest: float = 3.0
    seeds: int = 3
    noise: float = 0.2
    learning_rate: float = 0.05


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

    def transform(self, controller: Any) -> Any:
        """Return the transform with this controller, and the optimizer."""
        return optax.chain(
            gravac.transform(controller=controller, compress=True),
            optax.clip_by_global_norm(1.0),
            optax.sgd(self.args.learning_rate, momentum=0.9),
        )

    def _stretch(self, controller: Any, replicas: int) -> Any:
        """Compile a stretch of steps and an evaluation, given the time of each rung."""
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
            clock = last, total + seconds, key, averaged(average, params)
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
    ) -> Iterator[tuple[float, float, np.ndarray]]:
        """Train, and yield what each stretch of steps brings.

        Args:
          controller: The controller.
          replicas: The number of simulated replicas.
          table: The seconds of each rung, or a function from the stretch to them.
          steps: Steps in all.
          noise: The seed of the times.
          seed: The seed of the batches.

        Yields:
          The held-out loss of averaged params, the seconds so far, and the rungs.
        """
        at = table if callable(table) else lambda _: table
        tx, params = self.transform(controller), self.params()
        # The loss is that of averaged params: that of params themselves fluctuates.
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


def tables(replicas: int, entries: int, seed: int) -> np.ndarray:
    """Return `[rungs]` seconds of a step on a network that is drawn at random."""
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
    """Return `[rungs]` seconds of a step with an all-gather."""
    traffic = [gravac.AllGather().traffic(entries, f, replicas) for f in ladder]
    parts = lambda x: wire.parts(x.wire_bytes, x.messages, x.entries == entries)
    return np.array([sum(parts(x)) for x in traffic])


def reference(bench: Bench, replicas: int, journal: Journal) -> list[Line]:
    """Find the steps to the target at every fixed factor, once for all networks."""
    args = bench.args
    for seed, factor in itertools.product(range(args.seeds), gravac.Fastest().ladder):
        run = {"kind": "fixed", "n": replicas, "seed": seed}
        if journal.find(**run, factor=factor):
            continue
        dense = journal.find(**run, factor=1)
        steps = args.steps if factor == 1 else round(args.longest * args.steps)
        losses: list[float] = []
        controller = gravac.Fixed(factor)
        for loss, *_ in bench.losses(controller, replicas, [1.0], steps, seed=seed):
            losses.append(loss)
            if dense and loss <= dense[0]["target"]:
                break
        target = dense[0]["target"] if dense else target_of(losses)
        at = [EVERY * (i + 1.0) for i in range(len(losses))]
        taken = reached(losses, at, target)
        journal.append({**run, "factor": factor, "target": target, "steps": taken})
    return journal.find(kind="fixed", n=replicas)


def mean_steps(fixed: list[Line], factor: float) -> float:
    """Return the steps to the target at one factor; infinite if a seed missed it."""
    return float(
        np.mean([x["steps"] or np.inf for x in fixed if x["factor"] == factor])
    )


def compared(bench: Bench, network: int, replicas: int, fixed: list[Line]) -> Line:
    """Compare the controller with the fixed factors on one network."""
    table = tables(replicas, size(bench.params()), network)
    steps = [mean_steps(fixed, factor) for factor in gravac.Fastest().ladder]
    times, targets = np.array(steps) * table, {x["seed"]: x["target"] for x in fixed}
    noise = 1000 + network  # of the clock; data and params are those of all runs
    runs = [run(bench, replicas, table, noise, *x) for x in targets.items()]
    taken = [seconds for seconds, _ in runs]
    mean, best = np.mean([x or np.inf for x in taken]), int(np.argmin(times))
    over = lambda other: round(float(mean) / other, 4) if all(taken) else None
    return {
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
    """Return seconds to the target, None if it was missed, and steps at each rung."""
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


def summary(lines: list[Line]) -> list[str]:
    """Return how much longer runs took than at the best fixed factor, and dense."""
    found = [x for x in lines if x["kind"] == "network"]
    column = lambda name: np.array([x[name] or np.inf for x in found])
    over, dense = column("over_best"), column("over_dense")
    texts = []
    for n in dict.fromkeys(x["n"] for x in lines):
        fixed = [x for x in lines if x["kind"] == "fixed" and x["n"] == n]
        for factor in dict.fromkeys(x["factor"] for x in fixed):
            steps = mean_steps(fixed, factor)
            texts.append(f"N = {n}, factor {factor:g}: {steps:.0f} steps")
    return [
        *texts,
        f"{len(over)} networks: time to the loss over that of the best fixed factor:"
        f" median {np.median(over):.3f}, 95% {np.quantile(over, 0.95):.3f},"
        f" worst {over.max():.3f}; within 10% on {np.mean(over <= 1.1):.0%}",
        f"over that of dense steps: median {np.median(dense):.3f}, worst"
        f" {dense.max():.3f}; more than 5% longer on {np.mean(dense > 1.05):.0%}",
    ]


def main(args: Args) -> None:
    """Make the runs that are missing, and print how they compare."""
    bench, journal = Bench(args), Journal(args.out, configuration(args))
    fixed = {n: reference(bench, n, journal) for n in args.replicas}
    cases = list(itertools.islice(itertools.cycle(args.replicas), args.networks))
    for network, n in enumerate(track(cases, "networks", transient=True)):
        make = functools.partial(compared, bench, network, n, fixed[n])
        journal.once(make, kind="network", network=network)
    print("\n".join(summary(journal.lines)))
