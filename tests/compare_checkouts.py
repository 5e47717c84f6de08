"""Compare two checkouts: do their recipes train to the same bits?

    python tests/compare_checkouts.py OLD_DIR NEW_DIR [RECIPE ...]

Each recipe trains a small model for 100 steps on four virtual CPU devices, compiled
with XLA's default optimisation, in one process a checkout. The table says for each
recipe whether the params and what each replica holds back have the same bits after 1,
10 and 100 steps, and otherwise after which of them they differ. Some minutes.
The exit status is 1 if a recipe differs, or fails in the new checkout.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

STEPS, LOOKS, REPLICAS = 100, (1, 10, 100), 4
BAD_STEP = 7  # one replica's gradient is not finite

Arguments = dict[str, Any]  # of `gravac.transform`
SGD = optax.sgd(0.05)


class Recipe(NamedTuple):
    """What to train with, and how to run it.

    Attributes:
      make: takes the package and arguments of `gravac.transform`, and returns an
        optimizer.
      arguments: these arguments; `send` as text.
      run: "data_parallel", "simulate", "two axes", or "own params" for gradients at
        each replica's own params.
    """

    make: Callable[..., Any]
    arguments: Arguments
    run: str = "data_parallel"


SENDS = (  # as text, which each package makes what it means
    *("Bits(8)", "Bits(4)", "Bits(2)", "Bits(1)", "Bits(2, turns=3)"),
    *("Bits(1, turns=4)", "TopK(10)", "TopK(100)", "TopK(1000)"),
    'TopK(50, select="exact", values="float32")',
    *('TopK(50, select="sampled")', "LowRank(4)"),
    *("Dense()", 'Dense("bfloat16")', "Fastest((Dense(), TopK(10), TopK(100)))"),
    "GraVAC(TopK.geometric(10, 100), epsilon=0.3, window=5)",
    "Fastest((Dense(), Bits(8), Bits(4), Bits(2)))",
)


def recipes(g: Any) -> Iterator[tuple[str, Recipe]]:
    """Yield every recipe of a package with its name."""
    bits, top_k = {"send": "Bits(2)"}, {"send": "TopK(10)"}
    more = {
        "clip, decay": {**bits, "clip": g.ClipByGlobalNorm(0.5), "weight_decay": 1e-3},
        "one step late": {**bits, "delay": 1},
        "rounds": {**bits, "every": 4},
    }
    for name, arguments in ({text: {"send": text} for text in SENDS} | more).items():
        yield name, Recipe(sgd(momentum=0.9), arguments)
    for name, masking in (("momentum", False), ("momentum, masked", True)):
        memory = g.Momentum(0.9, True, masking)
        yield name, Recipe(sgd(momentum=None), {**top_k, "memory": memory})
    dgc = g.dgc(warm_up_steps=50, max_norm=1.0)
    yield "deep gradient compression", Recipe(lambda g: optax.chain(dgc, SGD), {})
    yield "adamw", Recipe(lambda g: g.adamw(1e-2), {}, "own params")
    yield "sgd", Recipe(lambda g: g.sgd(1e-2), {}, "own params")
    yield "diloco", Recipe(lambda g: g.diloco(optax.adam(1e-2), 5), {}, "own params")
    for run in ("data_parallel", "simulate", "two axes"):
        yield f"default, {run}", Recipe(sgd(0.9), {}, run)
    for run in ("simulate", "two axes"):
        yield f"Bits(2), {run}", Recipe(sgd(0.9), bits, run)
        yield f"TopK(10), {run}", Recipe(sgd(0.9), top_k, run)


def sgd(momentum: float | None) -> Callable[..., Any]:
    """Return a way to a guarded SGD after a transform."""

    def make(g: Any, send: str | None = None, **arguments: Any) -> Any:
        if send is not None:
            arguments["send"] = eval(send, vars(g).copy())
        after = optax.sgd(0.05, momentum=momentum)
        return g.guard(optax.chain(g.transform(**arguments), after))

    return make


def train(g: Any, recipe: Recipe) -> list[str]:
    """Return a hash of params and memories after each of `LOOKS` steps."""
    sizes, names = {"data": REPLICAS}, {}
    if recipe.run == "two axes":
        sizes, names = {"dcn": 2, "ici": 2}, dict(axis_name="dcn", fast_axis_name="ici")
    axes, rng = tuple(sizes), np.random.default_rng(0)
    tx = recipe.make(g, **recipe.arguments, **names)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    params = {"a": 0.1 * draw(96, 128), "b": draw(128), "c": 0.1 * draw(128, 96)}

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ p["a"] + p["b"]) @ p["c"] - y) ** 2)

    def step(p: Any, state: Any, batch: Any, **times: Any) -> Any:
        own = g.own_params(tx, p, state) if recipe.run == "own params" else p
        value, grads = g.value_and_grad(loss, axes)(own, *batch)
        updates, state = tx.update(grads, state, p, **times)
        return optax.apply_updates(p, updates), state, value

    if recipe.run == "simulate":
        where, jitted = REPLICAS, g.data_parallel(step, REPLICAS)
    else:
        where = jax.make_mesh(tuple(sizes.values()), axes)
        jitted = g.data_parallel(step, where, *axes)
    params, state = g.place((params, tx.init(params)), where, axes[0])
    hashes = []
    for i in range(1, STEPS + 1):
        x, y = draw(16, 96), draw(16, 96)
        if i == BAD_STEP:
            x[3, 2] = np.nan
        times = {"step_seconds": np.float32(0.1 + 0.01 * (i % 5))}
        # Many steps in flight can starve a collective of threads on few cores.
        params, state, _ = jax.block_until_ready(jitted(params, state, (x, y), **times))
        if i in LOOKS:
            memory = map(np.asarray, jax.tree.leaves(optax.tree.get(state, "memory")))
            # Without the zeros that fill up a bucket.
            rows = [np.trim_zeros(row, "b") for x in memory for row in np.atleast_2d(x)]
            held = [*map(np.asarray, jax.tree.leaves(params)), *rows]
            joined = b"".join(x.tobytes() for x in held)
            hashes.append(hashlib.sha256(joined).hexdigest())
    return hashes


def results(chosen: list[str]) -> dict[str, list[str] | str]:
    """Return the hashes of each recipe, or the error of one that is not there."""
    import gravac_jax

    found: dict[str, list[str] | str] = {}
    for name, recipe in recipes(gravac_jax):
        if chosen and name not in chosen:
            continue
        try:
            found[name] = train(gravac_jax, recipe)
        except (AttributeError, NameError, TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
        print(f"  {name}", file=sys.stderr, flush=True)
    return found


def results_of(checkout: str, chosen: Sequence[str]) -> dict[str, list[str] | str]:
    """Return the results of a checkout, from a process that imports it."""
    print(checkout, file=sys.stderr)
    environment = os.environ | {
        "PYTHONPATH": os.path.abspath(checkout),
        "JAX_NUM_CPU_DEVICES": str(REPLICAS),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",  # XLA's default optimisation
    }
    command = [sys.executable, __file__, "--inside", *chosen]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def main(old_dir: str, new_dir: str, *chosen: str) -> None:
    """Print a table of all recipes; exit with 1 if one differs."""
    old, new = (results_of(x, chosen) for x in (old_dir, new_dir))
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
        print(f"{name:59} {verdict}")
    sys.exit(has_moved)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        print(json.dumps(results(sys.argv[2:])))
    elif len(sys.argv) > 2:
        main(*sys.argv[1:])
    else:
        sys.exit(__doc__)
