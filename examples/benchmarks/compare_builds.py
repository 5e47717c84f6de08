"""Compare two checkouts: how long updates take, and how long first steps compile.

    python examples/benchmarks compare_builds --old OLD --new NEW

Every round starts a process for each checkout, which goes first in turn. All figures
are CPU seconds of that process, with two replicas on two virtual devices of one thread
each: of an update of 4 million entries, and of the first step of a perceptron, which
traces and compiles it. Nothing is asserted: other load moves all figures.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.report import markdown

REPLICAS, SIDE, WIDTH = 2, 2000, 64
UPDATES, FIRST = 30, 10
LEAVES = (20, 80)
Arguments = Callable[[Any], dict[str, Any]]  # of `gravac.transform`, for a package
# With encodings, and as a checkout before them spells it.
SENT: dict[str, tuple[Arguments, Arguments]] = {
    "two bits": (
        lambda g: {"send": g.Bits(2)},
        lambda g: {"controller": g.Fixed(16)},
    ),
    "default": (lambda g: {}, lambda g: {}),
    "top-k at 100": (
        lambda g: {"send": g.TopK(100)},
        lambda g: {"controller": g.Fixed(100), "exchange": g.AllGather()},
    ),
    "low rank 4": (
        lambda g: {"send": g.LowRank(4)},
        lambda g: {"controller": g.Fixed(SIDE / 8), "exchange": g.LowRank()},
    ),
    "dense": (
        lambda g: {"send": g.Dense()},
        lambda g: {"controller": g.Fixed(1), "compress": True},
    ),
}
UPDATED = ("two bits", "default", "top-k at 100", "low rank 4")
COMPILED = ("two bits", "default", "top-k at 100", "dense")


@dataclasses.dataclass(frozen=True)
class Args:
    """What to compare.

    Args:
      old: A checkout.
      new: Another one.
      rounds: How often each is timed.
    """

    old: Path
    new: Path = Path(__file__).parents[2]
    rounds: int = 3


def transform(g: Any, sent: str) -> Any:
    """Return the transform, as the package spells it."""
    new, old = SENT[sent]
    return g.transform(**(new if hasattr(g, "Encoding") else old)(g))


def update_seconds(g: Any, sent: str) -> float:
    """Return the CPU seconds of an update: the mean of the last ones."""
    import jax
    import numpy as np

    tx, mesh = transform(g, sent), jax.make_mesh((REPLICAS,), ("data",))
    params = {"w": np.zeros((SIDE, SIDE), np.float32)}
    state, specs = g.place(tx.init(params), mesh), g.state_specs(tx.init(params))
    drawn = np.random.default_rng(0).standard_normal((REPLICAS * SIDE, SIDE), "f4")
    grads = jax.device_put({"w": drawn}, jax.NamedSharding(mesh, jax.P("data")))
    update = jax.shard_map(
        lambda grads, state: tx.update(grads, state),
        mesh=mesh,
        in_specs=(jax.P("data"), specs),
        out_specs=(jax.P(), specs),
    )
    update, seconds = jax.jit(update, donate_argnums=1), []
    for _ in range(UPDATES):
        start = time.process_time()
        _, state = jax.block_until_ready(update(grads, state))
        seconds.append(time.process_time() - start)
    return statistics.fmean(seconds[FIRST:])


def first_step_seconds(g: Any, sent: str, leaves: int) -> float:
    """Return the CPU seconds of the first step of a perceptron of so many leaves."""
    import jax
    import jax.numpy as jnp
    import optax

    layers = [
        {"w": jnp.ones((WIDTH, WIDTH)) / WIDTH, "b": jnp.zeros(WIDTH)}
        for _ in range(leaves // 2)
    ]
    mesh = jax.make_mesh((REPLICAS,), ("data",))
    tx = optax.chain(transform(g, sent), optax.sgd(0.1))

    def loss(layers: Any, x: jax.Array) -> jax.Array:
        for layer in layers:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean(x**2)

    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        value, grads = g.value_and_grad(loss)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    state = g.place((layers, tx.init(layers)), mesh)
    jitted, batch = g.data_parallel(step, mesh), jnp.ones((4, WIDTH))
    start = time.process_time()
    jax.block_until_ready(jitted(*state, batch))
    return time.process_time() - start


def measured() -> dict[str, float]:
    """Return all figures of the checkout that this process imports."""
    import jax

    import gravac_jax

    print(gravac_jax.__file__, file=sys.stderr)
    found = {}
    for sent in UPDATED:
        found[f"update, {sent}, ms"] = 1e3 * update_seconds(gravac_jax, sent)
    for leaves in LEAVES:
        for sent in COMPILED:
            jax.clear_caches()  # nothing that an earlier case has traced
            name = f"first step, {leaves} leaves, {sent}, s"
            found[name] = first_step_seconds(gravac_jax, sent, leaves)
    return found


def measure(checkout: Path) -> dict[str, float]:
    """Return the figures of a checkout, from a process that imports it."""
    environment = os.environ | {
        "PYTHONPATH": str(checkout.resolve()),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(REPLICAS),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    }
    command = [sys.executable, "-W", "ignore", __file__]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def main(args: Args) -> None:
    """Measure both checkouts in rounds, and print medians and their ratio."""
    checkouts = {"old": args.old, "new": args.new}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for i in range(args.rounds):
        for name in list(checkouts)[:: -1 if i % 2 else 1]:
            print(f"round {i + 1}, {name}", file=sys.stderr)
            found[name].append(measure(checkouts[name]))
    rows = [["median (range) of CPU time", "old", "new", "new / old"]]
    for case in found["new"][0]:
        figures = {name: [x[case] for x in found[name]] for name in found}
        said = [
            f"{statistics.median(x):.3g} ({min(x):.3g} to {max(x):.3g})"
            for x in figures.values()
        ]
        old, new = map(statistics.median, figures.values())
        rows.append([case, *said, f"{new / old:.2f}"])
    print(markdown(rows))


if __name__ == "__main__":
    print(json.dumps(measured()))
