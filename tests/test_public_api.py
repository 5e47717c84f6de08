"""The front door: what is there, and that each name explains itself."""

import dataclasses
import inspect
import re

import pytest

import gravac_jax as gravac

# A name that comes or goes is a decision, and belongs in the changelog.
COMPONENTS = """
    Bits ClipByGlobalNorm Dense Fastest GraVAC LowRank Momentum OwnOptimizer
    Residual Scheduled StepClock TopK WireCost
"""
BASES = "Comm Controller Encoding Memory StepInfo "
RECORDS = "Bucket Evidence Sent Traffic "
FUNCTIONS = """
    adamw checksum data_parallel dgc diloco flush guard make_mesh matrices
    nnx_data_parallel nnx_flush nnx_value_and_grad norm_of_mean outer own_params place
    resync sgd state_specs train_step transform value_and_grad
"""
MOST = 48  # so that a new name must take the place of another
CLASSES = sorted((RECORDS + BASES + COMPONENTS).split())
PUBLIC = sorted(CLASSES + FUNCTIONS.split())


def section(name, title):
    """Return one section of the docstring of a public name, dedented."""
    doc = inspect.getdoc(getattr(gravac, name)) or ""
    found = re.search(rf"^{title}:\n((?:  .*\n|\n)+)", doc + "\n", re.MULTILINE)
    return inspect.cleandoc(found[1]) if found else ""


def entries(text):
    """Return the names that an Args or Attributes section explains."""
    return re.findall(r"^(\w+): \S", text, re.MULTILINE)


def test_the_public_names_are_pinned_and_few_and_none_is_private():
    # A submodule that somebody imported, such as `gravac_jax.launch`, is there too.
    names = {x: y for x, y in vars(gravac).items() if not inspect.ismodule(y)}
    assert sorted(x for x in names if not x.startswith("_")) == PUBLIC
    assert len(PUBLIC) <= MOST
    assert [x for x in CLASSES if not inspect.isclass(names[x])] == []
    assert [x for x in FUNCTIONS.split() if not inspect.isfunction(names[x])] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_a_name_has_one_first_sentence_and_explains_its_arguments_in_order(name):
    made = getattr(gravac, name)
    first, *rest = inspect.getdoc(made).split("\n")
    assert first.endswith(".")
    assert not rest or rest[0] == ""
    assert name in CLASSES or section(name, "Returns")
    if hasattr(made, "_fields"):
        assert entries(section(name, "Attributes")) == list(made._fields)
    elif dataclasses.is_dataclass(made):
        fields = [field.name for field in dataclasses.fields(made) if field.init]
        assert entries(section(name, "Args")) == fields
    elif not inspect.isabstract(made):
        parameters = list(inspect.signature(made).parameters)
        assert entries(section(name, "Args")) == parameters


@pytest.mark.parametrize("name", sorted({*PUBLIC} - {*RECORDS.split()}))
def test_a_name_to_be_called_or_subclassed_has_an_example_or_says_where_one_is(name):
    example = section(name, "Example")
    elsewhere = re.fullmatch(r"See `gravac\.(\w+)`\.", example)
    example = section(elsewhere[1], "Example") if elsewhere else example
    assert ">>> import gravac_jax as gravac" in example
    assert re.search(rf"\b{name}\b", example)
