"""The methods that benchmarks compare, by name: what each hands to gravac.transform.

`dense` and `dense16` are means in 32 and 16 bits, `default` is what `transform()` comes
with, and `fixed10` the static factor 10; any factor will do. `short10`, `leader10`,
`random10` and `lowrank10` have the factor 10 with another exchange, and `leaves10` a
bucket for each leaf.
"""

import re
from collections.abc import Iterable
from typing import Any

import gravac_jax as gravac

ALL = gravac.Fixed(factor=1)
METHODS = {
    "dense": {"controller": ALL},
    "dense16": {"controller": ALL, "exchange": gravac.DenseMean16()},
    "default": {"controller": gravac.GraVAC()},
}
EXCHANGES = {
    "fixed": gravac.AllGather(),
    "short": gravac.AllGather(values=gravac.BFloat16(), indices=gravac.UInt16()),
    "leader": gravac.LeaderIndices(),
    "random": gravac.SharedRandomK(),
    "lowrank": gravac.LowRank(),
    "leaves": gravac.AllGather(),
}


def arguments(name: str, beside: Iterable[str] = ()) -> dict[str, Any]:
    """The keyword arguments of the method of that name.

    Args:
      name: the method's.
      beside: what else the caller knows, to be listed with these.

    Raises:
      SystemExit: for a name that is none, and a factor below 1.
    """
    if name in METHODS:
        return METHODS[name]
    match = re.fullmatch(r"([a-z]+)(\d+(?:\.\d+)?)", name)
    if match and match[1] in EXCHANGES:
        try:
            fixed = gravac.Fixed(factor=float(match[2]))
        except ValueError as error:
            raise SystemExit(f"{name}: {error}") from None
        bucket_bytes = 1 if match[1] == "leaves" else None
        own = {"controller": fixed, "exchange": EXCHANGES[match[1]]}
        return {**own, "bucket_bytes": bucket_bytes}
    known = dict.fromkeys([*METHODS, *beside, *(f"{x}<factor>" for x in EXCHANGES)])
    raise SystemExit(f"no method is called {name!r}; there are: {', '.join(known)}")
