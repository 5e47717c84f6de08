"""Time to a held-out loss: steps of real training, seconds of measured steps.

Replicas are simulated, so that many runs can be made; the seconds of a step at each
factor are those that steptime.py has measured on an emulated network, with noise.
Static factors say how many steps they need, once for all bandwidths; controllers, which
are told the seconds of their steps, make a run for each. All runs of a seed have the
same initial params and batches; the target is what dense steps reach at 80% of theirs.

    python examples/benchmarks/time_to_quality.py --data-dir DIR --timed STEPS --out OUT
"""

import dataclasses
import functools
import itertools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
import journal
from closed_loop import AVERAGED, reached, target_of
from journal import Journal, Line
from tasks import load, pipeline

import gravac_jax as gravac

EVERY = 25  # steps from one evaluation to the next
CONTROLLERS = {
    "Fastest": gravac.Fastest(),
    "GraVAC 0.04": gravac.GraVAC(),
    "GraVAC 0.7": gravac.GraVAC(epsilon=0.7),
    "GraVAC 0.9": gravac.GraVAC(epsilon=0.9),
    "Accordion": gravac.Accordion(10, 100),
}


@dataclasses.dataclass(frozen=True)
class Args:
    """What to train, how long, on which networks."""

    data_dir: Path
    """Where the task's files are."""
    timed: Path
    """A record of steptime.py, with "dense" and static factors."""
    out: Path
    """JSONL; runs that are in it are not made again."""
    task: str = "lstm-bytes"
    """What to train."""
    preset: str = "tiny"
    """Its size."""
    hosts: int = 4
    """Replicas: simulated here, hosts of the record."""
    factors: tuple[float, ...] = (1, 10, 20, 40, 80, 160, 320, 1000)
    """Static ones, dense first."""
    controllers: tuple[str, ...] = tuple(CONTROLLERS)
    """Which ones are compared with them."""
    seeds: int = 3
    """Paired."""
    steps: int = 1000
    """Of a dense run."""
    longest: float = 2.0
    """Others run at most so many times as long."""
    noise: float = 0.1
    """Standard deviation of the logarithm of a time."""
    deciding_seconds: float = 0.0
    """What a controller's step takes beside that of a static factor: see live.py."""
    multiple: float = 1.0
    """The learning rate, in units of the task's own; constant after a short warm-up."""


class Bench:
    """The task, and one compiled step for each controller."""

    def __init__(self, args: Args):
        self.args = args
        self.task = load(args.task, args.data_dir, preset=args.preset)
        self.loss, self.init = jax.jit(self.task.loss), jax.jit(self.task.init)
        rows = pipeline.evaluation(self.task.test, 128)
        self.held_out = list(itertools.islice(rows, 8))
        self.compiled = functools.cache(self._compiled)

    def _compiled(self, controller: Any) -> tuple[Any, Any]:
        rate = self.args.multiple * self.task.learning_rate
        ramp = optax.linear_schedule(0, rate, max(1, self.args.steps // 20))
        tx = optax.chain(
            gravac.transform(controller=controller),
            optax.clip_by_global_norm(1.0),
            optax.sgd(ramp, momentum=0.9, nesterov=True),
        )

        def train_step(
            params: Any, opt_state: Any, clock: Any, batch: Any, *, seconds: jax.Array
        ) -> Any:
            last, total, key, average = clock
            _, grads = gravac.value_and_grad(self.task.loss)(params, batch)
            rung = opt_state[0].rung
            updates, opt_state = tx.update(grads, opt_state, params, step_seconds=last)
            params = optax.apply_updates(params, updates)
            key, now = jax.random.split(key)
            noise = jnp.exp(self.args.noise * jax.random.normal(now))
            mix = lambda x, y: x + AVERAGED * (y - x)
            average = jax.tree.map(mix, average, params)
            clock = seconds[rung] * noise, total + seconds[rung], key, average
            return params, opt_state, clock, rung

        return tx, gravac.simulate(train_step, self.args.hosts)

    def run(
        self, controller: Any, seconds: np.ndarray, seed: int, target: float | None
    ) -> Line:
        """Train until the target is reached; without one, all steps of a dense run.

        Args:
          controller: which decides.
          seconds: `[rungs]`, of a step at each.
          seed: of params, batches and noise.
          target: the held-out loss to reach.

        Returns:
          `losses` every so many steps, the `clock` then, steps `taken` at each rung.
        """
        args, (tx, step) = self.args, self.compiled(controller)
        params = self.init(jax.random.key(seed))
        now = jnp.float32(jnp.nan), jnp.float32(0), jax.random.key(1000 + seed)
        clock = (*now, jax.tree.map(jnp.copy, params))
        state = (*gravac.place((params, tx.init(params)), args.hosts), clock)
        stream = pipeline.batches(
            self.task.train, rows=self.task.rows, replicas=args.hosts, seed=seed
        )
        table = jnp.asarray(seconds, jnp.float32)
        losses, clocks, rungs = [], [], []
        longest = args.steps if target is None else round(args.longest * args.steps)
        for i in range(longest):
            *state, rung = step(*state, next(stream), seconds=table)
            rungs.append(rung)
            if (i + 1) % EVERY:
                continue
            held_out = [self.loss(state[2][3], batch) for batch in self.held_out]
            losses.append(float(np.mean(jax.device_get(held_out))))
            clocks.append(float(state[2][1]))
            if target is not None and losses[-1] <= target:
                break
        seen = np.asarray(jax.device_get(rungs), int)
        taken = np.bincount(seen, minlength=len(seconds)).tolist()
        return {"losses": losses, "clock": clocks, "taken": taken}


def seconds_of(lines: list[Line], hosts: int) -> dict[float, Any]:
    """For each bandwidth, the function from a factor to the seconds of a step.

    Between measured factors it is linear in the bytes, which is in one over the factor.
    """
    found = {}
    mine = [x for x in lines if x["hosts"] == hosts]
    for mbit in sorted({x["bandwidth_mbit"] for x in mine}, reverse=True):
        by_name = {
            x["method"]: x["step_seconds"][1]
            for x in mine
            if x["bandwidth_mbit"] == mbit
        }
        static = {
            1 / float(name.removeprefix("fixed")): seconds
            for name, seconds in by_name.items()
            if name.startswith("fixed")
        }
        at, known = zip(*sorted(static.items()), strict=True)
        dense = by_name["dense"]
        found[mbit] = functools.partial(_seconds, at=at, known=known, dense=dense)
    return found


def _seconds(factor: float, at: Any, known: Any, dense: float) -> float:
    return dense if factor == 1 else float(np.interp(1 / factor, at, known))


def race(args: Args, console: Console) -> list[Line]:
    """Make the runs that are missing.

    Raises:
      SystemExit: if the first factor is not 1, which sets the target.
    """
    if args.factors[0] != 1:
        raise SystemExit(f"--factors must begin with 1, got {args.factors}")
    head, timed = journal.read(args.timed)
    own = dataclasses.asdict(args)
    for name in ("data_dir", "out", "timed", "seeds", "controllers", "factors"):
        del own[name]
    networks = seconds_of(timed, args.hosts)
    own["timed"] = head["configuration"]
    lines, bench = Journal(args.out, own), Bench(args)
    for seed in track(range(args.seeds), "seeds", console=console, transient=True):
        target = None
        for factor in args.factors:
            key = {"seed": seed, "factor": factor}
            ones = np.ones(1)
            run = functools.partial(bench.run, gravac.Fixed(factor), ones, seed)
            line = _made(lines, key, target, run)
            if target is None:
                target = line["target"]
        for name in args.controllers:
            controller = CONTROLLERS[name]
            for mbit, seconds in networks.items():
                key = {"seed": seed, "controller": name, "bandwidth_mbit": mbit}
                table = np.array([seconds(f) for f in controller.ladder])
                table = table + args.deciding_seconds
                run = functools.partial(bench.run, controller, table, seed)
                _made(lines, key, target, run)
    return lines.lines


def _made(lines: Journal, key: Line, target: float | None, run: Any) -> Line:
    """The line of a run, which is made if it is missing."""
    for line in lines.lines:
        if key.items() <= line.items():
            return line
    found = run(target)
    losses = found["losses"]
    goal = target_of(losses) if target is None else target
    at = reached(losses, found["clock"], goal)
    lines.append({**key, "target": goal, "seconds_to_target": at, **found})
    return lines.lines[-1]


def table(args: Args, lines: list[Line]) -> Table:
    """Seconds to the target, over those of the best static factor and of dense."""
    _, timed = journal.read(args.timed)
    title = "Time to the target: mean over seeds (range); controllers' steps "
    title += f"{1e3 * args.deciding_seconds:g} ms longer than static ones"
    found = Table(box=SIMPLE, title=title)
    found.add_column("Mbit/s", justify="right")
    for title in ("method", "over best static", "over dense"):
        found.add_column(title)
    for mbit, seconds in seconds_of(timed, args.hosts).items():
        static = {f: _per_seed(lines, factor=f) * seconds(f) for f in args.factors}
        best = min(static, key=lambda f: static[f].mean())
        rows = {f"static {f:g}": x for f, x in static.items()}
        for name in args.controllers:
            rows[name] = _per_seed(lines, controller=name, bandwidth_mbit=mbit)
        for name, x in rows.items():
            if len(x) == len(static[1]):
                ratios = (x / static[best], x / static[1])
                cells = [
                    f"{r.mean():.3f} ({r.min():.2f} to {r.max():.2f})" for r in ratios
                ]
                found.add_row(f"{mbit:g}", name, *cells)
    return found


def _per_seed(lines: list[Line], **key: Any) -> np.ndarray:
    mine = [x for x in lines if key.items() <= x.items()]
    mine.sort(key=lambda x: x["seed"])
    return np.array([x["seconds_to_target"] or np.inf for x in mine])


def main(args: Args) -> None:
    """Make the runs, then compare."""
    console = Console()
    console.print(table(args, race(args, console)))


if __name__ == "__main__":
    main(tyro.cli(Args))
