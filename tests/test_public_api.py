"""The front door: what is there, and that each name explains itself."""

import dataclasses
import inspect
import re

import pytest

import gravac_jax as gravac

# All of them; a name that comes or goes is a decision, and belongs in the changelog.
PUBLIC = [
    "Accordion",
    "Adam",
    "AllGather",
    "ApproxTopK",
    "BFloat16",
    "BlockTopK",
    "Capped",
    "Cheapest",
    "ClipByGlobalNorm",
    "ClipByValue",
    "DenseMean",
    "DenseMean16",
    "Fastest",
    "Fixed",
    "Float16",
    "Float32",
    "GraVAC",
    "Identity",
    "Int32",
    "Int8",
    "LeaderIndices",
    "LowRank",
    "Momentum",
    "NoClip",
    "NoMemory",
    "RandomK",
    "RedSync",
    "Residual",
    "SIDCo",
    "SampledTopK",
    "Scheduled",
    "SharedRandomK",
    "StepClock",
    "StepInfo",
    "Threshold",
    "TopK",
    "UInt16",
    "WireCost",
    "adamw",
    "by_rank",
    "checksum",
    "data_parallel",
    "dgc",
    "exponential",
    "flush",
    "geometric",
    "guard",
    "init",
    "local_params",
    "low_after_drops",
    "matrices",
    "place",
    "resync",
    "simulate",
    "state_specs",
    "transform",
    "value_and_grad",
    "warm_up",
]
FUNCTIONS = [x for x in PUBLIC if inspect.isfunction(getattr(gravac, x))]
CLASSES = [x for x in PUBLIC if inspect.isclass(getattr(gravac, x))]


def section(name, title):
    """One section of the docstring of a public name, dedented."""
    doc = inspect.getdoc(getattr(gravac, name)) or ""
    found = re.search(rf"^{title}:\n((?:  .*\n|\n)+)", doc + "\n", re.MULTILINE)
    return inspect.cleandoc(found[1]) if found else ""


def entries(text):
    """The names that an Args or Attributes section explains."""
    return re.findall(r"^(\w+): \S", text, re.MULTILINE)


def test_what_is_public_is_pinned():
    # Rooms that somebody has imported, such as `gravac_jax.launch`, are there too.
    names = {x for x, y in vars(gravac).items() if not inspect.ismodule(y)}
    assert sorted(x for x in names if not x.startswith("_")) == PUBLIC


def test_every_public_name_is_a_function_or_a_class():
    assert sorted(FUNCTIONS + CLASSES) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_one_first_sentence(name):
    first, *rest = inspect.getdoc(getattr(gravac, name)).split("\n")
    assert first.endswith(".")
    assert not rest or rest[0] == ""


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_an_example_or_says_where_one_is(name):
    example = section(name, "Example")
    elsewhere = re.fullmatch(r"See `gravac\.(\w+)`\.", example)
    example = section(elsewhere[1], "Example") if elsewhere else example
    assert ">>> import gravac_jax as gravac" in example
    assert re.search(rf"gravac\.{name}\b|StepInfo|data_parallel", example)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_explains_its_arguments_in_order_and_what_it_returns(name):
    parameters = list(inspect.signature(getattr(gravac, name)).parameters)
    assert entries(section(name, "Args")) == parameters
    assert section(name, "Returns")


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_explains_its_fields_in_order(name):
    kind = getattr(gravac, name)
    if dataclasses.is_dataclass(kind):
        fields = [field.name for field in dataclasses.fields(kind)]
        assert entries(section(name, "Args")) == fields
    elif hasattr(kind, "_fields"):
        assert entries(section(name, "Attributes")) == list(kind._fields)
    else:
        parameters = list(inspect.signature(kind).parameters)
        assert entries(section(name, "Args")) == parameters
