"""Measure what a step is worth at every rung and length of round, and what it shows.

A small model is trained to the loss of dense steps, by momentum SGD and by Adam's
steps, at each rung and length of rounds, at each replica's own params and at the shared
ones. Each run keeps the evidence that a controller sees.

    python examples/benchmarks controllers.progress --data-dir DIR --out FILE.jsonl
"""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common.journal import Journal, Line, configuration, read
from common.statistics import reached, target_of
from common.training import averaged
from rich.progress import track

import gravac_jax as gravac
from controllers.small import EVERY, MODELS, ROWS, Small

LADDER = (1.0, 4.0, 8.0, 16.0, 32.0)
ROUNDS = (1, 2, 4, 8, 16)
DILOCO = "DiLoCo"
# Momentum after the exchange, as in optax.sgd; before it, as in gravac.sgd; and Adam
# before it, as in gravac.adamw.
OPTIMIZERS = {
    "sgd": "momentum SGD after the exchange",
    "sgdsteps": "SGD's steps, momentum before it",
    "adam": "Adam's steps",
}


@dataclasses.dataclass(frozen=True)
class Args:
    """How long, and how often.

    Args:
      data_dir: The folder with the model's files.
      out: The record, JSONL; runs that are in it are not made again.
      model: The small model.
      replicas: The number of simulated replicas.
      steps: Steps of a dense run; the target is its loss after 80% of them.
      longest: Others run at most this many times as long.
      seeds: The number of seeds of the batches.
      sgd: The learning rate of momentum SGD.
      adam: The learning rate of Adam.
      ladder: The factors. At the shared params they are tried in rounds of one step.
      rounds: The lengths of rounds.
      least_bits: The fewest bits of an entry.
      sparse_factors: The factors of the ladder at which few entries are sent.
      kinds: The kinds of runs to make: where gradients are taken, and DiLoCo.
    """

    data_dir: Path
    out: Path
    model: Literal["text", "images"] = "text"
    replicas: int = 4
    steps: int = 600
    longest: float = 2.5
    seeds: int = 3
    sgd: float = 0.05
    adam: float = 0.006
    ladder: tuple[float, ...] = LADDER
    rounds: tuple[int, ...] = ROUNDS
    least_bits: int = 1
    sparse_factors: tuple[float, ...] = ()
    kinds: tuple[str, ...] = ("own", "shared", DILOCO)


class Seen(NamedTuple):
    """What a controller that only watches has seen, summed over exchanges."""

    rung: jax.Array
    steps: jax.Array
    shares: jax.Array
    squares: jax.Array
    gains: jax.Array
    norms: jax.Array
    looks: jax.Array
    exchanges: jax.Array


@dataclasses.dataclass(frozen=True)
class Watching(gravac.Controller):
    """Stays at the choice in its state, so that all runs are one program."""

    ladder: tuple[float, ...]
    rounds: tuple[int, ...]

    @property
    def has_rounds(self) -> bool:
        """Whether some steps may be local."""
        return self.rounds != (1,)

    @property
    def samples_gradient(self) -> bool:
        """Whether it needs the shares of one gradient: yes."""
        return True

    def round_steps(self, step: jax.Array, state: Seen) -> jax.Array:
        """Return the length of all rounds."""
        del step
        return state.steps

    def init(self) -> tuple[jax.Array, Seen]:
        """Begin at dense steps."""
        number, each = jnp.zeros(()), jnp.zeros(len(self.ladder))
        whole = jnp.zeros((), jnp.int32)
        return whole, Seen(whole, whole + 1, each, each, each, number, number, number)

    def decide(self, evidence: gravac.Evidence, state: Seen) -> tuple[jax.Array, Seen]:
        """Stay, and add up what is seen."""
        total = evidence.gradient_energies[0]
        shares = jnp.where(total > 0, evidence.gradient_energies / total, 0)
        return state.rung, state._replace(
            shares=state.shares + shares,
            squares=state.squares + jnp.square(shares),
            gains=state.gains + evidence.energies / evidence.energy,
            norms=state.norms + jnp.sqrt(evidence.gradient_energy),
            looks=state.looks + (total > 0),
            exchanges=state.exchanges + 1,
        )


class Bench:
    """The small model, and one compiled stretch of steps for each kind of run."""

    def __init__(self, args: Args):
        self.args = args
        self.small: Small = MODELS[args.model](args.data_dir)
        self.held_out = self.small.draw(self.small.held_out, jax.random.key(7), 4096)
        self.stretch = functools.cache(self._stretch)

    def transform(self, optimizer: str, where: str) -> Any:
        """Return the optimizer with its exchange."""
        rate = self.args.adam if optimizer == "adam" else self.args.sgd
        if where == DILOCO:
            is_adam = optimizer == "adam"
            inner = optax.adam(rate) if is_adam else optax.sgd(rate, momentum=0.9)
            return gravac.diloco(inner, 30, compress=True)
        few_bits = gravac.QuantizedAllReduce(least_bits=self.args.least_bits)
        sparse_factors = self.args.sparse_factors
        common = {
            "controller": Watching(self.args.ladder, self.args.rounds),
            "compress": True,
            "exchange": gravac.Mixed(sparse_factors, few_bits)
            if sparse_factors
            else few_bits,
        }
        clip = gravac.ClipByGlobalNorm(1.0)
        if optimizer == "sgd":
            exchange = gravac.transform(clip=clip, **common)
            return optax.chain(exchange, optax.sgd(rate, momentum=0.9))
        own = {"adam": optax.scale_by_adam(), "sgdsteps": optax.trace(0.9)}
        memory = gravac.Steps(own[optimizer])
        exchange = gravac.transform(clip=clip, memory=memory, **common)
        return optax.chain(exchange, optax.scale(-rate))

    def _stretch(self, optimizer: str, where: str) -> Any:
        tx, small, replicas = (
            self.transform(optimizer, where),
            self.small,
            self.args.replicas,
        )

        def train_step(params: Any, opt_state: Any, average: Any, batch: Any) -> Any:
            is_own = where != "shared"
            at = gravac.local_params(tx, params, opt_state) if is_own else params
            _, grads = gravac.value_and_grad(small.loss)(at, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            return params, opt_state, averaged(average, params), jnp.zeros(())

        step = gravac.simulate(train_step, replicas)

        # Examples are an argument: as a constant they would be part of each program.
        @jax.jit
        def run(state: Any, key: jax.Array, train: Any) -> Any:
            def one(state: Any, key: jax.Array) -> Any:
                batch = small.draw(train, key, ROWS * replicas)
                *state, _ = step(*state, batch)
                return tuple(state), None

            state, _ = jax.lax.scan(one, state, jax.random.split(key, EVERY))
            return state, small.loss(state[2], self.held_out)

        return tx, run

    def run(
        self, key: Line, rung: int, steps: int, target: float | None = None
    ) -> tuple[list[float], list[float], Any]:
        """Train; return losses of averaged params, sums of norms, and the state."""
        tx, stretch = self.stretch(key["optimizer"], key["params"])
        params = self.small.params()
        opt_state = tx.init(params)
        if key["params"] != DILOCO:
            ours, *others = opt_state
            length = jnp.int32(key["steps"])
            seen = ours.controller._replace(rung=jnp.int32(rung), steps=length)
            rounds = jax.tree.map(lambda _: jnp.copy(length), ours.round)
            rungs = {"rung": jnp.int32(rung), "ahead": jnp.full_like(ours.ahead, rung)}
            ours = ours._replace(**rungs, controller=seen, round=rounds)
            opt_state = (ours, *others)
        params, opt_state = gravac.place((params, opt_state), self.args.replicas)
        state = params, opt_state, jax.tree.map(jnp.copy, self.small.params())
        losses: list[float] = []
        norms: list[float] = []
        for i in range(steps // EVERY):
            now = jax.random.fold_in(jax.random.key(100 + key["seed"]), i)
            state, loss = stretch(state, now, self.small.train)
            losses.append(float(loss))
            if key["params"] != DILOCO:
                norms.append(float(state[1][0].controller.norms))
            if target is not None and losses[-1] <= target:
                break
        return losses, norms, state[1]


def keys(args: Args) -> list[Line]:
    """Return the key of every run, the dense ones first."""
    own = [("own", x, h) for h in args.rounds for x in args.ladder]
    shared = [("shared", x, 1) for x in args.ladder[1:]]
    kinds = [x for x in (*own, *shared, (DILOCO, 1.0, 30)) if x[0] in args.kinds]
    names = ("seed", "optimizer", "params", "factor", "steps")
    return [
        dict(zip(names, (seed, optimizer, *kind), strict=True))
        for seed, optimizer, kind in itertools.product(
            range(args.seeds), OPTIMIZERS, kinds
        )
    ]


def measured(bench: Bench, journal: Journal, key: Line) -> Line:
    """Return the steps to the target and the evidence of one run."""
    args, dense = bench.args, key["factor"] == key["steps"] == 1
    first = {**key, "params": "own", "factor": 1.0, "steps": 1}
    target = None if dense else journal.find(**first)[0]["target"]
    steps = args.steps if dense else round(args.longest * args.steps)
    losses, norms, opt_state = bench.run(
        key, args.ladder.index(key["factor"]), steps, target
    )
    target = target_of(losses) if target is None else target
    taken = reached(losses, [EVERY * (i + 1.0) for i in range(len(losses))], target)
    line: Line = {"target": round(target, 5), "taken": taken and round(taken, 1)}
    if key["params"] == DILOCO:
        return line
    seen = opt_state[0].controller
    mean = np.asarray(seen.shares / seen.looks)
    variance = np.maximum(np.asarray(seen.squares / seen.looks) - mean**2, 0)
    listed = lambda x: [round(float(y), 4) for y in x]
    if dense:  # the mean norm of each stretch
        line["norms"] = listed(np.diff(norms, prepend=0.0) / EVERY)
    return line | {
        "shares": listed(mean),
        "deviations": listed(variance**0.5),
        "gains": listed(np.asarray(seen.gains / seen.exchanges)),
        "norm": round(float(seen.norms / seen.exchanges), 4),
        "alignment": round(float(opt_state[0].info.alignment), 3),
    }


def runs_of(path: Path) -> list[Line]:
    """Return the lines of a record; a run that missed its target took all its steps."""
    head, lines = read(path)
    longest = head["configuration"]["longest"] * head["configuration"]["steps"]
    is_missed = lambda x: x["taken"] is None
    return [{**x, "taken": longest if is_missed(x) else x["taken"]} for x in lines]


def worths(lines: list[Line], params: str, factor: float, steps: int) -> list[float]:
    """Return what a step of one kind is worth in dense steps, for each seed.

    Args:
      lines: Those of one optimizer, from `runs_of`.
      params: Where gradients are taken.
      factor: The factor.
      steps: The steps of a round.
    """
    taken = lambda *kind: {
        x["seed"]: x["taken"]
        for x in lines
        if (x["params"], x["factor"], x["steps"]) == kind
    }
    dense = taken("own", 1.0, 1)
    return [dense[seed] / x for seed, x in taken(params, factor, steps).items()]


def main(args: Args) -> None:
    """Make the runs that are missing."""
    bench, journal = Bench(args), Journal(args.out, configuration(args))
    for key in track(keys(args), "runs", transient=True):
        journal.once(functools.partial(measured, bench, journal, key), **key)
