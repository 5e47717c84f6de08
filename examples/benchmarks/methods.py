"""The methods that benchmarks compare, by name: each one a controller.

`dense` is the float32 mean, `default` is what `gravac.transform()` comes with, and
`fixed10` the static factor 10; any factor will do.
"""

import re
from collections.abc import Iterable

import gravac_jax as gravac

CONTROLLERS = {
    "dense": gravac.Fixed(factor=1),
    "default": gravac.GraVAC(),
}


def controller(name: str, beside: Iterable[str] = ()) -> gravac.Fixed | gravac.GraVAC:
    """The controller of the method of that name.

    Args:
      name: the method's.
      beside: what else the caller knows, to be listed with these.

    Raises:
      SystemExit: for a name that is none, and a factor below 1.
    """
    if name in CONTROLLERS:
        return CONTROLLERS[name]
    if match := re.fullmatch(r"fixed(\d+(?:\.\d+)?)", name):
        try:
            return gravac.Fixed(factor=float(match[1]))
        except ValueError as error:
            raise SystemExit(f"{name}: {error}") from None
    known = ", ".join([*dict.fromkeys([*CONTROLLERS, *beside]), "fixed<factor>"])
    raise SystemExit(f"no method is called {name!r}; there are: {known}")
