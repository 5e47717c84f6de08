"""The methods that programs compare, by name: the arguments of `gravac.transform`.

`dense` and `dense16` are means in float32 and bfloat16. `defaultgradients` is
`transform()` as it comes, which chooses among 8, 4 and 2 bits and, at own params, one
bit in up to 8 turns; `defaultadam`, `defaultsgd` and `defaultmuon` choose for steps of
these optimizers among widths and up to 16 turns of two bits, and `default256` does so
for gradients. `default` ends at 2 turns, as `transform()` did until 2026-11-27.
`mixed` chooses among widths and sparse factors. The steps of `fastest0.9` must each be
worth 0.9 dense steps. `sparse` has the same controller over sparse factors, which was
the default in records before 2026-11-24.
`gravac` (and `gravac0.9`, at that epsilon) and `accordion` are the other controllers.
`fixed10` sends a tenth of the entries; any factor will do.

Other families differ from `fixed`, in one part each:

- in their compressor: `topk10`, `sampled10` (Deep Gradient Compression's), `redsync10`,
  `randomk10`;
- in their exchange: `leader10`, `random10`, `lowrank10`, `lowrankshort10` with bfloat16
  values; `quantized32` with one bit an entry, and `allreduced32` with one bit in both
  stages of an all-reduce, `allreducedfour32` with four in the second, and
  `allreducedlarge32` of matrices of 16,384 entries or more; `rows32` with the largest
  128 of each 4,096 entries in 14 bits each;
- in their memory: `momentum10` has momentum correction and a local clip in place of an
  optimizer's momentum and a clip after the exchange, `literal10` the paper's masking
  besides, `dgc10` masking and warm-up.

`adam`, `sgd` and `muon` after the name of an exchange let each replica run that
optimizer, and exchange its steps: `quantizedadam32`, `lowrankadam12.5`, and of selected
entries `adam10`. They clip before the memory.

`local` before any of these names takes gradients at each replica's own params, and
clips before the exchange; so does `delayed`, whose exchange is one step late, and
`every8`, which exchanges in every eighth step: `every8allreducedadam16`. Rounds of
`every4until400then13` are longer from step 400 on, and so with more stages. `turns8`
before a method of few bits sends an eighth of the entries in each step, in turn, and
`delayedturns8` one step late; `every4turns8` sends one at the end of each round. `wide`
before the name of an all-gather gives it entries of 8 bytes, as the papers have, in
place of 4.

`diloco30` is DiLoCo as published, in rounds of 30 steps, `diloco30momentum0.6` has
another momentum of its outer optimizer, and `sparseloco15x32` is SparseLoCo with one of
32 entries; `onebitadam200` is 1-bit Adam with 200 dense steps first. They are whole
optimizers: see `recipe`. So is `inside` before the name of a method of steps, which are
then scaled by the learning rate at which they are made.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import optax

import gravac_jax as gravac
from training.one_bit_adam import ONE_BIT, one_bit_adam

WIDE = "wide"
LOCAL = "local"
INSIDE = "inside"
DELAYED = "delayed"
EVERY = "every"
TURNS = rf"({DELAYED})?turns(\d+)"
ROUNDS = rf"{EVERY}((?:\d+until\d+then)*\d+)"
WIDTHS = {
    "1": "whole",
    "4": "in eight bits",
    "8": "in four bits",
    "16": "in two bits",
    "32": "in one bit",
}
FEW_BITS = ("quantized", "allreduced")
# What a reader calls a method as it stands, and one before its factor.
PLAIN = {
    "dense": "dense, float32",
    "dense16": "dense, bfloat16",
    "densehalf": "dense, float16",
    "localfixed1": "dense, float32, clipped on each replica",
    "default": "the default",
    "default256": "Fastest, up to 16 turns",
    "defaultgradients": "the default, up to one bit in 8 turns",
    "defaultadam": "Fastest, AdamW's steps",
    "defaultsgd": "Fastest, SGD's steps",
    "defaultmuon": "Fastest, Muon's steps",
    "mixed": "Fastest, few bits and sparse factors",
    "sparse": "Fastest, sparse factors",
    "fastest0.9": "Fastest, progress 0.9",
    "gravac": "GraVAC",
    "accordion": "Accordion(10, 100)",
}
WORDS = {
    "": "",
    "gravac": "GraVAC",
    "fixed": "sparse",
    "short": "sparse, 4 bytes an entry",  # of records before 2026-11-22
    "topk": "exact top-k",
    "sampled": "sampled top-k",
    "redsync": "RedSync",
    "randomk": "random-k",
    "leader": "leader's indices",
    "random": "shared random-k",
    "rows": "largest of each row",
    "lowrank": "low rank",
    "lowrankshort": "low rank, bfloat16",
    "quantized": ", gathered",
    "allreduced": "",
    "allreducedfour": ", their mean in four",
    "allreducedlarge": ", small leaves dense",
    "momentum": "momentum before",
    "literal": "momentum before, masked",
    "dgc": "Deep Gradient Compression",
}
PREFIXES = re.compile(rf"({WIDE})?({TURNS}|{LOCAL}|{DELAYED}|{ROUNDS})?(.*)")
DILOCO = re.compile(r"diloco(\d+)(?:momentum(0?\.\d+))?")
SPARSE_LOCO = re.compile(r"sparseloco(\d+)x(\d+)")
ONE_BIT_ADAM = re.compile(r"onebitadam(\d+)")
OWNERS = {"adam": "AdamW's", "sgd": "SGD's", "muon": "Muon's"}
NUMBERED = re.compile(rf"([a-z]*?)({'|'.join(OWNERS)})?(\d+(?:\.\d+)?)")
CLIP = gravac.ClipByGlobalNorm(1.0)
SHORT_LOW_RANK = gravac.LowRank(values="bfloat16")
WARM_UP_STEPS = 200
DENSE = gravac.Fixed(factor=1)
UP_TO_256 = gravac.geometric(4, 256)
METHODS: dict[str, dict[str, Any]] = {
    "dense": {"controller": DENSE},
    "dense16": {"controller": DENSE, "exchange": gravac.DenseMean("bfloat16")},
    "default": {"controller": gravac.Fastest()},
    "default256": {
        "exchange": gravac.QuantizedAllReduce(),
        "controller": gravac.Fastest(UP_TO_256),
    },
    "defaultgradients": {
        "exchange": ONE_BIT,
        "controller": gravac.Fastest(UP_TO_256, largest_at_shared=16),
    },
    "mixed": {
        "exchange": gravac.Mixed(),
        "controller": gravac.Fastest((1.0, 4.0, 8.0, 16.0, 32.0, 100.0, 1000.0)),
    },
    "sparse": {"controller": gravac.Fastest(gravac.geometric(10, 1000))},
    "fastest0.9": {"controller": gravac.Fastest(least_progress=0.9)},
    "gravac": {"controller": gravac.GraVAC()},
    "gravac0.7": {"controller": gravac.GraVAC(epsilon=0.7)},
    "gravac0.9": {"controller": gravac.GraVAC(epsilon=0.9)},
    "accordion": {"controller": gravac.Accordion(10, 100)},
}
SPARSE = {"compressor": gravac.Threshold()}
MOMENTUM = {"memory": gravac.Momentum(0.9, nesterov=True), "clip": CLIP, **SPARSE}
MASKED = MOMENTUM | {"memory": gravac.Momentum(0.9, nesterov=True, masking=True)}
OPTIMIZERS = {
    "adam": optax.scale_by_adam(),
    "sgd": optax.trace(0.9, nesterov=True),
    # What is no matrix takes steps of Adam, at a fifth of the learning rate.
    "muon": optax.chain(
        optax.contrib.muon(1.0, adam_learning_rate=0.2), optax.scale(-1.0)
    ),
}
MEMORIES = {
    name: gravac.Steps(optimizer, by_leaf=name == "muon")
    for name, optimizer in OPTIMIZERS.items()
}
METHODS |= {
    f"default{name}": {
        "memory": memory,
        "clip": CLIP,
        "controller": gravac.Fastest(UP_TO_256),
    }
    for name, memory in MEMORIES.items()
}
EXCHANGES: dict[str, dict[str, Any]] = {
    "leader": {"exchange": gravac.LeaderIndices()},
    "random": {"exchange": gravac.SharedRandomK()},
    "lowrankshort": {"exchange": SHORT_LOW_RANK},
    "quantized": {"exchange": gravac.Quantized(least_bits=1)},
    "allreduced": {"exchange": ONE_BIT},
    "allreducedfour": {"exchange": dataclasses.replace(ONE_BIT, mean_bits=4)},
    "allreducedlarge": {"exchange": ONE_BIT, "compress": gravac.matrices()},
    "rows": {"exchange": gravac.QuantizedTopK()},
}
STEPS = {
    exchange + name: {"memory": memory, "clip": CLIP, **chosen}
    for name, memory in MEMORIES.items()
    for exchange, chosen in {
        "": SPARSE,
        "lowrank": {"exchange": SHORT_LOW_RANK},
        **EXCHANGES,
    }.items()
}
FAMILIES: dict[str, dict[str, Any]] = {
    "fixed": SPARSE,
    "topk": {"compressor": gravac.TopK()},
    "sampled": {"compressor": gravac.SampledTopK()},
    "redsync": {"compressor": gravac.RedSync()},
    "randomk": {"compressor": gravac.RandomK()},
    "lowrank": {"exchange": gravac.LowRank()},
    **EXCHANGES,
    "momentum": MOMENTUM,
    "literal": MASKED,
    "dgc": MASKED,
    **STEPS,
}


def is_local(name: str) -> bool:
    """Return whether a method takes gradients at each replica's own params."""
    _, how, *_ = PREFIXES.fullmatch(name).groups()  # type: ignore[union-attr]
    is_whole = is_recipe(name) and not ONE_BIT_ADAM.fullmatch(name)
    return is_whole or how is not None


def in_words(name: str) -> str:
    """Return what a reader calls a method; a name that is no method's stays."""
    if name in PLAIN:
        return PLAIN[name]
    if name.startswith(INSIDE):
        inner = name.removeprefix(INSIDE)
        # A recipe takes gradients at own params, also without `local` in its name.
        at_own = inner if is_local(inner) else LOCAL + inner
        return f"{in_words(at_own)}, learning rate inside"
    if published := _published_in_words(name):
        return published
    if both := re.fullmatch(rf"{ROUNDS}({TURNS}.*)", name):
        return ", ".join([in_words(both[2]), *_prefix_in_words(name[: both.start(2)])])
    matched = PREFIXES.fullmatch(name)
    wide, how, *_, rest = matched.groups()  # type: ignore[union-attr]
    what = PLAIN.get(rest) or _of_family(rest)
    if what is None:
        return name
    said = [what, *_prefix_in_words(how or "")]
    is_of_steps = "'s steps" in what
    if how == LOCAL and not is_of_steps:
        said.append("own params")
    elif not how and " in " in what and rest.startswith(FEW_BITS):
        said.append("shared params")
    return ", ".join([*said, *(["8 bytes an entry"] if wide else [])])


def _published_in_words(name: str) -> str | None:
    """Return what a reader calls a published method; None for others."""
    if match := DILOCO.fullmatch(name):
        said = f"DiLoCo, every {match[1]} steps"
        return f"{said}, momentum {match[2]}" if match[2] else said
    if match := SPARSE_LOCO.fullmatch(name):
        return "SparseLoCo, every {} steps, factor {}".format(*match.groups())
    if match := ONE_BIT_ADAM.fullmatch(name):
        return f"1-bit Adam, the first {match[1]} steps dense"
    return None


def _prefix_in_words(how: str) -> list[str]:
    """Return what a prefix of a name says, if it is not that params are own."""
    late = ["one step late"] if how.startswith(DELAYED) else []
    if turns := re.fullmatch(TURNS, how):
        return [f"in {turns[2]} turns", *late]
    if how.startswith(EVERY):
        (_, first), *later = _stages(how)
        if len(later) > 1:
            return [f"every {first} to {later[-1][1]} steps"]
        after = [f"from step {start} every {steps}" for start, steps in later]
        return [f"every {first} steps", *after]
    return late


def _of_family(name: str) -> str | None:
    """Return what a reader calls a method with a factor; None for other names."""
    match = NUMBERED.fullmatch(name)
    if not match or match[1] not in WORDS:
        return None
    what, optimizer, factor = WORDS[match[1]], match[2], match[3]
    subject = f"{OWNERS[optimizer]} steps" if optimizer else None
    if match[1].startswith(FEW_BITS):
        width = WIDTHS.get(factor)
        return width and f"{subject or 'gradients'} {width}{what}"
    if subject and factor == "1":
        return f"{subject} whole"
    what = what or "sparse"
    number = f"{'epsilon' if match[1] == 'gravac' else 'factor'} {factor}"
    return f"{subject}, {what}, {number}" if subject else f"{what}, {number}"


def arguments(name: str, beside: Iterable[str] = ()) -> dict[str, Any]:
    """Return the keyword arguments of the method of that name.

    Args:
      name: The method's name.
      beside: Names that the caller knows besides, for the message of an error.

    Raises:
      SystemExit: For an unknown name, a factor below 1, and `wide` before a method that
        is no all-gather.
    """
    if name in METHODS:
        return METHODS[name]
    if (prefixed := _prefixed(name, beside)) is not None:
        return prefixed
    match = re.fullmatch(r"([a-z]+)(\d+(?:\.\d+)?)", name.removeprefix(LOCAL))
    if not match or match[1] not in FAMILIES:
        families = [f"{x}<factor>" for x in FAMILIES]
        known = ", ".join([*METHODS, *beside, *families, f"{WIDE}<name>"])
        raise SystemExit(f"no method is called {name!r}; there are: {known}")
    try:
        controller = _controller(match[1], float(match[2]))
    except ValueError as error:
        raise SystemExit(f"{name}: {error}") from None
    chosen = {"controller": controller, **FAMILIES[match[1]]}
    # A clip after the exchange would clip what is held back.
    return {"clip": CLIP, **chosen} if is_local(name) else chosen


def _prefixed(name: str, beside: Iterable[str]) -> dict[str, Any] | None:
    """Return the arguments of a method whose name has a prefix; None for others."""
    if name.removeprefix(LOCAL) in METHODS:
        return {"clip": CLIP, **METHODS[name.removeprefix(LOCAL)]}
    if name.startswith(WIDE):
        return _widened(arguments(name.removeprefix(WIDE), beside))
    if rounds := re.fullmatch(rf"{ROUNDS}([a-z].*)", name):
        chosen = arguments(_at_own_params(rounds[2]), beside)
        controller = gravac.Every(_lengths(rounds[1]), chosen["controller"])
        return {**chosen, "controller": controller}
    if turns := re.fullmatch(rf"{TURNS}([a-z].*)", name):
        chosen = arguments((turns[1] or LOCAL) + turns[3], beside)
        return _in_turn(int(turns[2]), name, chosen)
    if name.startswith(DELAYED):
        return {"delay": 1, **arguments(LOCAL + name.removeprefix(DELAYED), beside)}
    return None


def is_recipe(name: str) -> bool:
    """Return whether a method runs whole optimizers, as published ones do.

    Raises:
      SystemExit: If `inside` stands before what is no method of steps.
    """
    if name.startswith(INSIDE):
        memory = arguments(name.removeprefix(INSIDE)).get("memory")
        if not isinstance(memory, gravac.Steps):
            raise SystemExit(f"{name}: {INSIDE} goes before a method of steps only")
        return True
    return any(x.fullmatch(name) for x in (DILOCO, SPARSE_LOCO, ONE_BIT_ADAM))


def in_rounds(name: str) -> tuple[int, str] | None:
    """Return the steps of a method's rounds, and whose exchange ends one.

    None for methods that exchange in every step, and for rounds that grow longer.
    """
    if match := DILOCO.fullmatch(name):
        return int(match[1]), "dense"
    match = re.fullmatch(rf"{EVERY}(\d+)([a-z].*)", name)
    return (int(match[1]), _at_own_params(match[2])) if match else None


def _at_own_params(name: str) -> str:
    """Return the name of a method at own params; turns imply them."""
    return name if re.match(TURNS, name) else LOCAL + name


def recipe(
    name: str,
    optimizer: optax.GradientTransformation,
    scale: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Return a method that is a whole optimizer.

    Args:
      name: One of `diloco<steps>`, `diloco<steps>momentum<momentum>`,
        `sparseloco<steps>x<factor>` and `inside<name>` of a method of steps, all around
        each replica's own optimizer; or `onebitadam<warm-up steps>`, which has its own.
      optimizer: The optimizer, but for its learning rate.
      scale: The learning rate.
    """
    if match := ONE_BIT_ADAM.fullmatch(name):
        return optax.chain(one_bit_adam(int(match[1]), CLIP.max_norm), scale)
    inner = optax.chain(optimizer, scale)
    if name.startswith(INSIDE):
        chosen = arguments(name.removeprefix(INSIDE))
        memory = dataclasses.replace(chosen["memory"], optimizer=inner)
        return gravac.transform(**{**chosen, "memory": memory})
    if match := SPARSE_LOCO.fullmatch(name):
        steps, factor = map(int, match.groups())
        return gravac.sparse_loco(inner, steps, factor=factor, clip=CLIP)
    steps, momentum = DILOCO.fullmatch(name).groups("0.9")  # type: ignore[union-attr]
    outer = optax.sgd(0.7, float(momentum), nesterov=True)
    return gravac.diloco(inner, int(steps), outer=outer, clip=CLIP)


def _stages(rounds: str) -> list[tuple[int, int]]:
    """Return the first step of each stage, and the steps of its rounds."""
    first, *numbers = map(int, re.findall(r"\d+", rounds))
    return [(0, first), *zip(numbers[::2], numbers[1::2], strict=True)]


def _lengths(rounds: str) -> Any:
    """Return the steps of a round, or a function from the step to them."""
    starts, steps = zip(*_stages(rounds), strict=True)
    if len(steps) == 1:
        return steps[0]
    at = lambda step: jnp.searchsorted(jnp.asarray(starts), step, side="right") - 1
    return lambda step: jnp.asarray(steps)[at(step)]


def _controller(family: str, factor: float) -> gravac.Controller:
    if family != "dgc":
        return gravac.Fixed(factor)
    stages = (*(x for x in gravac.Scheduled.ladder if x < factor), factor)
    return gravac.warm_up(WARM_UP_STEPS, stages)


def _in_turn(turns: int, name: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return a method of few bits with parts that are sent in turn."""
    exchange, controller = chosen.get("exchange"), chosen["controller"]
    is_fixed = isinstance(controller, gravac.Fixed) and controller.factor > 1
    if not isinstance(exchange, gravac.Quantized) or not is_fixed:
        raise SystemExit(f"{name!r} is none of the methods of few bits: allreduced16")
    exchange = dataclasses.replace(
        exchange, least_bits=exchange.bits(controller.factor)
    )
    controller = gravac.Fixed(turns * controller.factor)
    return {**chosen, "exchange": exchange, "controller": controller}


def _widened(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the same with values and indices of 32 bits."""
    compressor = chosen.get("compressor", gravac.Threshold())
    exchange = chosen.get("exchange", gravac.AllGather(compressor))
    if not isinstance(exchange, gravac.AllGather):
        raise SystemExit(
            f"{type(exchange).__name__} is no all-gather: leave out {WIDE}"
        )
    exchange = dataclasses.replace(exchange, values="float32", indices="int32")
    rest = {name: x for name, x in chosen.items() if name != "compressor"}
    return {**rest, "exchange": exchange}


def after(
    chosen: dict[str, Any], optimizer: Any, clip: float | None
) -> tuple[optax.GradientTransformation, ...]:
    """Return what comes after the exchange, unless the memory has done it before.

    Args:
      chosen: The arguments of `gravac.transform`.
      optimizer: The optimizer, but for its learning rate.
      clip: The largest global norm of the averaged gradient; None for no clip.
    """
    if isinstance(chosen.get("memory"), gravac.Momentum | gravac.Steps):
        return ()
    if clip is None or "clip" in chosen:
        return (optimizer,)
    return optax.clip_by_global_norm(clip), optimizer
