"""What it costs to write down every step, beside the quickstart's step.

The quickstart's model, batches and four replicas. Ways to write take turns in one run,
and each round is compared with its own turn without. As turns of so short a difference
are lost in what else the machine does, writing is also timed alone, between steps that
were waited for: all that it does before the next step can be dispatched.

    python examples/benchmarks/metrics_overhead.py --out FILE.jsonl
"""

import contextlib
import dataclasses
import io
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import journal
import numpy as np
import optax
import tyro
from flax import nnx
from rich.console import Console
from rich.table import Table

import gravac_jax as gravac
from gravac_jax import metrics

sys.path.insert(0, str(Path(__file__).parents[1]))
import quickstart

REPLICAS = 4
Write = Callable[[int, Any, jax.Array], None]


@dataclasses.dataclass(frozen=True)
class Args:
    """How long to time."""

    out: Path
    """JSONL, appended to."""
    rounds: int = 20
    """Turns of each way."""
    steps: int = 20
    """Of a turn."""
    batch: int = quickstart.Config.batch
    """Sequences per replica and step."""
    length: int = quickstart.Config.length
    """Bytes per sequence."""


def trainer(args: Args) -> Iterator[tuple[Any, jax.Array]]:
    """The state and the loss after every step of the quickstart, not waited for."""
    graph, params = nnx.split(quickstart.ByteModel(nnx.Rngs(0)), nnx.Param)
    loss_of = quickstart.loss_of_model(graph)
    tx = optax.chain(
        gravac.transform(),
        optax.clip_by_global_norm(1.0),
        optax.sgd(0.1, momentum=0.9, nesterov=True),
    )

    def train_step(params: Any, opt_state: Any, batch: jax.Array) -> Any:
        loss, grads = gravac.value_and_grad(loss_of)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    step, place = quickstart.replicated(train_step, REPLICAS)
    state = place((params, tx.init(params)))
    text, _ = quickstart.read_text(None)
    for batch in quickstart.draw(text, REPLICAS * args.batch, args.length, seed=0):
        *state, loss = step(*state, batch)
        yield state, loss


@contextlib.contextmanager
def ways(folder: Path, total_steps: int) -> Iterator[dict[str, tuple[Write, Any]]]:
    """How to write a step, and what to do when its turn ends; by name."""
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80)
    jsonl = lambda name: metrics.JsonlWriter(folder / f"{name}.jsonl")
    with contextlib.ExitStack() as stack:
        opened = lambda *makes: stack.enter_context(metrics.first_host(*makes))
        behind = metrics.Recorder(opened(lambda: jsonl("behind")))
        at_once = opened(lambda: jsonl("at_once"))
        everything = metrics.Recorder(
            opened(
                lambda: jsonl("everything"),
                lambda: metrics.TensorBoardWriter(folder),
                lambda: metrics.LiveView(total_steps, console=terminal),
            )
        )

        def fetched(i: int, state: Any, loss: jax.Array) -> None:
            at_once.write(i, metrics.scalars(state, loss=loss))

        nothing = lambda *_: None
        recorded = lambda to: lambda i, state, loss: to.record(i, state, loss=loss)
        yield {
            "nothing": (nothing, nothing),
            "JSONL": (recorded(behind), behind.flush),
            "JSONL, waiting for each step": (fetched, nothing),
            "JSONL, TensorBoard, live view": (recorded(everything), everything.flush),
        }


def measured(args: Args, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """`[rounds]` seconds of a step, and seconds of writing alone, of every way."""
    steps = enumerate(trainer(args))
    for _, (state, _) in itertools.islice(steps, 40):  # looks at all rungs
        jax.block_until_ready(state)
    with ways(folder, 2 * args.rounds * args.steps) as found:
        whole = {name: [] for name in found}
        alone = {name: [] for name in found}
        for turn in range(args.rounds):
            order = list(found)[turn % len(found) :] + list(found)[: turn % len(found)]
            for name in order:
                write, end = found[name]
                begin = time.perf_counter()
                for i, (state, loss) in itertools.islice(steps, args.steps):
                    write(i, state, loss)
                end()
                jax.block_until_ready(loss)
                whole[name].append((time.perf_counter() - begin) / args.steps)
            for name in order:
                write, end = found[name]
                for i, (state, loss) in itertools.islice(steps, 4):
                    jax.block_until_ready((state, loss))
                    begin = time.perf_counter()
                    write(i, state, loss)
                    end()
                    alone[name].append(time.perf_counter() - begin)
    return whole, alone


def main(args: Args) -> None:
    """Measure, record and print."""
    jax.config.update("jax_num_cpu_devices", REPLICAS)
    configuration = {"rounds": args.rounds, "steps": args.steps, "batch": args.batch}
    record = journal.Journal(args.out, configuration | {"length": args.length})
    with tempfile.TemporaryDirectory() as folder:
        whole, alone = measured(args, Path(folder))
    step = np.median(whole["nothing"])
    quartiles = lambda x: np.quantile(x, (0.25, 0.5, 0.75)).tolist()
    columns = "written", "step, ms", "more than nothing, %", "alone, us", "of a step, %"
    table = Table(*columns, title="Medians (quartiles)", box=None, padding=(0, 2, 0, 0))
    for name in whole:
        more = 100 * (np.divide(whole[name], whole["nothing"]) - 1)
        figures = {
            "step_ms": quartiles(1e3 * np.array(whole[name])),
            "more_percent": quartiles(more),
            "alone_us": quartiles(1e6 * np.array(alone[name])),
            "share_percent": quartiles(100 * np.array(alone[name]) / step),
        }
        record.append({"written": name, **figures})
        spread = lambda x, form: "{1:{3}} ({0:{3}} to {2:{3}})".format(*x, form)
        forms = zip(figures.values(), (".1f", ".1f", ".0f", ".2f"), strict=True)
        table.add_row(name, *(spread(x, form) for x, form in forms))
    Console(width=120).print(table)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
