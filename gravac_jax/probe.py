"""Tells whether gradient compression will pay, before you change your code.

    python -m gravac_jax.probe --params 66e6

times training steps on the devices it runs on: dense ones, and one kind for each
encoding, such as `Bits(2)`. The gradient has the given number of entries and costs
nothing to compute. To time your own computation too, give it your loss,
`--loss package.module:function`: a function without arguments that returns
`(loss_fn, params, batch)`, with the batch of one device. The probe then also times
steps without an exchange, which show the most that any compression can win. To time
other encodings, write them as in Python:

    python -m gravac_jax.probe --params 66e6 --send "Bits(4)" "TopK(30)"

On a cluster, start the probe as you start your training script:

    srun python -m gravac_jax.launch -m gravac_jax.probe --loss package.module:function

`--json FILE` writes all results to a file. A controller can start from the network
that the probe measured:

    from gravac_jax import probe
    gravac.transform(network=probe.read(FILE))

Steps run as users run them, through `gravac.data_parallel` and `gravac.transform`. They
compress over the first axis of the mesh and average dense over the others.
"""

import argparse
import ast
import json
import math
import pkgutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import gravac_jax as gravac
from gravac_jax import _network
from gravac_jax._encodings import ENCODINGS, Bits, Dense, Encoding

__all__ = ["main", "read"]

SEND = Dense("bfloat16"), Bits(8), Bits(2), *(Bits(2, turns=n) for n in (2, 4, 8))
MIN_ROUNDS = 5  # the fewest samples that give a 90% confidence interval
WARM_UP_CALLS = 2  # the first call compiles, and sometimes the second

# A compressed step teaches less than a dense one, so it has to be faster by more than
# this. The figure is arbitrary.
PAYS_FROM = 1.05
_NOTES = f"""
- Ranges: 90% confidence intervals of the median, the timing noise of this run.
- In brackets: how many times fewer bytes than a dense step sends.
- A step pays if it is over {PAYS_FROM:g} times as fast as a dense one.
- A compressed step teaches less. Only training can show how much less.
- CPU devices of one process have no network between them.
"""
_SUMMARY = """\
{params:,} params; {devices} devices; processes: {processes}; rounds of timing: {rounds}
all-reduce over {axis}, {replicas} replicas: {0:.3g} us a message, {1:.4g} MB/s
"""

# The loss of one replica, `loss_fn(params, batch)`, its params, and its batch, of
# arrays with examples along their first axis.
Model = tuple[Callable[[Any, Any], jax.Array], Any, Any]
Run = Callable[[], Any]
Seconds = Mapping[str, np.ndarray]


def main(argv: list[str] | None = None) -> None:
    """Time training steps on these devices and print whether compression pays.

    Args:
      argv: The arguments of the command line. Default: those of this process.

    Raises:
      SystemExit: If an argument is wrong. The message says what to give instead.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if options.json and (options.json.is_dir() or not options.json.parent.is_dir()):
        parser.error(f"--json {options.json}: no file in a directory that exists")
    axes = options.mesh or {"data": jax.device_count()}
    sizes = tuple(axes.values())
    if math.prod(sizes) != jax.device_count() or sizes[0] < 2:
        parser.error(
            f"the mesh {axes} must have all {jax.device_count()} devices, two or"
            " more on its first: python -m gravac_jax.launch -n 2 -m gravac_jax.probe"
        )
    mesh = Mesh(gravac.make_mesh().devices.reshape(sizes), tuple(axes))
    model = options.loss() if options.loss else stand_in(options.params)
    if jax.process_index() == 0:
        sys.stderr.write(f"compiling, then timing for {options.seconds:g} s or more\n")
    results = measure(mesh, model, options.send, options.seconds)
    if not options.loss:  # the time of a stand-in's computation means nothing
        del results["network"]["compute_seconds"]
        results["headroom"] = None
    results["verdict"] = verdict(results)
    if jax.process_index() == 0:
        sys.stdout.write(text(results))
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    about = "Tell whether gradient compression will pay on these devices."
    parser = argparse.ArgumentParser("python -m gravac_jax.probe", None, about)
    parser.allow_abbrev = False
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--params", type=count, help="number of params, such as 66e6")
    help = "MODULE:FUNCTION without arguments that returns (loss_fn, params, batch)"
    model.add_argument("--loss", type=function, help=help)
    add = parser.add_argument
    help = "encodings to time, written as in Python; default: %(default)s"
    add("--send", nargs="+", type=encoding, default=SEND, metavar="X", help=help)
    help = "the mesh, compressed over its first axis; default: one axis"
    add("--mesh", type=mesh_axes, metavar="AXIS=SIZE,...", help=help)
    add("--seconds", type=float, default=30.0, help="time to spend; default: 30")
    add("--json", type=Path, metavar="FILE", help="file to write all results to")
    return parser


def count(text: str) -> float:
    """Parse a number of params; argparse shows this function's name in its error."""
    if not 1 <= float(text) < math.inf:
        raise ValueError
    return float(text)


def function(text: str) -> Callable[[], Model]:
    """Import `MODULE:FUNCTION`."""
    try:
        return pkgutil.resolve_name(text)
    except (AttributeError, ImportError) as error:
        raise argparse.ArgumentTypeError(f"{error}, got {text!r}") from None


def encoding(text: str) -> Encoding:
    """Parse an encoding as one writes it, such as `Bits(1, turns=4)`; runs no code."""
    kinds = {kind.__name__: kind for kind in ENCODINGS}
    try:
        call: Any = ast.parse(text, mode="eval").body
        options = {x.arg: ast.literal_eval(x.value) for x in call.keywords}
        return kinds[call.func.id](*map(ast.literal_eval, call.args), **options)
    except (AttributeError, KeyError, SyntaxError, TypeError, ValueError) as error:
        must = "must be encodings such as 'Bits(2)' 'TopK(100)'"
        raise argparse.ArgumentTypeError(f"{must}, got {text!r} ({error})") from None


def mesh_axes(text: str) -> dict[str, int]:
    """Parse `AXIS=SIZE,...`; argparse shows this function's name in its error."""
    return {name: int(size) for name, size in (x.split("=") for x in text.split(","))}


def stand_in(params: float) -> Model:
    """Return a model of about `params` params whose gradient costs no computation.

    The gradient equals the params, which are drawn with the heavy tails of gradients,
    as square matrices of at most 1024 rows.
    """
    count = math.ceil(params / 1024**2)
    side = math.isqrt(int(params) // count)
    draws = 1e-3 * jax.random.normal(jax.random.key(0), (count, side, side)) ** 3
    loss_fn = lambda params, batch: optax.tree.norm(params, squared=True) / 2
    return loss_fn, list(draws), np.zeros(1)


class Range(NamedTuple):
    """A median and its 90% confidence interval."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f} to {self.high:.2f})"


def median_range(samples: np.ndarray) -> Range:
    """Return the median of `[n]` samples and its 90% confidence interval.

    Each sample lies below the true median with probability 1/2, so the number of
    samples below it is binomial, whatever their distribution. The interval lies between
    two of the sorted samples; for five samples these are the smallest and the largest.

    Example:
      >>> print(median_range(np.array([3.0, 1.0, 2.0, 5.0, 4.0])))
      3.00 (1.00 to 5.00)
    """
    ordered, n = np.sort(samples).tolist(), len(samples)
    cut = int((n - 1 - 1.645 * math.sqrt(n)) / 2)
    return Range(ordered[cut], float(np.median(ordered)), ordered[-1 - cut])


def measure(
    mesh: Mesh, model: Model, send: Sequence[Encoding], seconds: float
) -> dict[str, Any]:
    """Compile all steps, time them, and compare them with dense ones.

    Args:
      mesh: The mesh to train on. Steps compress over its first axis.
      model: The model to train.
      send: The encodings.
      seconds: How long to time. Compiling comes on top.

    Returns:
      The results as `--json` writes them, without the verdict. They are the same on all
      processes. `network` has arguments of `gravac.WireCost`. `headroom` is the
      speed-up of a step that sends nothing, the most that compression can win. The
      first of `rows` is dense.

    Raises:
      ValueError: If the gradient is not finite: the transform leaves it out.
    """
    axis, entries = mesh.axis_names[0], optax.tree.size(model[1])
    mean, replicas = gravac.Comm(axis).mean, mesh.shape[axis]
    runs = {
        "launch": program(mesh, lambda x: x + 1, entries=1),
        "small all-reduce": program(mesh, mean, entries=1),
        "large all-reduce": program(mesh, mean, entries),
        **train_steps(mesh, model, send),
    }
    dense = _network.mean_traffic(entries, replicas)
    sent = {"dense": dense.wire_bytes}
    for name in map(repr, send):
        info = optax.tree.get(runs[name](), "StepInfo")
        if not info.is_finite:
            raise ValueError("the gradient of --loss is not finite, or is above 2**50")
        sent[name] = float(info.wire_bytes)
    times = in_rounds(runs, runs["small all-reduce"], seconds)
    return {
        "devices": f"{mesh.size} {mesh.devices.flat[0].platform}",
        "processes": jax.process_count(),
        "params": entries,
        "axis": axis,
        "replicas": replicas,
        "rounds": len(times["dense"]),
        "network": network(times, sent, dense.messages),
        "headroom": median_range(times["dense"] / times["no exchange"]),
        "rows": compare(times, sent),
    }


def train_steps(mesh: Mesh, model: Model, send: Sequence[Encoding]) -> dict[str, Run]:
    """Compile a training step for each way to average gradients.

    All of them train on the same params. They return arrays that are ready when the
    step is done.
    """
    (axis, *fast), (loss_fn, params, batch) = mesh.axis_names, model
    fast_axes = tuple(fast) or None
    gradient = gravac.value_and_grad(loss_fn, mesh.axis_names)
    params = gravac.place(params, mesh, axis)
    rows = jax.tree.map(lambda x: np.concatenate([x] * jax.local_device_count()), batch)

    def compiled(tx: optax.GradientTransformation) -> Run:
        # So small that no loss diverges, however many steps are timed.
        tx = optax.chain(tx, optax.scale(-1e-8))

        def train_step(params: Any, state: Any, batch: Any) -> Any:
            updates, state = tx.update(gradient(params, batch)[1], state, at="shared")
            return optax.apply_updates(params, updates), state

        def run() -> Any:
            nonlocal params, state
            params, state = step(params, state, rows)
            return params, state

        # All replicas have the same batch, so their params stay equal even without an
        # exchange. JAX cannot know that.
        step = gravac.data_parallel(train_step, mesh, axis, fast_axes, check_vma=False)
        state = gravac.place(tx.init(params), mesh, axis)
        return run

    mean = lambda axes: optax.stateless(lambda grads, _: gravac.Comm(axes).mean(grads))
    ways = {"no exchange": mean(fast_axes), "dense": mean(mesh.axis_names)}
    for x in send:
        ways[repr(x)] = gravac.transform(axis, send=x, fast_axis_name=fast_axes)
    return {name: compiled(tx) for name, tx in ways.items()}


def program(mesh: Mesh, function: Callable[..., Any], entries: int) -> Run:
    """Return a program that every device runs on its own `[entries]` float32."""
    x = jnp.ones(entries, jnp.float32, device=jax.NamedSharding(mesh, jax.P()))
    same = {"mesh": mesh, "in_specs": jax.P(), "out_specs": jax.P(), "check_vma": False}
    compiled = jax.jit(jax.shard_map(function, **same))
    return lambda: compiled(x)


def in_rounds(runs: Mapping[str, Run], meet: Run, seconds: float) -> Seconds:
    """Time every program once a round until the budget is spent.

    Whatever else the machine does slows all programs alike. Each round starts with
    another one. A time is that of the slowest process.

    Args:
      runs: The programs, by name. Each returns arrays that are ready when it is done.
      meet: A short collective, after which all processes start a program together.
      seconds: The time for all rounds together. At least five rounds run.

    Returns:
      `[rounds]` float32 seconds of each program, the same on all processes.
    """

    def timed(run: Run) -> float:
        jax.block_until_ready(run())  # in training a step follows one like it
        jax.block_until_ready(meet())
        start = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - start

    for run in [*runs.values()] * WARM_UP_CALLS:
        jax.block_until_ready(run())
    names, rounds = list(runs), []
    # All processes see the same times, and so stop after the same round. A round runs
    # each program twice.
    while len(rounds) < MIN_ROUNDS or 2 * np.sum(rounds) < seconds:
        first = len(rounds) % len(names)
        taken = {x: timed(runs[x]) for x in names[first:] + names[:first]}
        own = np.array([[taken[x] for x in names]], np.float32)
        rounds.append(multihost_utils.process_allgather(own, tiled=True).max(0))
    return dict(zip(names, np.array(rounds).T, strict=True))


def compare(seconds: Seconds, sent: Mapping[str, float]) -> list[dict[str, Any]]:
    """Compare the `[rounds]` seconds of each step with those of dense steps."""
    rows = []
    for name, wire_bytes in sent.items():
        low, _, high = speed_up = median_range(seconds["dense"] / seconds[name])
        pays = "yes" if low > PAYS_FROM else "no" if high < PAYS_FROM else "too close"
        row = {"encoding": name, "wire_bytes": wire_bytes, "pays": pays}
        row |= {"step_seconds": median_range(seconds[name]), "speed_up": speed_up}
        rows.append(row)
    return rows


def network(times: Seconds, sent: dict[str, float], messages: int) -> dict[str, float]:
    """Return the arguments of `gravac.WireCost` as they were measured.

    What a compressed step takes beyond its computation, its bytes and the messages of
    an all-reduce counts as selection.

    Args:
      times: `[rounds]` seconds of the steps, and of what is timed beside them.
      sent: The bytes of each step. A dense step sends those of the large all-reduce.
      messages: How many messages of an all-reduce follow one after the other.
    """
    median = {name: float(np.median(x)) for name, x in times.items()}
    small, compute = median["small all-reduce"], median["no exchange"]
    latency = max(0.0, small - median["launch"])
    byte_seconds = max((median["large all-reduce"] - small) / sent["dense"], 1e-15)
    found = {"bytes_per_second": 1 / byte_seconds, "compute_seconds": compute}
    found["latency_seconds"] = latency / messages
    known = lambda name: compute + latency + sent[name] * byte_seconds
    others = [median[name] - known(name) for name in sent if name != "dense"]
    return found | {"selection_seconds": max(0.0, float(np.median(others)))}


def verdict(results: dict[str, Any]) -> str:
    """Return one sentence that says whether compression pays."""
    headroom, (dense, *others) = results["headroom"], results["rows"]
    most = f"without an exchange a step is {headroom} times as fast as a dense one"
    if headroom and headroom.high < PAYS_FROM:
        return f"compression will not pay here: even {most}"
    best = max(others, key=lambda x: (x["pays"] == "yes", x["speed_up"].middle))
    said = {"yes": "compression pays here", "no": "compression will not pay here"}
    answer = said.get(best["pays"], "too close to call")
    if best["pays"] == "yes" and not headroom:
        # Up to this, (compute + dense) / (compute + best) is high enough.
        seconds, best_seconds = (x["step_seconds"].middle for x in (dense, best))
        limit = (seconds - PAYS_FROM * best_seconds) / (PAYS_FROM - 1)
        answer += f" if computing a gradient takes less than {limit:.2g} s"
    thing = "a step" if headroom else "an exchange"
    answer += f": with {best['encoding']} {thing} is {best['speed_up']}"
    return f"{answer} times as fast as a dense one"


def text(results: dict[str, Any]) -> str:
    """Return what the terminal shows: network, headroom, table, verdict and notes."""
    network, headroom, rows = (results[x] for x in ("network", "headroom", "rows"))
    latency, speed = network["latency_seconds"], network["bytes_per_second"]
    said = _SUMMARY.format(1e6 * latency, speed / 1e6, **results)
    if headroom:
        own = f"{1e3 * network['compute_seconds']:.3g} ms"
        said += f"Without an exchange a step takes {own} and is {headroom}"
        said += " times as fast as a dense one\n"
    width = max(len(x["encoding"]) for x in rows)
    form = f"{{:<{width}}}  {{:>13}}  {{:>11}}  {{:>21}}  {{:>9}}".format
    title = "step ms" if headroom else "exchange ms"
    lines = [form("encoding", "MB sent", title, "speed-up (90%)", "pays")]
    for x in rows:
        sent, speed_up, pays = f"{x['wire_bytes'] / 1e6:.3g}", "1", ""
        if x is not rows[0]:
            sent += f" ({rows[0]['wire_bytes'] / x['wire_bytes']:.3g}x)"
            speed_up, pays = str(x["speed_up"]), x["pays"]
        seconds = f"{1e3 * x['step_seconds'].middle:.3g}"
        lines.append(form(x["encoding"], sent, seconds, speed_up, pays).rstrip())
    return said + "\n".join(["", *lines, "", results["verdict"], _NOTES])


def read(path: str | Path) -> gravac.WireCost:
    """Return the network that a probe measured, for a controller to start from.

    Args:
      path: The file that `python -m gravac_jax.probe --json FILE` wrote.

    Returns:
      The cost model for `gravac.transform(network=...)`. Without
      `--loss`, its `compute_seconds` is the default of `gravac.WireCost`.

    Raises:
      ValueError: If a probe did not write the file.

    Example:
      >>> import json, pathlib, tempfile
      >>> from gravac_jax import probe
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "probe.json"
      >>> _ = path.write_text(json.dumps({"network": {"latency_seconds": 0.001}}))
      >>> probe.read(path).latency_seconds
      0.001
    """
    try:
        return gravac.WireCost(**json.loads(Path(path).read_text())["network"])
    except (KeyError, TypeError, ValueError) as error:
        why = f"{path} is not what the probe writes: {error}. Give it --json FILE."
        raise ValueError(why) from None


if __name__ == "__main__":
    main()
