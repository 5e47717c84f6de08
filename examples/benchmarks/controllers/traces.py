"""Trace what two controllers decide, side by side, on a network that changes.

The model is the small network of `controllers.progress`, the clock simulated. After
a third of the steps the network has a tenth of its bandwidth, after two thirds
all of it again.

    python examples/benchmarks controllers.traces --data-dir D --out FILE --picture PNG
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common.figures import FAINT, legend_below, picture
from common.journal import Journal, Line, configuration
from common.training import averaged, size
from rich.progress import track

import gravac_jax as gravac
from controllers.small import EVERY, ROWS, SmallText

CONTROLLERS = {
    "GraVAC": gravac.GraVAC(),
    "Fastest": gravac.Fastest(gravac.geometric(10, 1000)),
    "dense": gravac.Fixed(1),
    "factor 40": gravac.Fixed(40),
}
STYLES = ("C1--", "C0-", "k:", "C2-.")  # one for each controller
NOISE = 0.2  # the standard deviation of the logarithm of a time
LEARNING_RATE = 0.05  # of momentum SGD


@dataclasses.dataclass(frozen=True)
class Args:
    """The network, and how long.

    Args:
      data_dir: The folder with tiny-shakespeare's input.txt.
      out: The record, JSONL; controllers that are in it are not run again.
      picture: The figure, PNG or SVG.
      steps: Steps of every run.
      replicas: The number of simulated replicas.
      compute_seconds: The computation of a step, whatever the network.
      bytes_per_second: The bandwidth in the first and the last third.
      slower: How many times slower the network is in between.
    """

    data_dir: Path
    out: Path
    picture: Path
    steps: int = 1500
    replicas: int = 4
    compute_seconds: float = 0.01
    bytes_per_second: float = 30e6
    slower: float = 10.0


class Bench:
    """The small network, and one compiled stretch of steps for each controller."""

    def __init__(self, data_dir: Path):
        self.small = SmallText(data_dir)
        self.stretch = functools.cache(self._stretch)

    def transform(self, controller: Any) -> Any:
        """Return the transform with this controller, and the optimizer."""
        return optax.chain(
            gravac.transform(controller=controller, compress=True),
            optax.clip_by_global_norm(1.0),
            optax.sgd(LEARNING_RATE, momentum=0.9),
        )

    def _stretch(self, controller: Any, replicas: int) -> Any:
        """Compile a stretch of steps and an evaluation, given the time of each rung."""
        tx = self.transform(controller)

        def train_step(
            params: Any, opt_state: Any, clock: Any, batch: Any, *, table: jax.Array
        ) -> Any:
            last, total, key, average = clock
            _, grads = gravac.value_and_grad(self.small.loss)(params, batch)
            rung = opt_state[0].ahead[0]
            updates, opt_state = tx.update(grads, opt_state, step_seconds=last)
            key, now = jax.random.split(key)
            seconds = table[rung]
            last = seconds * jnp.exp(NOISE * jax.random.normal(now))
            params = optax.apply_updates(params, updates)
            clock = last, total + seconds, key, averaged(average, params)
            return params, opt_state, clock, rung

        step = gravac.simulate(train_step, replicas)
        held_out = self.small.draw(self.small.held_out, jax.random.key(7), 4096)

        @jax.jit
        def run(state: Any, key: jax.Array, table: jax.Array) -> Any:
            def one(state: Any, key: jax.Array) -> Any:
                batch = self.small.draw(self.small.train, key, ROWS * replicas)
                *state, rung = step(*state, batch, table=table)
                return tuple(state), rung

            state, rungs = jax.lax.scan(one, state, jax.random.split(key, EVERY))
            return state, self.small.loss(state[2][3], held_out), rungs

        return run

    def losses(
        self,
        controller: Any,
        replicas: int,
        table: Callable[[int], np.ndarray],
        steps: int,
    ) -> Iterator[tuple[float, float, np.ndarray]]:
        """Train, and yield what each stretch of steps brings.

        Args:
          controller: The controller.
          replicas: The number of simulated replicas.
          table: A function from the stretch to the seconds of each rung.
          steps: Steps in all.

        Yields:
          The held-out loss of averaged params, the seconds so far, and the rungs.
        """
        tx, params = self.transform(controller), self.small.params()
        # The loss is that of averaged params: that of params themselves fluctuates.
        now = jnp.float32(jnp.nan), jnp.float32(0)
        clock = (*now, jax.random.key(1), jax.tree.map(jnp.copy, params))
        params, opt_state = gravac.place((params, tx.init(params)), replicas)
        state = params, opt_state, clock
        for i in range(steps // EVERY):
            key = jax.random.fold_in(jax.random.key(100), i)
            state, loss, rungs = self.stretch(controller, replicas)(
                state, key, jnp.asarray(table(i), jnp.float32)
            )
            yield float(loss), float(state[2][1]), np.asarray(rungs).astype(int)


def seconds(
    wire: gravac.WireCost, entries: int, ladder: tuple[float, ...], replicas: int
) -> np.ndarray:
    """Return `[rungs]` seconds of a step with an all-gather."""
    traffic = [gravac.AllGather().traffic(entries, f, replicas) for f in ladder]
    parts = lambda x: wire.parts(x.wire_bytes, x.messages, x.entries == entries)
    return np.array([sum(parts(x)) for x in traffic])


def table_of(args: Args, entries: int, controller: Any) -> Callable[[int], np.ndarray]:
    """Return a function from the stretch to the seconds of a step at each rung."""
    stretches = args.steps // EVERY

    def table(stretch: int) -> np.ndarray:
        is_slow = stretches // 3 <= stretch < 2 * stretches // 3
        wire = gravac.WireCost(
            bytes_per_second=args.bytes_per_second / (args.slower if is_slow else 1),
            latency_seconds=1e-5,
            compute_seconds=args.compute_seconds,
            selection_seconds=0.05 * args.compute_seconds,
        )
        return seconds(wire, entries, controller.ladder, args.replicas)

    return table


def trace(bench: Bench, args: Args, name: str) -> list[Line]:
    """Make one run, and return a line for every stretch."""
    controller = CONTROLLERS[name]
    table = table_of(args, size(bench.small.params()), controller)
    lines = []
    for loss, clock, rungs in bench.losses(
        controller, args.replicas, table, args.steps
    ):
        factors = [controller.ladder[rung] for rung in rungs]
        line = {"controller": name, "loss": loss, "clock": clock, "factors": factors}
        lines.append(line)
    return lines


def draw(lines: list[Line], args: Args) -> None:
    """Draw factors over steps, above, and losses over seconds, below."""
    with picture(args.picture, (7.5, 7), rows=2) as (figure, axes):
        above, below = axes[:, 0]
        for name, line in zip(CONTROLLERS, STYLES, strict=False):
            mine = [x for x in lines if x["controller"] == name]
            factors = [factor for x in mine for factor in x["factors"]]
            if len(set(factors)) > 1:
                above.plot(factors, line, label=name, linewidth=1.3, drawstyle="steps")
            seconds, losses = ([x[key] for x in mine] for key in ("clock", "loss"))
            below.plot(seconds, losses, line, label=name)
        changes = [args.steps * i // 3 for i in (1, 2)]
        slower = f"{args.slower:g} times slower network"
        above.axvspan(*changes, color=FAINT, alpha=0.35, label=slower)
        above.set(yscale="log", xlabel="step", ylabel="factor of the compressed leaves")
        below.set(xlabel="seconds on the simulated clock")
        below.set(ylabel="held-out loss, nats a byte")
        below.set_xlim(0, max(x["clock"] for x in lines if x["controller"] != "dense"))
        # The fall at the beginning is the same for all.
        below.set_ylim(top=float(np.quantile([x["loss"] for x in lines], 0.85)))
        legend_below(figure)


def main(args: Args) -> None:
    """Make the runs that are missing, then draw the figure."""
    journal = Journal(args.out, configuration(args))
    bench = Bench(args.data_dir)
    missing = [name for name in CONTROLLERS if not journal.find(controller=name)]
    for name in track(missing, "runs", transient=True):
        journal.append(*trace(bench, args, name))
    draw(journal.lines, args)
    for name in CONTROLLERS:
        last = journal.find(controller=name)[-1]
        print(f"{name}: {last['loss']:.3f} after {last['clock']:.1f} s")
