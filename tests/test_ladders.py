"""Ladders rise from a dense rung to the largest factor, as the paper's do."""

import itertools
import math

import hypothesis
import hypothesis.strategies as st
import pytest

import gravac_jax as gravac

FACTORS = st.floats(1, 1e6)


def test_the_ladders_of_the_paper_are_reproduced():
    assert gravac.exponential(10, 1000) == (1, 10, 20, 40, 160, 1000)
    paper = (1, 10, 20, 40, 80, 160, 320, 640, 1280, 2000)
    assert gravac.geometric(10, 2000) == paper
    assert gravac.geometric(1.5, 10) == (1, 1.5, 3, 6, 10)


def test_the_defaults_are_those_of_the_paper():
    assert gravac.exponential() == gravac.exponential(10, 1000)
    assert gravac.geometric() == gravac.geometric(10, 2000, multiplier=2)


def test_a_minimum_of_1_is_the_dense_rung_itself():
    assert gravac.geometric(1, 8) == (1, 2, 4, 8)
    assert gravac.exponential(1, 100) == (1, 2, 4, 16, 100)


@pytest.mark.parametrize("policy", [gravac.exponential, gravac.geometric])
@hypothesis.given(bounds=st.lists(FACTORS, min_size=2, max_size=2, unique=True))
def test_a_ladder_rises_from_1_through_the_minimum_to_the_maximum(policy, bounds):
    ladder = policy(min(bounds), max(bounds))
    assert all(low < high for low, high in itertools.pairwise(ladder))
    assert (ladder[0], ladder[-1]) == (1, max(bounds))
    assert min(bounds) in ladder[:2]


@pytest.mark.parametrize("policy", [gravac.exponential, gravac.geometric])
@pytest.mark.parametrize("bounds", [(100, 10), (10, 10), (0.1, 10), (10, math.inf)])
def test_bounds_that_are_no_rising_factors_are_refused(policy, bounds):
    with pytest.raises(ValueError, match=r"below|at least 1"):
        policy(*bounds)


@pytest.mark.parametrize("multiplier", [1, 0.5, -2, math.nan])
def test_a_multiplier_that_does_not_climb_is_refused(multiplier):
    with pytest.raises(ValueError, match="`multiplier`"):
        gravac.geometric(10, 100, multiplier=multiplier)
