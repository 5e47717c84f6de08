"""Tells whether gradient compression will pay, before you change your code.

    python -m gravac_jax probe --params 66e6

times training steps on the devices it runs on: dense ones, and one kind for each
encoding, such as `Bits(2)`. The gradient has the given number of entries and costs
nothing to compute. To time your own computation too, give it your loss,
`--loss package.module:function`: a function without arguments that returns
`(loss_fn, params, batch)`, with the batch of one replica. With `--headroom` the probe
times only dense steps and steps without an exchange. Their ratio is the most that any
compression can win. To time other encodings, write them as in Python:

    python -m gravac_jax probe --params 66e6 --send "Bits(1, turns=4)" "TopK(30)"

On a cluster, start the probe as you start your training script:

    srun python -m gravac_jax.launch -m gravac_jax probe --loss package.module:function

`--json FILE` writes all results to a file. A controller can start from the network
that the probe measured:

    from gravac_jax import probe
    gravac.transform(network=probe.read(FILE))

Steps run as users run them, through `gravac.data_parallel` and `gravac.transform`. They
compress over the first axis of the mesh and average dense over the others.
"""

import argparse
import ast
import functools
import json
import math
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.flatten_util import ravel_pytree

import gravac_jax as gravac
from gravac_jax import _network
from gravac_jax._encodings import ENCODINGS, Bits, Dense, Encoding, LowRank, TopK
from gravac_jax._encodings.ladder import Ladder
from gravac_jax._network import Traffic

__all__ = ["main", "read"]

SEND = Bits(8), Bits(2), Bits(1), TopK(100), TopK(1000), LowRank(4), Dense("bfloat16")
MIN_PARAMS = 16_384  # smaller models gain nothing
MIN_ROUNDS = 5  # the fewest samples that give a 90% confidence interval
WARM_UP_CALLS = 2  # the first call compiles, and sometimes the second

# A compressed step teaches less than a dense one, so it has to be faster by more than
# this. The figure is arbitrary.
MIN_SPEED_UP = 1.05
_NOTES = f"""
- Ranges: 90% confidence intervals of the median, the timing noise of this run.
- In brackets: how many times fewer bytes than a dense step sends.
- A step pays if it is over {MIN_SPEED_UP:g} times as fast as a dense one.
- A compressed step teaches less. Only training can show how much less.
"""
_NO_NETWORK = "- CPU devices of one process have no network between them.\n"

# The loss of one replica, `loss_fn(params, batch)`, its params, and its batch, of
# arrays with examples along their first axis.
Model = tuple[Callable[[Any, Any], jax.Array], Any, Any]
Run = Callable[[], Any]
Compile = Callable[[optax.GradientTransformation], Run]
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
    if options.headroom and not options.loss:
        parser.error("--headroom needs a computation to compare with: give --loss")
    if not options.loss and options.params < MIN_PARAMS:
        parser.error(f"--params must be {MIN_PARAMS} or more: less is too small")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: there is no directory for this file")
    mesh = _mesh(parser, options.mesh or {"data": jax.device_count()})
    model = _load(parser, options.loss) if options.loss else stand_in(options.params)
    is_first = jax.process_index() == 0
    if is_first:
        sys.stderr.write(f"compiling, then timing for {options.seconds:g} s or more\n")
    send = [] if options.headroom else dict.fromkeys(options.send)
    results = measure(mesh, model, send, options.seconds)
    if not options.loss:  # the time of a stand-in's computation means nothing
        del results["wire"]["compute_seconds"]
        results["headroom"] = None
    results["verdict"] = verdict(results)
    if is_first:
        sys.stdout.write(text(results))
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gravac_jax probe",
        description="Tell whether gradient compression will pay on these devices.",
        allow_abbrev=False,
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--params", type=float, help="number of params, such as 66e6")
    help = "MODULE:FUNCTION without arguments that returns (loss_fn, params, batch)"
    model.add_argument("--loss", help=help)
    add = parser.add_argument
    add("--headroom", action="store_true", help="only time dense steps; needs --loss")
    quoted = " ".join(f"'{x}'" for x in SEND)
    help = f"encodings to time, written as in Python; default: {quoted}"
    add("--send", nargs="+", type=encoding, default=SEND, metavar="X", help=help)
    help = "the mesh, compressed over its first axis; default: one axis"
    add("--mesh", type=mesh_axes, metavar="AXIS=SIZE,...", help=help)
    add("--seconds", type=float, default=30.0, help="time to spend; default: 30")
    add("--json", type=Path, metavar="FILE", help="file to write all results to")
    return parser


def encoding(text: str) -> Encoding:
    """Parse an encoding as one writes it, such as `Bits(1, turns=4)`; runs no code."""
    kinds = {kind.__name__: kind for kind in ENCODINGS}
    reason = f"the encodings are {', '.join(kinds)}"
    try:
        match ast.parse(text, mode="eval").body:
            case ast.Call(ast.Name(name), values, named) if name in kinds:
                options = {str(x.arg): ast.literal_eval(x.value) for x in named}
                return kinds[name](*map(ast.literal_eval, values), **options)
    except (SyntaxError, TypeError, ValueError) as error:
        reason = str(error)
    raise argparse.ArgumentTypeError(
        f"must be encodings such as 'Bits(2)' 'TopK(100)', got {text!r} ({reason})"
    )


def mesh_axes(text: str) -> dict[str, int]:
    """Parse `AXIS=SIZE,...`; argparse shows this function's name in its error."""
    return {name: int(size) for name, size in (x.split("=") for x in text.split(","))}


def _mesh(parser: argparse.ArgumentParser, axes: dict[str, int]) -> jax.sharding.Mesh:
    devices, sizes = jax.device_count(), tuple(axes.values())
    if math.prod(sizes) != devices or sizes[0] < 2:
        parser.error(
            f"the mesh {axes} must have all {devices} devices, and at least 2 along its"
            " first axis. Run the probe where you train, or in two processes, as"
            " python -m gravac_jax.launch -n 2 -m gravac_jax probe."
        )
    return jax.sharding.Mesh(gravac.make_mesh().devices.reshape(sizes), tuple(axes))


def _load(parser: argparse.ArgumentParser, name: str) -> Model:
    must = "--loss must name a function without arguments, as package.module:loss"
    try:
        make = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        parser.error(f"{must}, got {name} ({error})")
    match make():  # outside the `try`: users see their own errors as they are
        case loss_fn, params, batch:
            return loss_fn, params, batch
        case other:
            must += " that returns (loss_fn, params, batch)"
            parser.error(f"{must}, got {name}, which returns {other!r:.80}")


def stand_in(params: float) -> Model:
    """Return a model of about `params` params whose gradient costs no computation.

    The gradient equals the params, which are drawn with the heavy tails of gradients,
    as square matrices of at most 1024 rows.
    """
    count = math.ceil(params / 1024**2)
    side = math.isqrt(int(params) // count)
    draw = lambda key: 1e-3 * jax.random.normal(key, (side, side)) ** 3
    matrices = [draw(key) for key in jax.random.split(jax.random.key(0), count)]
    loss_fn = lambda params, batch: optax.tree.norm(params, squared=True) / 2
    return loss_fn, matrices, np.zeros(1)


class Range(NamedTuple):
    """A median and its 90% confidence interval."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f} to {self.high:.2f})"

    @property
    def pays(self) -> str:
        """Whether a step with this speed-up is fast enough."""
        if self.low > MIN_SPEED_UP:
            return "yes"
        return "no" if self.high < MIN_SPEED_UP else "too close"


def median_range(samples: np.ndarray) -> Range:
    """Return the median of `[n]` samples and its 90% confidence interval.

    Each sample lies below the true median with probability 1/2, so the number of
    samples below it is binomial, whatever their distribution. The interval lies between
    two of the sorted samples; for five samples these are the smallest and the largest.

    Example:
      >>> print(median_range(np.array([3.0, 1.0, 2.0, 5.0, 4.0])))
      3.00 (1.00 to 5.00)
    """
    n = len(samples)
    tails = np.cumsum([math.comb(n, i) for i in range(n)]) / 2**n
    cut = max(0, int(np.sum(tails <= 0.05)) - 1)
    ordered = np.sort(samples)
    low, middle, high = ordered[cut], np.median(samples), ordered[n - 1 - cut]
    return Range(float(low), float(middle), float(high))


def measure(
    mesh: jax.sharding.Mesh, model: Model, send: Iterable[Encoding], seconds: float
) -> dict[str, Any]:
    """Compile all steps, time them, and compare them with dense ones.

    Args:
      mesh: The mesh to train on. Steps compress over its first axis.
      model: The model to train.
      send: The encodings, each once. Without any, only dense steps and steps without an
        exchange are timed.
      seconds: How long to time. Compiling comes on top.

    Returns:
      The results, as `--json` writes them, the same on all processes, but for the
      verdict. `wire` has arguments of `gravac.WireCost`. `headroom` is the speed-up of
      a step that sends nothing, the most that compression can win. The first of `rows`
      is dense.
    """
    (axis, *fast), params = mesh.axis_names, model[1]
    entries, replicas = optax.tree.size(params), mesh.shape[axis]
    mean = lambda x: jax.lax.pmean(x, axis)
    compile = compiler(mesh, model)
    runs = {
        "launch": program(mesh, lambda x: x + 1, entries=1),
        "small all-reduce": program(mesh, mean, entries=1),
        "large all-reduce": program(mesh, mean, entries),
        "no exchange": compile(dense_mean(fast)),
        "dense": compile(dense_mean(mesh.axis_names)),
    }
    sent = {"dense": _network.mean_traffic(entries, replicas)}
    for x in send:
        runs[repr(x)], sent[repr(x)] = compressed(x, mesh, params, compile)
    meet = program(mesh, lambda x: jax.lax.pmean(x, mesh.axis_names), entries=1)
    times = in_rounds(runs, meet, seconds)
    wire = network(times, sent)
    return {
        "devices": f"{mesh.size} {mesh.devices.flat[0].platform}",
        "processes": jax.process_count(),
        "params": entries,
        "axis": axis,
        "replicas": replicas,
        "rounds": len(times["launch"]),
        "wire": wire,
        "headroom": median_range(times["dense"] / times["no exchange"]),
        "rows": compare(times, sent),
    }


def compressed(
    encoding: Encoding, mesh: jax.sharding.Mesh, params: Any, compile: Compile
) -> tuple[Run, Traffic]:
    """Return a step that sends an encoding, and what it sends over the first axis.

    Raises:
      ValueError: If the gradient is not finite: the transform leaves it out.
    """
    axis, *fast = mesh.axis_names
    tx = gravac.transform(axis, send=encoding, fast_axis_name=tuple(fast) or None)
    run = compile(tx)
    info = optax.tree.get(run(), "StepInfo")
    if not info.is_finite:
        raise ValueError(
            "the gradient of --loss has entries that are not finite, or above"
            " 2**50. Return params and a batch that training works with."
        )
    shapes = sorted((x.shape for x in jax.tree.leaves(params)), key=math.prod)
    bucket = gravac.Bucket(optax.tree.size(params), tuple(shapes))
    replicas, figures = mesh.shape[axis], 0 if fast else 1
    sent = Ladder((encoding,), bucket).traffic(0, figures, replicas)
    if fast:  # the figures have an all-reduce of their own
        sent = sent.plus(_network.mean_traffic(1, replicas))
    return run, sent._replace(wire_bytes=float(info.wire_bytes))


def compiler(mesh: jax.sharding.Mesh, model: Model) -> Compile:
    """Return a function that compiles a training step whose gradients `tx` averages.

    The step that it returns trains on the same params as all others. It returns arrays
    that are ready when the step is done.
    """
    (axis, *fast), (loss_fn, params, batch) = mesh.axis_names, model
    gradient = gravac.value_and_grad(loss_fn, mesh.axis_names)
    params = gravac.place(params, mesh, axis)
    repeat = lambda x: np.concatenate([np.asarray(x)] * jax.local_device_count())
    batch = jax.tree.map(repeat, batch)

    def compile(tx: optax.GradientTransformation) -> Run:
        # So small that no loss diverges, however many steps are timed.
        tx = optax.chain(tx, optax.scale(-1e-8))

        def train_step(params: Any, state: Any, batch: Any) -> Any:
            updates, state = tx.update(gradient(params, batch)[1], state)
            return optax.apply_updates(params, updates), state

        def run() -> Any:
            nonlocal params, state
            params, state = step(params, state, batch)
            return params, state

        # All replicas have the same batch, so their params stay equal even without an
        # exchange. JAX cannot know that.
        fast_axes = tuple(fast) or None
        step = gravac.data_parallel(train_step, mesh, axis, fast_axes, check_vma=False)
        state = gravac.place(tx.init(params), mesh, axis)
        return run

    return compile


def dense_mean(axes: Sequence[str]) -> optax.GradientTransformation:
    """Return what averages float32 gradients in one all-reduce, if there are axes."""

    def mean(grads: Any, _: Any) -> Any:
        flat, unravel = ravel_pytree(optax.tree.cast(grads, jnp.float32))
        return unravel(jax.lax.pmean(flat, tuple(axes)))

    return optax.stateless(mean) if axes else optax.identity()


def program(mesh: jax.sharding.Mesh, function: Callable[..., Any], entries: int) -> Run:
    """Return a program that every device runs on its own `[entries]` float32."""
    same = jax.P()
    x = jnp.ones(entries, jnp.float32, device=jax.NamedSharding(mesh, same))
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=same, out_specs=same, check_vma=False
    )
    return functools.partial(jax.jit(mapped), x)


def in_rounds(runs: Mapping[str, Run], meet: Run, budget_seconds: float) -> Seconds:
    """Time every program once a round until the budget is spent.

    Whatever else the machine does slows all programs alike. Each round starts with
    another one. A time is that of the slowest process.

    Args:
      runs: The programs, by name. Each returns arrays that are ready when it is done.
      meet: A short collective, after which all processes start a program together.
      budget_seconds: The time for all rounds together. At least five rounds run.

    Returns:
      `[rounds]` float32 seconds of each program, the same on all processes.
    """

    def timed(run: Run) -> float:
        jax.block_until_ready(run())  # in training a step follows one like it
        jax.block_until_ready(meet())
        start = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - start

    for run in runs.values():
        for _ in range(WARM_UP_CALLS):
            jax.block_until_ready(run())
    names, rounds, spent_seconds = list(runs), [], 0.0
    # All processes see the same times, and so stop after the same round.
    while len(rounds) < MIN_ROUNDS or spent_seconds < budget_seconds:
        first = len(rounds) % len(names)
        start = time.perf_counter()
        taken = {x: timed(runs[x]) for x in names[first:] + names[:first]}
        own = [*(taken[x] for x in names), time.perf_counter() - start]
        # A process alone gets back its own row.
        everyone = multihost_utils.process_allgather(np.array(own, np.float32))
        *slowest, round_seconds = np.atleast_2d(everyone).max(0)
        rounds.append(slowest)
        spent_seconds += round_seconds
    return dict(zip(names, np.array(rounds).T, strict=True))


def compare(seconds: Seconds, sent: Mapping[str, Traffic]) -> list[dict[str, Any]]:
    """Compare the `[rounds]` seconds of each step with those of dense steps."""
    speed_ups = {name: median_range(seconds["dense"] / seconds[name]) for name in sent}
    return [
        {
            "encoding": name,
            "wire_bytes": traffic.wire_bytes,
            "step_seconds": median_range(seconds[name]),
            "speed_up": speed_ups[name],
            "pays": speed_ups[name].pays,
        }
        for name, traffic in sent.items()
    ]


def network(seconds: Seconds, sent: Mapping[str, Traffic]) -> dict[str, float]:
    """Return the arguments of `gravac.WireCost`, as far as they were measured.

    Args:
      seconds: `[rounds]` seconds of the steps, and of what is timed beside them.
      sent: What the steps send. The first is dense, and sends as much as the large
        all-reduce. Without another one, selection is left out.
    """
    median = {name: float(np.median(x)) for name, x in seconds.items()}
    small, compute, dense = (
        median["small all-reduce"],
        median["no exchange"],
        sent["dense"],
    )
    latency = max(0.0, small - median["launch"]) / dense.messages
    byte_seconds = max((median["large all-reduce"] - small) / dense.wire_bytes, 1e-15)
    wire = {"bytes_per_second": 1 / byte_seconds, "latency_seconds": latency}
    exchange = lambda x: x.messages * latency + x.wire_bytes * byte_seconds
    others = [
        median[x] - compute - exchange(y) for x, y in sent.items() if x != "dense"
    ]
    if others:
        wire["selection_seconds"] = max(0.0, float(np.median(others)))
    return wire | {"compute_seconds": compute}


def verdict(results: dict[str, Any]) -> str:
    """Return one sentence that says whether compression pays."""
    headroom, (dense, *others) = results["headroom"], results["rows"]
    most = f"without an exchange a step is {headroom} times as fast as a dense one"
    if headroom and headroom.high < MIN_SPEED_UP:
        return f"compression will not pay here: even {most}"
    if not others:
        return f"compression may pay here: {most}, the most that can be won"
    compressed = [x for x in others if x["encoding"] != "Dense()"] or others
    best = max(compressed, key=lambda x: x["speed_up"].middle)
    said = {"yes": "compression pays here", "no": "compression will not pay here"}
    answer = said.get(best["pays"], "too close to call")
    if best["pays"] == "yes" and not headroom:
        # Up to this, (compute + dense) / (compute + best) is high enough.
        seconds, best_seconds = (x["step_seconds"].middle for x in (dense, best))
        limit = (seconds - MIN_SPEED_UP * best_seconds) / (MIN_SPEED_UP - 1)
        answer += f" if computing a gradient takes less than {limit:.2g} s"
    thing = "a step" if headroom else "an exchange"
    times = f"{thing} is {best['speed_up']} times as fast as a dense one"
    return f"{answer}: with {best['encoding']}, the fastest, {times}"


def text(results: dict[str, Any]) -> str:
    """Return what the terminal shows: network, headroom, table, verdict and notes."""
    wire, headroom, rows = results["wire"], results["headroom"], results["rows"]
    said = (
        f"{results['params']:,} params; {results['devices']} devices;"
        f" processes: {results['processes']}; rounds of timing: {results['rounds']}\n"
        f"all-reduce over {results['axis']}, {results['replicas']} replicas:"
        f" {1e6 * wire['latency_seconds']:.3g} us a message,"
        f" {wire['bytes_per_second'] / 1e6:.4g} MB/s\n"
    )
    if headroom:
        said += (
            f"Without an exchange a step takes {1e3 * wire['compute_seconds']:.3g} ms"
            f" and is {headroom} times as fast as a dense one\n"
        )
    width = max(len(x["encoding"]) for x in rows)
    form = f"{{:<{width}}}  {{:>13}}  {{:>11}}  {{:>21}}  {{:>9}}".format
    milliseconds = "step ms" if headroom else "exchange ms"
    lines = [form("encoding", "MB sent", milliseconds, "speed-up (90%)", "pays")]
    for x in rows:
        sent, speed_up, pays = f"{x['wire_bytes'] / 1e6:.3g}", "1", ""
        if x is not rows[0]:
            sent += f" ({rows[0]['wire_bytes'] / x['wire_bytes']:.3g}x)"
            speed_up, pays = str(x["speed_up"]), x["pays"]
        seconds = f"{1e3 * x['step_seconds'].middle:.3g}"
        lines.append(form(x["encoding"], sent, seconds, speed_up, pays).rstrip())
    said += "\n".join(["", *lines, "", results["verdict"], _NOTES])
    is_alone = results["processes"] == 1 and results["devices"].endswith("cpu")
    return said + _NO_NETWORK * is_alone


def read(path: str | os.PathLike[str]) -> gravac.WireCost:
    """Return the network that a probe measured, for a controller to start from.

    Args:
      path: The file that `python -m gravac_jax probe --json FILE` wrote.

    Returns:
      The cost model for `gravac.transform(network=...)`. Without
      `--loss`, its `compute_seconds` is the default of `gravac.WireCost`.

    Raises:
      ValueError: If the file cannot be read, or a probe did not write it.

    Example:
      >>> import json, pathlib, tempfile
      >>> from gravac_jax import probe
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "probe.json"
      >>> _ = path.write_text(json.dumps({"wire": {"latency_seconds": 0.001}}))
      >>> probe.read(path).latency_seconds
      0.001
    """
    try:
        return gravac.WireCost(**json.loads(Path(path).read_text())["wire"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} holds no measured network ({error!r}). Give a file that"
            " `python -m gravac_jax probe --json FILE` wrote."
        ) from None
