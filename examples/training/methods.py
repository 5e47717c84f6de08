"""The methods that programs compare, by name: what each hands to gravac.transform.

`dense` and `dense16` are means in 32 and 16 bits, `default` is what `transform()` comes
with, also called `fastest`; the steps of `fastest0.9` must each be worth 0.9 dense
ones. `gravac` (and `gravac0.9`, at that epsilon) and `accordion` are the other
controllers, and `fixed10` is the static factor 10; any factor will do. `ladder10` is
the same on the default's ladder, whose other rungs it never takes. The other families
differ from `fixed` in their compressor (`topk10`, `sampled10`, which is that of Deep
Gradient Compression, `redsync10`, `randomk10`), in their exchange (`leader10`,
`random10`, `lowrank10`, `lowrankshort10`, `leaves10` with a bucket for each leaf, and
`all10`, in which small matrices do not go dense), or in their memory: `momentum10` and
the like have momentum correction and a local clip in place of an optimizer's momentum
and a clip after the exchange, `dgc10` the paper's masking and warm-up besides (and
`dgcnomask10`, `dgcnoclip10` all of it but one part), `adam10`, `lowrankadam10` and
`lowrankshortadam10` Adam and a local clip. With `local` before the name of a family it
takes its gradients at each replica's own params, and clips before the exchange; with
`wide` before the name of an all-gather, its entries are of 8 bytes, as the papers' are,
not of 4.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import optax

import gravac_jax as gravac

ALL = gravac.Fixed(factor=1)
WIDE = "wide"
CLIP = gravac.ClipByGlobalNorm(1.0)
LOW_RANK = gravac.LowRank()
SHORT_LOW_RANK = gravac.LowRank(values=gravac.BFloat16())
WARM_UP_STEPS = 200
LADDER = gravac.Fastest.ladder
METHODS = {
    "dense": {"controller": ALL},
    "dense16": {"controller": ALL, "exchange": gravac.DenseMean16()},
    "default": {"controller": gravac.Fastest()},
    "fastest": {"controller": gravac.Fastest()},
    "fastest0.9": {"controller": gravac.Fastest(least_progress=0.9)},
    "gravac": {"controller": gravac.GraVAC()},
    "gravac0.7": {"controller": gravac.GraVAC(epsilon=0.7)},
    "gravac0.9": {"controller": gravac.GraVAC(epsilon=0.9)},
    "accordion": {"controller": gravac.Accordion(10, 100)},
}


def corrected(masking: str) -> dict[str, Any]:
    """Momentum correction: as the harness's optimizer, but before the exchange."""
    memory = gravac.Momentum(0.9, nesterov=True, masking=masking)
    return {"memory": memory, "clip": CLIP}


def dgc(factor: float) -> dict[str, Any]:
    """Deep Gradient Compression over the exchange of all others."""
    stages = (*(x for x in gravac.Scheduled.ladder if x < factor), factor)
    return corrected("literal") | {"controller": gravac.warm_up(WARM_UP_STEPS, stages)}


WARMED: dict[str, dict[str, Any]] = {
    "dgc": {},
    "dgcnomask": {"memory": gravac.Momentum(0.9, nesterov=True)},
    "dgcnoclip": {"clip": gravac.NoClip()},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "ladder": {},
    "topk": {"compressor": gravac.TopK()},
    "sampled": {"compressor": gravac.SampledTopK()},
    "redsync": {"compressor": gravac.RedSync()},
    "randomk": {"compressor": gravac.RandomK()},
    "leader": {"exchange": gravac.LeaderIndices()},
    "random": {"exchange": gravac.SharedRandomK()},
    "lowrank": {"exchange": LOW_RANK},
    "lowrankshort": {"exchange": SHORT_LOW_RANK},
    "leaves": {"bucket_bytes": 1},
    "all": {"compress": gravac.matrices(1)},
    "momentum": corrected("aged"),
    "literal": corrected("literal"),
    "unmasked": corrected("none"),
    "adam": {"memory": gravac.Adam(), "clip": CLIP},
    "lowrankadam": {"memory": gravac.Adam(), "clip": CLIP, "exchange": LOW_RANK},
    "lowrankshortadam": {
        "memory": gravac.Adam(),
        "clip": CLIP,
        "exchange": SHORT_LOW_RANK,
    },
    "precondition": {"memory": gravac.Adam(b1=0.0)},
    **WARMED,
}


def based(family: str, factor: float) -> dict[str, Any]:
    """What a family has in common with `fixed`, or with `dgc`."""
    if family in WARMED:
        return dgc(factor)
    if family == "ladder":
        return {"controller": gravac.Scheduled(lambda step: factor, LADDER)}
    return {"controller": gravac.Fixed(factor)}


def is_local(name: str) -> bool:
    """Whether a method takes its gradients at each replica's own params."""
    return name.removeprefix(WIDE).startswith("local")


def widened(chosen: dict[str, Any]) -> dict[str, Any]:
    """The same with values and indices of 32 bits."""
    compressor = chosen.get("compressor", gravac.Threshold())
    exchange = chosen.get("exchange", gravac.AllGather(compressor))
    if not isinstance(exchange, gravac.AllGather):
        raise SystemExit(
            f"{type(exchange).__name__} is no all-gather: leave out {WIDE}"
        )
    wide = {"values": gravac.Float32(), "indices": gravac.Int32()}
    rest = {name: x for name, x in chosen.items() if name != "compressor"}
    return {**rest, "exchange": dataclasses.replace(exchange, **wide)}


def arguments(name: str, beside: Iterable[str] = ()) -> dict[str, Any]:
    """The keyword arguments of the method of that name.

    Args:
      name: the method's.
      beside: what else the caller knows, to be listed with these.

    Raises:
      SystemExit: for a name that is none, a factor below 1, and `wide` before what is
        no all-gather.
    """
    if name in METHODS:
        return METHODS[name]
    if name.startswith(WIDE):
        return widened(arguments(name.removeprefix(WIDE), beside))
    whole, name = name, name.removeprefix("local")
    match = re.fullmatch(r"([a-z]+)(\d+(?:\.\d+)?)", name)
    if match and match[1] in FAMILIES:
        try:
            base = based(match[1], float(match[2]))
        except ValueError as error:
            raise SystemExit(f"{whole}: {error}") from None
        chosen = {**base, **FAMILIES[match[1]]}
        # A clip after the exchange would clip what is held back.
        return {"clip": CLIP, **chosen} if is_local(whole) else chosen
    known = dict.fromkeys(
        [*METHODS, *beside, *(f"{x}<factor>" for x in FAMILIES), f"{WIDE}<name>"]
    )
    raise SystemExit(f"no method is called {whole!r}; there are: {', '.join(known)}")


def after(
    chosen: dict[str, Any], optimizer: Any, clip: float | None
) -> tuple[optax.GradientTransformation, ...]:
    """What comes after the exchange, unless the memory has done it before.

    Args:
      chosen: the arguments of `gravac.transform`.
      optimizer: the optimizer, but for its learning rate.
      clip: the largest global norm of what is averaged; None for none.
    """
    memory = chosen.get("memory")
    if memory == gravac.Adam(b1=0.0):  # the divisor before, the mean after
        return (optax.ema(0.9),)
    if isinstance(memory, (gravac.Momentum, gravac.Adam)):
        return ()
    if clip is None or "clip" in chosen:
        return (optimizer,)
    return optax.clip_by_global_norm(clip), optimizer
