"""Every saboteur is caught, and every law catches one.

A law that no saboteur breaks is decoration; a saboteur that no law catches is a hole.
"""

import inspect

import _examples
import _laws
import _oracles
import _saboteurs
import pytest

import gravac_jax as gravac
from gravac_jax._controllers import CONTROLLERS
from gravac_jax._encodings import ENCODINGS
from gravac_jax._memory import MEMORIES

# What the laws of each family are tried on, for an honest component.
EVIDENCE = _examples.evidence(4, seed=5, measured_from=90)
FAMILIES = {
    _laws.ENCODING_LAWS + _laws.LAWS_OF_ONE: lambda x: (_examples.buckets_for(x),),
    _laws.LADDER_LAWS: lambda x: (_examples.EXACT,),
    _laws.MEMORY_LAWS: lambda x: (_examples.GRADIENTS, _examples.IS_SENT),
    _laws.CONTROLLER_LAWS: lambda x: (EVIDENCE,),
}
ARGUMENTS = {
    "Bits": {"bits": 2, "row_entries": 32},
    "StaysAtTheFirstTurn": {"bits": 2, "turns": 3, "row_entries": 32},
    "LowRank": {"rank": 1},
    "TopK": {"factor": 7},
    "Ladder": {
        "encodings": (gravac.LowRank(1), gravac.Bits(1, row_entries=32)),
        "bucket": _laws.bucket_of(_examples.EXACT),
        "is_looked_at": True,
    },
    "Momentum": {"decay": 0.5},
    "Fastest": {"ladder": _examples.TO_ONE_BIT},
    "GraVAC": {"ladder": _examples.FOUR, "epsilon": 0.7, "window": 10},
}
CASES = [
    pytest.param(kind, law, id=f"{kind.__name__}-{law.__name__}")
    for kind, laws in _saboteurs.CAUGHT_BY.items()
    for law in laws
]


def example_of(law, honest):
    (example,) = [example for laws, example in FAMILIES.items() if law in laws]
    return example(honest)


def honest_kind(kind):
    """Return the class of the package that a saboteur comes from."""
    return next(x for x in kind.__mro__ if x.__module__.startswith("gravac_jax"))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "law"), CASES)
def test_the_law_catches_the_saboteur_and_spares_the_honest(kind, law):
    name = honest_kind(kind).__name__
    arguments = ARGUMENTS.get(kind.__name__, ARGUMENTS.get(name, {}))
    honest = honest_kind(kind)(**arguments)
    law(honest, *example_of(law, honest))
    with pytest.raises(AssertionError):
        law(kind(**arguments), *example_of(law, honest))


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
        (ENCODINGS, _oracles.ENCODINGS),
        (MEMORIES, _oracles.MEMORIES),
        (CONTROLLERS, _oracles.CONTROLLERS),
    ],
)
def test_every_member_of_a_registry_has_an_oracle(registry, table):
    assert set(registry) == set(table)
