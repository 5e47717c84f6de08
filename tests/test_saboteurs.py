"""Every saboteur is caught, and every law catches one.

A law that none can break is decoration; a saboteur that none catches is a hole.
"""

import inspect

import _examples
import _laws
import _oracles
import _saboteurs
import pytest

import gravac_jax as gravac
from gravac_jax._compressors import COMPRESSORS
from gravac_jax._controllers import CONTROLLERS
from gravac_jax._exchanges import EXCHANGES
from gravac_jax._memory import MEMORIES

GRAVAC = {"epsilon": 0.7, "window": 10, "ladder": (1, 4, 16, 64), "gain": "energy"}

# Each saboteur with the laws that catch it.
COMPRESSOR_SABOTEURS = {
    _saboteurs.SendsTheSmallest(): (
        _laws.contracts,
        _laws.selects_like_its_oracle,
    ),
    _saboteurs.ForgetsTheAbsoluteValue(): (_laws.selects_like_its_oracle,),
    _saboteurs.IsBlindAboveOne(): (
        _laws.commutes_with_scaling,
        _laws.selects_like_its_oracle,
    ),
    _saboteurs.HasMoods(): (_laws.is_itself_under_jit, _laws.is_itself_under_vmap),
    _saboteurs.SendsOneIndexTwice(): (_laws.sends_its_share, _laws.narrows),
    _saboteurs.SendsOneFewer(): (_laws.sends_its_share,),
    _saboteurs.AimsTooHigh(): (_laws.sends_something, _laws.selects_like_its_oracle),
    _saboteurs.SendsInOrderOfMagnitude(): (_laws.sends_its_share,),
    _saboteurs.NormalizesOnTheWay(): (
        _laws.sends_what_is_there,
        _laws.leaves_zeros_alone,
    ),
}
EXCHANGE_SABOTEURS = {
    _saboteurs.DividesBySenders(): (
        _laws.averages_what_was_sent,
        _laws.exchanges_like_its_oracle,
    ),
    _saboteurs.KeepsWhatItSentDense(): (
        _laws.sends_everything_at_factor_1,
        _laws.averages_what_was_sent,
        _laws.exchanges_like_its_oracle,
    ),
    _saboteurs.ForgetsWhatRoundingDrops(values=gravac.BFloat16()): (
        _laws.averages_what_was_sent,
        _laws.exchanges_like_its_oracle,
    ),
    _saboteurs.TrustsItselfMore(): (_laws.agrees_on_all_replicas,),
    _saboteurs.FavorsTheFirstReplica(): (_laws.ignores_the_order_of_replicas,),
    _saboteurs.IsSilentAlone(): (_laws.is_the_same_alone,),
    _saboteurs.TellsTheEnergyOfTheTop(): (_laws.knows_what_it_sent,),
    _saboteurs.AddsItsEnergiesUp(): (_laws.averages_energies_that_travel,),
    _saboteurs.TalksBeforehand(): (_laws.declares_its_bytes,),
    _saboteurs.CountsNoIndices(): (_laws.declares_its_bytes,),
    _saboteurs.SendsInItsSleep(): (_laws.sends_nothing_beyond_the_ladder,),
    _saboteurs.SendsLessUnseen(): (_laws.sends_alike_looking_or_not,),
}
MEMORY_SABOTEURS = {
    _saboteurs.ForgetsToClear(): (_laws.telescopes, _laws.remembers_like_its_oracle),
    _saboteurs.IsStaleAfterDenseSteps(): (
        _laws.telescopes,
        _laws.remembers_like_its_oracle,
    ),
    _saboteurs.ForgetsInItsSleep(): (
        _laws.sleeps_through_a_skipped_step,
        _laws.telescopes,
    ),
    _saboteurs.RemembersInHalfPrecision(): (_laws.keeps_its_form,),
    _saboteurs.LeavesDenseLeavesBehind(0.5): (_laws.treats_dense_leaves_alike,),
    _saboteurs.MasksWhatItKept(0.5): (
        _laws.remembers_like_its_oracle,
        _laws.sleeps_through_a_skipped_step,
    ),
}
CONTROLLER_SABOTEURS = {
    _saboteurs.StepsOffTheLadder(**GRAVAC): (_laws.stays_on_the_ladder,),
    _saboteurs.SearchesOffTheLadder(**GRAVAC): (_laws.stays_on_the_ladder,),
    _saboteurs.ChangesItsType(**GRAVAC): (_laws.compiles_once,),
    _saboteurs.FollowsItsMood(**GRAVAC): (_laws.decides_alike,),
    _saboteurs.GatesOnTheWrongSide(**GRAVAC): (_laws.decides_like_its_oracle,),
    _saboteurs.SettlesOnTheLargerFactor(**GRAVAC): (_laws.decides_like_its_oracle,),
    _saboteurs.SwallowsInfinity(**GRAVAC): (_laws.survives_overflow,),
    _saboteurs.SeesWhereNobodyLooks(**GRAVAC): (_laws.believes_only_looks,),
}

# What each family is tried on, the honest class that the saboteurs come from, its
# laws, its saboteurs, its registry and its oracles.
FAMILIES = {
    "compressors": (
        _examples.BUCKETS["gaussian"],
        gravac.TopK(),
        _laws.COMPRESSOR_LAWS,
        COMPRESSOR_SABOTEURS,
    ),
    "exchanges": (
        (_examples.EXCHANGED, _examples.LADDER),
        gravac.AllGather(),
        _laws.EXCHANGE_LAWS,
        EXCHANGE_SABOTEURS,
    ),
    "memories": (
        (_examples.GRADIENTS, _examples.IS_SENT),
        gravac.Residual(),
        _laws.MEMORY_LAWS,
        MEMORY_SABOTEURS,
    ),
    "controllers": (
        (_examples.evidence(4, seed=5, measured_from=90),),
        gravac.GraVAC(**GRAVAC),
        _laws.CONTROLLER_LAWS,
        CONTROLLER_SABOTEURS,
    ),
}
CASES = [
    pytest.param(
        example, honest, saboteur, law, id=f"{type(saboteur).__name__}-{law.__name__}"
    )
    for example, honest, _, saboteurs in FAMILIES.values()
    for saboteur, laws in saboteurs.items()
    for law in laws
]


@pytest.mark.slow
@pytest.mark.parametrize(("example", "honest", "saboteur", "law"), CASES)
def test_the_law_catches_the_saboteur_and_spares_the_honest(
    example, honest, saboteur, law
):
    law(honest, *example)
    with pytest.raises(AssertionError):
        law(saboteur, *example)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_law_catches_a_saboteur(family):
    *_, laws, saboteurs = FAMILIES[family]
    assert set(laws) == {law for caught_by in saboteurs.values() for law in caught_by}


def test_every_law_belongs_to_a_family_and_says_what_it_demands():
    laws = {law for *_, laws, _ in FAMILIES.values() for law in laws}
    takes_a_component = {
        function
        for _, function in inspect.getmembers(_laws, inspect.isfunction)
        if function.__annotations__.get("return", ...) is None
        and not function.__name__.startswith("assert_")
    }
    assert laws == takes_a_component
    assert all(law.__doc__.count("\n") == 0 for law in laws)


def test_every_saboteur_is_put_to_the_test():
    tried = {type(x) for *_, saboteurs in FAMILIES.values() for x in saboteurs}
    written = {
        kind
        for name, kind in inspect.getmembers(_saboteurs, inspect.isclass)
        if kind.__module__ == _saboteurs.__name__ and not name.startswith("_")
    }
    assert written <= tried


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


def test_a_component_without_an_oracle_is_told_where_it_goes():
    with pytest.raises(AssertionError, match=r"int has no oracle: .*_oracles\.py"):
        _oracles.look_up(_oracles.COMPRESSORS, 3)
