"""How close do controllers come to the best fixed choice, on networks drawn at random?

What a step is worth at each rung and length of round, and what a controller sees there,
is what `controllers.progress` has measured on a small model. Seconds are those of a
cost model, with noise. So a run is a scan over decisions, and all networks are decided
on at once. A run is done when it has made the progress of the dense steps to the
target.

    python examples/benchmarks controllers --measured FILE.jsonl --out FILE.jsonl
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from common.figures import FAINT, INK, legend_below, picture
from common.journal import Journal, Line, configuration, read

import gravac_jax as gravac
from controllers.progress import DILOCO, LADDER, OPTIMIZERS, runs_of
from controllers.small import EVERY

ROUNDS = (1, 4, 16)
DENSE_STEPS = 480  # to the target
FAST = 0.3  # r up to which a network is fast
SELECTION = 0.05  # of the computation, where a step is compressed
CONTROLLERS: dict[str, gravac.Controller] = {
    "Fastest": gravac.Fastest(),
    "Fastest, rounds": gravac.Fastest(rounds=ROUNDS),
    "Fastest, progress 0.9": gravac.Fastest(least_progress=0.9),
    "GraVAC": gravac.GraVAC(ladder=LADDER),
    "Accordion": gravac.Accordion(low=4, high=32, interval=50),
}
TURNS = gravac.geometric(4, 256)
# For a record of `controllers.progress` with turns.
WITH_TURNS: dict[str, gravac.Controller] = {
    "Fastest, turns": gravac.Fastest(TURNS),
    "Fastest, turns, progress 0.75": gravac.Fastest(TURNS, least_progress=0.75),
    "GraVAC, turns": gravac.GraVAC(ladder=TURNS),
}


@dataclasses.dataclass(frozen=True)
class Args:
    """How many networks.

    Args:
      measured: The record of `controllers.progress`.
      out: The record, JSONL; controllers that are in it are not run again.
      picture: The figure, PNG or SVG.
      networks: Networks drawn at random.
      entries: Entries of the model's gradient, all of them compressed.
      noise: The standard deviation of the logarithm of a measured time.
      delay: Whether a step takes the longer of computation and exchange, in place of
        their sum.
      highest: The highest factor of the record that is used.
    """

    measured: Path
    out: Path
    picture: Path | None = None
    networks: int = 200
    entries: int = 10_000_000
    noise: float = 0.2
    delay: bool = False
    highest: float = math.inf

    @functools.cached_property
    def choices(self) -> "Choices":
        """The choices that the record of `controllers.progress` has."""
        known = read(self.measured)[0]["configuration"]
        ladder = tuple(x for x in known.get("ladder", LADDER) if x <= self.highest)
        rounds = ROUNDS if len(known["rounds"]) > 1 else (1,)
        exchange = gravac.QuantizedAllReduce(least_bits=known.get("least_bits", 1))
        controllers = WITH_TURNS if max(ladder) > max(LADDER) else CONTROLLERS
        if rounds == (1,):
            controllers = {k: x for k, x in controllers.items() if not x.has_rounds}
        return Choices(ladder, rounds, exchange, controllers)


class Choices(NamedTuple):
    """What a controller may choose from.

    Attributes:
      ladder: The factors.
      rounds: The lengths of rounds.
      exchange: What sends at these factors.
      controllers: The controllers, by name.
    """

    ladder: tuple[float, ...]
    rounds: tuple[int, ...]
    exchange: gravac.Exchange
    controllers: dict[str, gravac.Controller]


class Worth(NamedTuple):
    """What was measured of choices: rung, and length of round.

    Attributes:
      progress: `[rounds, rungs]` float32, what a step is worth in dense steps.
      shares: `[rounds, rungs, ladder]` float32, the share of one gradient's energy.
      deviations: the same, how far the share of one step is from its mean.
      gains: the same, the share of the energy of gradient and residual.
      norms: `[stretches]` float32, the mean norm of gradients as dense steps go on.
      diloco: what a step of DiLoCo at H = 30 is worth; NaN if that is not known.
    """

    progress: Any
    shares: Any
    deviations: Any
    gains: Any
    norms: Any
    diloco: float


def worth_of(lines: list[Line], optimizer: str, choices: Choices) -> Worth:
    """Return means over seeds of what was measured with an optimizer."""
    ours = [x for x in lines if x["optimizer"] == optimizer]

    def mean(name: str, **key: Any) -> Any:
        found = [x for x in ours if key.items() <= x.items()]
        return np.mean([x[name] for x in found], axis=0)

    def table(name: str) -> np.ndarray:
        at = lambda f, h: mean(name, params="own", factor=f, steps=h)
        rows = [[at(f, h) for f in choices.ladder] for h in choices.rounds]
        return np.asarray(rows, np.float32)

    has_diloco = any(x["params"] == DILOCO for x in ours)
    diloco = DENSE_STEPS / mean("taken", params=DILOCO) if has_diloco else np.nan
    # The record may have seen higher factors, too.
    seen = lambda name: table(name)[..., : len(choices.ladder)]
    return Worth(
        progress=DENSE_STEPS / table("taken"),
        shares=seen("shares"),
        deviations=seen("deviations"),
        gains=seen("gains"),
        norms=np.asarray(mean("norms", params="own", factor=1.0, steps=1), np.float32),
        diloco=float(diloco),
    )


class Networks(NamedTuple):
    """Networks drawn at random; `[networks]` each, parts `[networks, rungs, 4]`.

    Attributes:
      replicas: N.
      ratio: r, the seconds of the bytes of a dense exchange over those of computation.
      latency: seconds of a message.
      parts: the true seconds of computation, selection, messages and bytes.
      guessed: the same by `gravac.WireCost()`, which a controller begins with.
    """

    replicas: np.ndarray
    ratio: np.ndarray
    latency: np.ndarray
    parts: np.ndarray
    guessed: np.ndarray


def drawn(args: Args) -> Networks:
    """Draw the networks."""
    rng = np.random.default_rng(0)
    draw = lambda low, high: 10 ** rng.uniform(np.log10(low), np.log10(high))
    found = []
    for _ in range(args.networks):
        replicas = int(rng.choice((2, 4, 8, 16, 32, 64)))
        ratio, latency, compute = draw(0.05, 300), draw(1e-4, 0.1), draw(0.01, 1)
        dense = gravac.DenseMean().traffic(args.entries, 1, replicas)
        wire = gravac.WireCost(
            bytes_per_second=dense.wire_bytes / (ratio * compute),
            latency_seconds=latency,
            compute_seconds=compute,
            selection_seconds=SELECTION * compute,
        )
        parts = lambda wire, n=replicas: _parts(wire, n, args)
        row = (replicas, ratio, latency, parts(wire), parts(gravac.WireCost()))
        found.append(row)
    return Networks(*(np.asarray(x, np.float32) for x in zip(*found, strict=True)))


def _parts(wire: gravac.WireCost, replicas: int, args: Args) -> np.ndarray:
    """Return the seconds of the parts of a step at each rung, `[rungs, 4]`."""
    agreed = gravac.DenseMean().traffic(20, 1, replicas)  # figures that all must know
    rows = []
    for factor in args.choices.ladder:
        sent = args.choices.exchange.traffic(args.entries, factor, replicas)
        both = sent.wire_bytes + agreed.wire_bytes, sent.messages + agreed.messages
        rows.append(wire.parts(*both, is_dense=sent.entries == args.entries))
    return np.asarray(rows, np.float32)


def seconds_of(parts: Any, delay: bool) -> Any:
    """Return the seconds of steps from their parts, `[..., 4]`."""
    compute, network = parts[..., :2].sum(-1), parts[..., 2:].sum(-1)
    return jnp.maximum(compute, network) if delay else compute + network


class Run(NamedTuple):
    """The state of a run between two exchanges; `told` are times not yet told.

    `rungs` are those of the next three exchanges: a decision takes effect at the third.
    """

    rungs: jax.Array
    lengths: jax.Array
    state: Any
    key: jax.Array
    told: jax.Array
    told_local: jax.Array
    told_rung: jax.Array
    step: jax.Array


def simulated(
    controller: gravac.Controller, worth: Worth, args: Args, exchanges: int
) -> Callable[..., Any]:
    """Return a function that runs the controller on networks, all at once.

    It takes the true parts, the guessed ones, the replicas and a key of each network,
    and returns, after each exchange, the steps, the seconds and the progress so far.
    """
    tables = jax.tree.map(jnp.asarray, worth)
    ladder, rounds, *_ = args.choices

    def one(parts: Any, guess: Any, key: Any) -> Any:
        rung, state = controller.init()
        seconds, local = seconds_of(parts, args.delay), parts[0, 0]
        length = lambda step, state: jnp.int32(controller.round_steps(step, state))
        first = length(jnp.int32(0), state)
        nothing = jnp.float32(jnp.nan)

        def exchange(run: Run, _: Any) -> Any:
            key, now, seen, alone = jax.random.split(run.key, 4)
            steps, rung = run.lengths[0], run.rungs[0]
            which = jnp.argmax(jnp.asarray(rounds) == steps), rung
            looks = controller.looks(run.step + steps - 1, steps - 1)
            shares, deviations = tables.shares[which], tables.deviations[which]
            shares += deviations * jax.random.normal(seen, shares.shape, jnp.float32)
            shares = jnp.clip(shares, 0.01, 1).at[0].set(1)
            dense_steps = run.step.astype(jnp.float32) * tables.progress[which]
            stretch = jnp.int32(dense_steps / EVERY)
            norm = tables.norms[jnp.minimum(stretch, tables.norms.size - 1)]
            noise = lambda key: jnp.exp(args.noise * jax.random.normal(key))
            is_told = jnp.arange(len(ladder)) == run.told_rung
            evidence = gravac.Evidence(
                step=run.step + steps - 1,
                replicas=4,
                first_sparse=jnp.int32(1),
                energies=tables.gains[which],
                energy=jnp.float32(1),
                gradient_energy=jnp.square(norm),
                gradient_energies=jnp.where(looks, shares, 0.0),
                predicted_parts=guess,
                measured_seconds=jnp.where(is_told, run.told, jnp.nan),
                local_seconds=run.told_local,
                steps=steps,
            )
            after, state = controller.decide(evidence, run.state)
            following = run.step + steps + run.lengths[1]
            made = Run(
                rungs=jnp.stack([*run.rungs[1:], after]),
                lengths=jnp.stack([run.lengths[1], length(following, state)]),
                state=state,
                key=key,
                told=seconds[rung] * noise(now),
                told_local=jnp.where(steps > 1, local * noise(alone), jnp.nan),
                told_rung=rung,
                step=run.step + steps,
            )
            count = steps.astype(jnp.float32)
            spent = seconds[rung] + (count - 1) * local
            return made, (count, spent, count * tables.progress[which])

        begin = Run(
            jnp.stack([rung, rung, rung]),
            jnp.stack([first, length(first, state)]),
            state,
            key,
            nothing,
            nothing,
            rung,
            jnp.int32(0),
        )
        return jax.lax.scan(exchange, begin, length=exchanges)[1]

    return jax.jit(jax.vmap(one))


def best_fixed(worth: Worth, networks: Networks, args: Args) -> np.ndarray:
    """Return seconds to the target of fixed choices, `[networks, rounds, rungs]`."""
    seconds = np.asarray(seconds_of(networks.parts, args.delay))[:, None]
    local = networks.parts[:, :1, 0][:, None]
    steps = np.asarray(args.choices.rounds, np.float32)[None, :, None]
    mean = (seconds + (steps - 1) * local) / steps
    return DENSE_STEPS / worth.progress[None] * mean


def measured(name: str, worth: Worth, networks: Networks, args: Args) -> Line:
    """Return what reaching the target took on each network."""
    fixed = best_fixed(worth, networks, args)
    if name == DILOCO:
        local = networks.parts[:, 0, 0]
        dense = np.asarray(seconds_of(networks.parts, args.delay))[:, 0]
        taken = DENSE_STEPS / worth.diloco * (dense + 29 * local) / 30
        worths = np.full(len(taken), worth.diloco)
    else:
        exchanges = int(1.3 * DENSE_STEPS / worth.progress.min())
        controller = args.choices.controllers[name]
        run = simulated(controller, worth, args, exchanges)
        keys = jax.random.split(jax.random.key(1), args.networks)
        found = run(networks.parts, networks.guessed, keys)
        steps, seconds, progress = (np.asarray(x, np.float64) for x in found)
        made, clock, count = (np.cumsum(x, axis=1) for x in (progress, seconds, steps))
        last = np.argmax(made >= DENSE_STEPS, axis=1)
        at = lambda x: np.take_along_axis(x, last[:, None], axis=1)[:, 0]
        # The last exchange counts for as much of it as was needed.
        over = (at(made) - DENSE_STEPS) / at(progress)
        taken = at(clock) - over * at(seconds)
        worths = DENSE_STEPS / (at(count) - over * at(steps))
    one = fixed[:, 0]
    listed = lambda x: [round(float(y), 4) for y in x]
    return {
        "progress": listed(worths),
        "over_best": listed(taken / one.min(axis=1)),
        "over_best_of_rounds": listed(taken / fixed.min(axis=(1, 2))),
        "over_dense": listed(taken / one[:, 0]),
    }


def table(lines: list[Line]) -> str:
    """Return the table of a record."""
    rows = [
        "| | optimizer | over the best fixed choice: median, 95%, worst | within 10% |"
        " over dense: median, worst | more than 5% above dense | least progress |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for name in dict.fromkeys(x["controller"] for x in lines if "controller" in x):
        for optimizer, words in OPTIMIZERS.items():
            over = over_best(lines, name, optimizer)
            line = line_of(lines, name, optimizer)
            dense, worth = np.array(line["over_dense"]), min(line["progress"])
            rows.append(
                f"| {name} | {words} | {np.median(over):.3f},"
                f" {np.quantile(over, 0.95):.3f}, {over.max():.3f} |"
                f" {np.mean(over <= 1.1):.1%} | {np.median(dense):.3f},"
                f" {dense.max():.3f} | {np.sum(dense > 1.05)} | {worth:.2f} |"
            )
    return "\n".join([*rows, "", *_fast_networks(lines)])


def _fast_networks(lines: list[Line]) -> list[str]:
    """Return rows of the default on networks where there is nothing to win."""
    name = next(x["controller"] for x in lines if "controller" in x)
    rows = [
        f"| {name}, r up to {FAST:g} | networks | over dense: median, worst |"
        " within 2% of dense |",
        "|---|--:|--:|--:|",
    ]
    for optimizer, words in OPTIMIZERS.items():
        key = {"kind": "networks", "optimizer": optimizer}
        (drawn_ones,) = [x for x in lines if key.items() <= x.items()]
        line = line_of(lines, name, optimizer)
        dense = np.array(line["over_dense"])[np.array(drawn_ones["r"]) <= FAST]
        rows.append(
            f"| {words} | {dense.size} | {np.median(dense):.3f}, {dense.max():.3f} |"
            f" {np.mean(dense <= 1.02):.0%} |"
        )
    return rows


def has_rounds(name: str) -> bool:
    """Return whether a method is compared with fixed choices that have rounds."""
    return name == DILOCO or {**CONTROLLERS, **WITH_TURNS}[name].has_rounds


def draw(lines: list[Line], path: Path) -> None:
    """Draw how many networks are within which factor of the best fixed choice."""
    names = list(dict.fromkeys(x["controller"] for x in lines if "controller" in x))
    with picture(path, (11, 4.5), columns=3) as (figure, axes):
        for axis, (optimizer, words) in zip(axes[0], OPTIMIZERS.items(), strict=True):
            for name in names:
                found = over_best(lines, name, optimizer)
                share = (np.arange(len(found)) + 1) / len(found)
                style = "--" if has_rounds(name) else "-"
                axis.plot(100 * share, np.sort(found), style, label=name)
            axis.axhline(1.1, color=INK, linewidth=0.8, linestyle=":")
            axis.axhline(1.0, color=FAINT)
            axis.set(yscale="log", ylim=(0.98, 12), title=words)
            axis.set(xlabel="% of networks")
            axis.set_yticks(
                [1, 1.1, 1.3, 2, 5, 10], ["1", "1.1", "1.3", "2", "5", "10"]
            )
            axis.minorticks_off()
        axes[0, 0].set(ylabel="seconds to the target over the best fixed choice")
        legend_below(figure)


def over_best(lines: list[Line], name: str, optimizer: str) -> np.ndarray:
    """Return seconds over those of the best fixed choice that a method could take."""
    against = "over_best_of_rounds" if has_rounds(name) else "over_best"
    return np.array(line_of(lines, name, optimizer)[against])


def line_of(lines: list[Line], name: str, optimizer: str) -> Line:
    """Return the line of a method and an optimizer."""
    key = {"controller": name, "optimizer": optimizer}
    (line,) = [x for x in lines if key.items() <= x.items()]
    return line


def described(networks: Networks, worth: Worth, args: Args) -> Line:
    """Return what the networks are, and the best fixed choice on each."""
    fixed = best_fixed(worth, networks, args)
    listed = lambda x: [float(f"{y:.4g}") for y in x]
    return {
        "replicas": [int(x) for x in networks.replicas],
        "r": listed(networks.ratio),
        "latency": listed(networks.latency),
        "compute": listed(networks.parts[:, 0, 0]),
        "best": fixed[:, 0].argmin(axis=1).tolist(),
        "best_of_rounds": fixed.reshape(len(fixed), -1).argmin(axis=1).tolist(),
    }


def main(args: Args) -> None:
    """Run the controllers that are missing, print the table and draw."""
    journal = Journal(args.out, configuration(args, "measured"))
    lines = runs_of(args.measured)
    networks = drawn(args)
    for optimizer in OPTIMIZERS:
        worth = worth_of(lines, optimizer, args.choices)
        make = functools.partial(described, networks, worth, args)
        journal.once(make, kind="networks", optimizer=optimizer)
        diloco = [] if np.isnan(worth.diloco) else [DILOCO]
        names = (*args.choices.controllers, *diloco)
        for name in names:
            make = functools.partial(measured, name, worth, networks, args)
            journal.once(make, controller=name, optimizer=optimizer)
    print(table(journal.lines))
    if args.picture:
        draw(journal.lines, args.picture)
