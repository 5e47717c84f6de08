"""Every saboteur is caught, and every law catches one.

A law that no saboteur breaks is decoration; a saboteur that no law catches is a hole.
"""

import _examples
import _laws
import _oracles
import _saboteurs
import pytest

import gravac_jax as gravac

# What the laws of each family are tried on, for an honest component.
EVIDENCE = _examples.evidence(4, seed=5, measured_from=90)
BY_FAMILY = {
    _laws.ENCODING_LAWS + _laws.LAWS_OF_ONE: lambda x: (_examples.buckets_for(x),),
    _laws.LADDER_LAWS: lambda x: (_examples.EXACT,),
    _laws.MEMORY_LAWS: lambda x: (_examples.GRADIENTS, _examples.IS_SENT),
    _laws.CONTROLLER_LAWS: lambda x: (EVIDENCE,),
}
EXAMPLES = {law: example for laws, example in BY_FAMILY.items() for law in laws}
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


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "law"), CASES)
def test_the_law_catches_the_saboteur_and_spares_the_honest(kind, law):
    of_package = (x for x in kind.__mro__ if x.__module__.startswith("gravac_jax"))
    honest_kind = next(of_package)
    named = ARGUMENTS.get(kind.__name__), ARGUMENTS.get(honest_kind.__name__)
    arguments = named[0] or named[1] or {}
    honest = honest_kind(**arguments)
    law(honest, *EXAMPLES[law](honest))
    with pytest.raises(AssertionError):
        law(kind(**arguments), *EXAMPLES[law](honest))


def test_every_law_catches_a_saboteur_and_says_what_it_demands():
    assert EXAMPLES.keys() == set().union(*_saboteurs.CAUGHT_BY.values())
    assert all(law.__doc__.count("\n") == 0 for law in EXAMPLES)


def test_every_member_of_a_registry_has_an_oracle():
    assert {*gravac._encodings.ENCODINGS} == _oracles.ENCODINGS.keys()
    assert {*gravac._memory.MEMORIES} == _oracles.MEMORIES.keys()
    assert {*gravac._controllers.CONTROLLERS} == _oracles.CONTROLLERS.keys()
