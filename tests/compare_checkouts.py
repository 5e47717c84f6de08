"""Compare two checkouts: do their recipes train to the same bits?

    python tests/compare_checkouts.py OLD_DIR NEW_DIR [RECIPE ...]

Each recipe trains a small model for 100 steps on four virtual CPU devices, compiled
with XLA's default optimisation, in one process a checkout. The table says for each
recipe whether params, per-replica state and StepInfo have the same bits after 1, 10 and
100 steps, and otherwise after which of them they differ. Four minutes on a quiet core.
The exit status is 1 if a recipe differs, or fails in the new checkout.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

STEPS, LOOKS, REPLICAS = 100, (1, 10, 100), 4
BAD_STEP = 7  # one replica's gradient is not finite
LADDER = (1.0, 10.0, 100.0)

Make = Callable[[Any], Any]


def spelled(*ways: Make) -> Make:
    """Return a component by the first of several spellings that a checkout knows."""

    def make(g: Any) -> Any:
        for way in ways[:-1]:
            try:
                return way(g)
            except (AttributeError, TypeError, ValueError):
                pass
        return ways[-1](g)

    return make


def entries(values: str, indices: str) -> Make:
    """Return an all-gather with these encodings: names now, objects before."""
    names = {"float32": "Float32", "bfloat16": "BFloat16", "int32": "Int32"}
    names["uint16"] = "UInt16"
    of = lambda g, x: getattr(g, names[x])()
    return spelled(
        lambda g: g.AllGather(values=values, indices=indices),
        lambda g: g.AllGather(values=of(g, values), indices=of(g, indices)),
    )


class Recipe(NamedTuple):
    """What to train with, and how to run it.

    Attributes:
      make: takes the package and arguments of `gravac.transform`, and returns an
        optimizer.
      arguments: returns each of these arguments, by its name.
      run: "data_parallel", "simulate", "two axes", or "own params" for gradients at
        each replica's own params.
    """

    make: Callable[..., Any]
    arguments: dict[str, Make]
    run: str = "data_parallel"


def recipes() -> Iterator[tuple[str, Recipe]]:
    """Yield every recipe with its name."""
    climbing = lambda g: g.GraVAC(epsilon=0.3, window=5, ladder=g.geometric(10, 100))
    fastest = lambda g: g.Fastest(LADDER)
    at = lambda factor: lambda g: g.Fixed(factor)
    masked = spelled(
        lambda g: g.Momentum(0.9, True, True),
        lambda g: g.Momentum(0.9, True, "literal"),
    )
    low_rank = spelled(
        lambda g: g.LowRank(values="bfloat16"),
        lambda g: g.LowRank(values=g.BFloat16()),
    )
    dense = spelled(lambda g: g.DenseMean("bfloat16"), lambda g: g.DenseMean16())
    arguments: dict[str, dict[str, Make]] = {
        "default": {},
        "factor 1": {"controller": at(1)},
        "factor 10": {"controller": at(10)},
        "factor 100": {"controller": at(100)},
        "factor 1000": {"controller": at(1000)},
        "GraVAC": {"controller": climbing},
        "Accordion": {"controller": lambda g: g.Accordion(10, 100, interval=7)},
        "warm-up": {"controller": lambda g: g.warm_up(50)},
        "Capped": {"controller": lambda g: g.Capped(climbing(g), cap=40)},
        "least progress": {"controller": lambda g: g.Fastest(LADDER, 0.9)},
        "32-bit entries": {
            "exchange": entries("float32", "int32"),
            "controller": climbing,
        },
        "TopK": {"compressor": lambda g: g.TopK(), "controller": fastest},
        "SampledTopK": {"compressor": lambda g: g.SampledTopK(), "controller": fastest},
        "RedSync": {"compressor": lambda g: g.RedSync(), "controller": fastest},
        "RandomK": {"compressor": lambda g: g.RandomK(), "controller": fastest},
        "Identity": {"compressor": lambda g: g.Identity(), "controller": fastest},
        "leader": {"exchange": lambda g: g.LeaderIndices(), "controller": fastest},
        "shared random": {
            "exchange": lambda g: g.SharedRandomK(),
            "controller": fastest,
        },
        "low rank": {"exchange": lambda g: g.LowRank(), "controller": fastest},
        "low rank, bfloat16": {"exchange": low_rank, "controller": at(12.5)},
        "dense mean": {"exchange": lambda g: g.DenseMean()},
        "dense mean, bfloat16": {"exchange": dense},
        "no memory": {"memory": lambda g: g.NoMemory(), "controller": at(20)},
        "clip, decay, checks": {
            "clip": lambda g: g.ClipByGlobalNorm(0.5),
            "weight_decay": lambda g: 1e-3,
            "check_every": lambda g: 5,
        },
        "clip by value": {"clip": lambda g: g.ClipByValue(0.01)},
        "all leaves": {"compress": lambda g: True, "controller": climbing},
    }
    before = {
        "momentum": {"momentum": lambda g: 0.9, "controller": at(50)},
        "momentum, masked": {"memory": masked, "controller": at(50)},
    }
    for name, x in (arguments | before).items():
        yield name, Recipe(sgd(momentum=None if name in before else 0.9), x)
    yield "deep gradient compression", Recipe(paper, {})
    yield "adamw", Recipe(lambda g: g.adamw(1e-2), {}, "own params")
    for run in ("simulate", "two axes"):
        yield f"default, {run}", Recipe(sgd(0.9), {}, run)
        yield f"GraVAC, {run}", Recipe(sgd(0.9), {"controller": climbing}, run)


def sgd(momentum: float | None) -> Callable[..., Any]:
    """Return a way to a guarded SGD after a transform."""
    import optax

    def make(g: Any, **arguments: Any) -> Any:
        after = optax.sgd(0.05, momentum=momentum)
        return g.guard(optax.chain(g.transform(**arguments), after))

    return make


def paper(g: Any) -> Any:
    """Return Deep Gradient Compression with all of its parts."""
    import optax

    return optax.chain(g.dgc(warm_up_steps=50, max_norm=1.0), optax.sgd(0.05))


def train(g: Any, recipe: Recipe) -> list[str]:
    """Return a hash of everything after each of `LOOKS` steps."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    sizes = {"dcn": 2, "ici": 2} if recipe.run == "two axes" else {"data": REPLICAS}
    axes = tuple(sizes)
    given = {name: x(g) for name, x in recipe.arguments.items()}
    if recipe.run == "two axes":
        given |= {"axis_name": "dcn", "dense_axis_name": "ici"}
    tx, rng = recipe.make(g, **given), np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    params = {"a": 0.1 * draw(96, 128), "b": draw(128), "c": 0.1 * draw(128, 96)}

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ p["a"] + p["b"]) @ p["c"] - y) ** 2)

    def step(p: Any, state: Any, batch: Any, **times: Any) -> Any:
        own = g.local_params(tx, p, state) if recipe.run == "own params" else p
        value, grads = g.value_and_grad(loss, axes)(own, *batch)
        updates, state = tx.update(grads, state, p, **times)
        return optax.apply_updates(p, updates), state, value

    if recipe.run == "simulate":
        where, jitted = REPLICAS, g.simulate(step, REPLICAS)
    else:
        where = jax.make_mesh(tuple(sizes.values()), axes)
        jitted = g.data_parallel(step, where, *axes)
    params, state = g.place((params, tx.init(params)), where, axes[0])
    hashes = []
    for i in range(1, STEPS + 1):
        x, y = draw(16, 96), draw(16, 96)
        if i == BAD_STEP:
            x[3, 2] = np.nan
        seconds, measured = np.float32(0.1 + 0.01 * (i % 5)), np.int32(i - 2)
        times = {"step_seconds": seconds, "measured_step": measured}
        # Many steps in flight can starve a collective of threads on few cores.
        params, state, _ = jax.block_until_ready(jitted(params, state, (x, y), **times))
        if i in LOOKS:
            kept = [optax.tree.get(state, x) for x in ("local", "StepInfo")]
            leaves = [np.asarray(x).tobytes() for x in jax.tree.leaves((params, kept))]
            hashes.append(hashlib.sha256(b"".join(leaves)).hexdigest())
    return hashes


def results(chosen: list[str]) -> dict[str, list[str] | str]:
    """Return the hashes of each recipe, or the error of one that is not there."""
    import gravac_jax

    found: dict[str, list[str] | str] = {}
    for name, recipe in recipes():
        if chosen and name not in chosen:
            continue
        try:
            found[name] = train(gravac_jax, recipe)
        except (AttributeError, TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
        print(f"  {name}", file=sys.stderr, flush=True)
    return found


def results_of(checkout: str, chosen: list[str]) -> dict[str, list[str] | str]:
    """Return the results of a checkout, from a process that imports it."""
    print(checkout, file=sys.stderr)
    environment = os.environ | {
        "PYTHONPATH": os.path.abspath(checkout),
        "JAX_NUM_CPU_DEVICES": str(REPLICAS),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",  # XLA's default optimisation
    }
    command = [sys.executable, __file__, "--inside", checkout, "", *chosen]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def main() -> None:
    """Print a table of all recipes; exit with 1 if one differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("recipes", nargs="*")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(results(options.recipes)))
        return
    old, new = (results_of(x, options.recipes) for x in (options.old, options.new))
    has_moved = False
    for name in old:
        a, b = old[name], new[name]
        if isinstance(b, str):  # every recipe here is one that the new checkout has
            verdict, has_moved = f"fails in new: {b}", True
        elif isinstance(a, str):
            verdict = f"only in new: {a}"
        elif a == b:
            verdict = "same bits"
        else:
            first = [x == y for x, y in zip(a, b, strict=True)].index(False)
            verdict, has_moved = f"differs after step {LOOKS[first]}", True
        print(f"{name:28} {verdict}")
    sys.exit(has_moved)


if __name__ == "__main__":
    main()
