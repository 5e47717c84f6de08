"""Time one whole `tx.update` on one device, beside a pass over memory; profile it.

python update.py NAME prints one JSON line: quartiles of the milliseconds, and what the
longest operations of an update take, if NAME ends in "profile".
"""

import collections
import json
import pathlib
import statistics
import sys
import tempfile
import time

import jax
import jax.numpy as jnp

import gravac_jax as gravac

N, FACTOR, TURNS, PROFILED = 10_000_000, 100, 12, 20
tx = gravac.transform(axis_name=None, compress=True, controller=gravac.Fixed(FACTOR))
gradient = jax.random.normal(jax.random.key(0), (N,)) ** 3 * 1e-3

one_pass = jax.jit(lambda x, residual: x + residual, donate_argnums=1)
fresh = jax.jit(tx.update, donate_argnums=1)
reused = jax.jit(
    lambda old, x, state: tx.update(x, state), donate_argnums=(0, 2), keep_unused=True
)
held = {
    "one pass": jnp.zeros_like(gradient),
    "fresh": tx.init(gradient),
    "reused": (jnp.zeros_like(gradient), tx.init(gradient)),
}


def turn(name):
    """Run one way once, and return its milliseconds."""
    start = time.perf_counter()
    if name == "one pass":
        held[name] = out = one_pass(gradient, held[name])
    elif name == "fresh":
        out = fresh(gradient, held[name])
        held[name] = out[1]
    else:
        held[name] = out = reused(held[name][0], gradient, held[name][1])
    jax.block_until_ready(out)
    return (time.perf_counter() - start) * 1e3


def profile():
    """Return the mean milliseconds of the longest operations of an update."""
    total = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(PROFILED):
                turn("reused")
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                for event in () if line.name.startswith("python") else line.events:
                    total[event.name] += event.duration_ns / 1e6 / PROFILED
    kept = {k: v for k, v in total.items() if "Execut" not in k and "::" not in k}
    return dict(collections.Counter(kept).most_common(14))


found = {name: [] for name in held}
for i in range(TURNS + 3):
    for name in held:
        milliseconds = turn(name)
        if i >= 3:
            found[name].append(milliseconds)
row = {"checkout": sys.argv[1], "jax": jax.__version__}
row |= {name: statistics.quantiles(x, n=4) for name, x in found.items()}
if sys.argv[1].endswith("profile"):
    row["operations"] = profile()
print(json.dumps(row))
