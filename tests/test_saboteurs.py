"""Every saboteur is caught, and every law catches one.

A law that no saboteur breaks is decoration; a saboteur that no law catches is a hole.
"""

import inspect

import _examples
import _laws
import _oracles
import _saboteurs
import pytest

from gravac_jax._controllers import CONTROLLERS
from gravac_jax._error_feedback import MEMORIES
from gravac_jax._exchanges import EXCHANGES
from gravac_jax._selection import COMPRESSORS

# What the laws of each family are tried on.
FAMILIES = {
    _laws.COMPRESSOR_LAWS: _examples.BUCKETS["gaussian"],
    _laws.EXCHANGE_LAWS: (_examples.EXCHANGED, _examples.LADDER),
    _laws.MEMORY_LAWS: (_examples.GRADIENTS, _examples.IS_SENT),
    _laws.CONTROLLER_LAWS: (_examples.evidence(4, seed=5, measured_from=90),),
}
ARGUMENTS = {
    "Momentum": {"decay": 0.5},
    "GraVAC": {
        "epsilon": 0.7,
        "window": 10,
        "ladder": (1, 4, 16, 64),
        "gain": "energy",
    },
}
CASES = [
    pytest.param(kind, law, id=f"{kind.__name__}-{law.__name__}")
    for kind, laws in _saboteurs.CAUGHT_BY.items()
    for law in laws
]


def example_of(law):
    (example,) = [example for laws, example in FAMILIES.items() if law in laws]
    return example


def honest_kind(kind):
    """Return the class of the package that a saboteur comes from."""
    return next(x for x in kind.__mro__ if x.__module__.startswith("gravac_jax"))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "law"), CASES)
def test_the_law_catches_the_saboteur_and_spares_the_honest(kind, law):
    honest = honest_kind(kind)
    arguments = ARGUMENTS.get(honest.__name__, {})
    law(honest(**arguments), *example_of(law))
    with pytest.raises(AssertionError):
        law(kind(**arguments), *example_of(law))


def test_every_law_catches_a_saboteur_and_says_what_it_demands():
    laws = {law for family in FAMILIES for law in family}
    assert laws == {law for laws in _saboteurs.CAUGHT_BY.values() for law in laws}
    takes_a_component = {
        function
        for _, function in inspect.getmembers(_laws, inspect.isfunction)
        if function.__annotations__.get("return", ...) is None
        and not function.__name__.startswith("assert_")
    }
    assert laws == takes_a_component
    assert all(law.__doc__.count("\n") == 0 for law in laws)


@pytest.mark.parametrize(
    ("registry", "table"),
    [
        (COMPRESSORS, _oracles.COMPRESSORS),
        (EXCHANGES, _oracles.EXCHANGES),
        (MEMORIES, _oracles.MEMORIES),
        (CONTROLLERS, _oracles.CONTROLLERS),
    ],
)
def test_every_member_of_a_registry_has_an_oracle(registry, table):
    assert set(registry) == set(table)
