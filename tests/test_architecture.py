"""The floor plan, enforced: what each room may import, say and weigh."""

import ast
import itertools
import pathlib
import re
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "gravac_jax"
FILES = sorted(PACKAGE.rglob("*.py"))

# From the ground up. A room imports from strictly lower floors; a folder is one room.
FLOORS = [
    {"_tree", "_launch"},
    {"_checks", "_chain_checks", "_step_checks"},
    {"_payload", "_ladder", "_info", "_comm"},
    {
        "_accumulation",
        "_gain",
        "_throughput",
        "_timing",
        "_clipping",
        "_state",
        "_memory",
        "_marking",
        "_buckets",
        "_metrics",
    },
    {"_compressors", "_scale", "_grad", "_agreement", "_power"},
    {"_encoding"},
    {"_codec", "_mean16"},
    {"_selection"},
    {"_exchanges", "_controllers", "_placement", "_guard", "_delivery"},
    {"_report", "_parallel", "_clock", "_checkpoint"},
    {"_evidence"},
    {"_wiring"},
    {"_transform"},
    {"_recipes", "_probe"},
    {"__init__"},
    {"launch", "checkpoint", "probe", "metrics", "plot"},
    {"__main__"},
]
LEVELS = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}

# Folders that are one thing in parts: each part imports from those before it. The other
# folders are families, whose members do not know each other.
PARTS = {
    "_launch": ("guardian", "processes"),
    "_marking": ("compaction", "quantile", "collect", "curve"),
    "_metrics": ("scalars", "jsonl", "live_view", "runs"),
    "_checkpoint": ("restore_checks", "portable", "ledger", "label", "reading"),
    "_probe": ("verdict", "turns", "ways", "probing", "findings", "screen"),
}

# A member of a family knows its base, and what the off switch shares with others.
SHARED_WITHIN = {"base", "dense"}

# Questions about other replicas, and what crosses the network.
TALK = re.compile(
    r"psum\w*|p(mean|max|min|permute|shuffle|swapaxes|cast|vary|broadcast)"
    r"|all_(gather|to_all|reduce)\w*|ragged_all_to_all|axis_(index|size)"
)
TALKERS = {"_comm": None, "_step_checks": {"axis_size"}}  # None for all of it

MAX_LINES = 300
DEPENDENCIES = {"jax", "optax", "numpy", "gravac_jax"}
EXTRA_OF = {  # which the front door does not import
    "checkpoint": {"orbax"},
    "metrics": {"tensorboardX"},
    "_metrics/live_view": {"rich"},
    "_probe/screen": {"rich"},
    "plot": {"matplotlib"},
}
EXTRAS = ("flax", "grain", "orbax", "rich", "tyro", "matplotlib", "tensorboardX")

SUPPRESSION = re.compile(r"#.*(noqa|type: ignore|pyright: ignore|pragma|fmt: off)")
MAX_SUPPRESSIONS = 1  # only ever goes down

in_every_file = pytest.mark.parametrize(
    "file", FILES, ids=lambda file: str(file.relative_to(PACKAGE))
)


def room(file):
    """The room that a file belongs to: itself, or its folder."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def parse(file):
    return ast.parse(file.read_text())


def imported(file):
    """The dotted name of everything that a file imports."""
    names = []
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def imported_rooms(file):
    parts = [name.split(".") for name in imported(file)]
    return {path[1] for path in parts if path[0] == "gravac_jax" and len(path) > 1}


def test_every_room_is_on_one_floor_of_the_plan():
    assert {room(file) for file in FILES} == set(LEVELS)
    assert all(one.isdisjoint(two) for one, two in itertools.combinations(FLOORS, 2))


@in_every_file
def test_a_room_imports_from_lower_floors_only(file):
    own = room(file)
    for other in imported_rooms(file) - {own}:
        assert LEVELS[other] < LEVELS[own], f"{own} imports {other}"


@in_every_file
def test_who_shares_a_room_knows_no_more_of_the_others_than_needed(file):
    own = f"gravac_jax.{room(file)}."
    siblings = {
        name.removeprefix(own).split(".")[0]
        for name in imported(file)
        if name.startswith(own)
    }
    members = {x.stem for x in file.parent.glob("*.py")} - {"__init__"}
    if parts := PARTS.get(room(file)):
        assert set(parts) == members
        before = parts.index(file.stem) if file.stem in parts else 0
        assert siblings <= set(parts[:before])
    elif file.stem == "__init__":
        assert file.parent == PACKAGE or siblings == members - {"base"}
    else:
        assert siblings <= SHARED_WITHIN - {file.stem}


@in_every_file
def test_only_one_room_talks_to_other_replicas(file):
    said = {
        name
        for node in ast.walk(parse(file))
        for name in (getattr(node, "attr", None), getattr(node, "id", None))
        if name and TALK.fullmatch(name)
    }
    said |= set(filter(TALK.fullmatch, (x.split(".")[-1] for x in imported(file))))
    allowed = TALKERS.get(room(file), set())
    assert allowed is None or said <= allowed


@in_every_file
def test_a_file_can_be_read_in_one_sitting(file):
    assert len(file.read_text().splitlines()) <= MAX_LINES


@in_every_file
def test_a_file_says_first_what_it_is(file):
    sentence = (ast.get_docstring(parse(file)) or "").split("\n")[0]
    assert sentence.endswith(".")


@in_every_file
def test_imports_are_absolute_and_of_public_names(file):
    relative = [x for x in ast.walk(parse(file)) if getattr(x, "level", 0)]
    assert not relative
    for name in imported(file):
        is_private = any(part.startswith("_") for part in name.split("."))
        assert name.startswith(("gravac_jax.", "__future__")) or not is_private


@in_every_file
def test_the_core_imports_its_three_dependencies_and_no_more(file):
    packages = {name.split(".")[0] for name in imported(file)}
    path = file.relative_to(PACKAGE).with_suffix("").as_posix()
    allowed = DEPENDENCIES | EXTRA_OF.get(path, set())
    assert packages - set(sys.stdlib_module_names) <= allowed


def test_the_package_works_without_any_extra():
    script = f"""
import sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))  # None: an import of it fails
import gravac_jax, jax
fixed = gravac_jax.Fixed(factor=1)
tx = gravac_jax.transform(axis_name=None, compress=True, controller=fixed)
params = jax.numpy.ones(3)
print(tx.update(params, tx.init(params))[0].tolist())
"""
    run = [sys.executable, "-c", script]
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert result.stdout == "[1.0, 1.0, 1.0]\n", result.stderr


def test_suppressions_are_few():
    lines = [line for file in FILES for line in file.read_text().splitlines()]
    found = [line.strip() for line in lines if SUPPRESSION.search(line)]
    assert len(found) <= MAX_SUPPRESSIONS, "\n".join(found)


def test_the_front_door_has_no_logic():
    front = parse(PACKAGE / "__init__.py").body
    docstring, *imports, version = front
    assert isinstance(docstring, ast.Expr)
    assert all(isinstance(node, ast.ImportFrom) for node in imports)
    assert all(alias.asname == alias.name for node in imports for alias in node.names)
    assert ast.unparse(version).startswith("__version__ = ")
