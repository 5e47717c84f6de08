"""The methods that benchmarks compare, by name: each one an Optax transformation.

`dense` is the float32 mean, `default` is `gravac.transform()` as it comes, and
`fixed10` the static factor 10; any factor will do.
"""

import re

import optax

import gravac_jax as gravac

METHODS = {
    "dense": lambda: gravac.transform(controller=gravac.Fixed(factor=1)),
    "default": gravac.transform,
}


def method(name: str) -> optax.GradientTransformationExtraArgs:
    """The transformation of that name.

    Raises:
      SystemExit: for a name that is none.
    """
    if name in METHODS:
        return METHODS[name]()
    if match := re.fullmatch(r"fixed(\d+(?:\.\d+)?)", name):
        return gravac.transform(controller=gravac.Fixed(factor=float(match[1])))
    known = ", ".join([*METHODS, "fixed<factor>"])
    raise SystemExit(f"no method is called {name!r}; there are: {known}")
