"""Code in the documents runs as it stands; links lead somewhere; commands are complete.

Each page's Python blocks run in order, in one namespace. What they leave in it is
compared with what the page says. In the default run this is the README.
"""

import functools
import importlib
import inspect
import io
import re
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import agreed, choices, copied, printed
from flax import nnx

import gravac_jax

ROOT = Path(__file__).parents[1]
GLOBS = ("*.md", "docs/**/*.md", "examples/**/*.md", "tests/*.md")
DOCUMENTS = sorted(x.relative_to(ROOT).as_posix() for y in GLOBS for x in ROOT.glob(y))
PAGES = ["README.md", *(x for x in DOCUMENTS if x.startswith("docs/"))]
REFERENCE = "docs/reference.md"  # of docstrings
GUIDES = [x for x in PAGES if x != REFERENCE]
RECIPES = "docs/recipes.md"
ROUNDING = {"rtol": 1e-5, "atol": 1e-6}  # of float32 sums in another order


def text_of(page):
    return (ROOT / page).read_text()


def blocks(language, page="README.md"):
    return re.findall(rf"```{language}\n(.*?)```", text_of(page), re.DOTALL)


def prose_of(page):
    """Return a page without its blocks."""
    return re.sub(r"(?ms)^ *```.*?^ *```$", "", text_of(page))


def anchors_of(page):
    """Return the anchors that GitHub gives to the headings of a page."""
    seen, anchors = Counter(), set()
    for title in re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return anchors


def is_dead(page, link):
    """Whether a relative link leads to no file, or to no heading of a page."""
    path, _, anchor = link.partition("#")
    target = (ROOT / page).parent.joinpath(path).resolve() if path else ROOT / page
    if not target.exists():
        return True
    return bool(anchor) and anchor not in anchors_of(target.relative_to(ROOT))


@functools.cache
def names_of(page):
    """Run all Python blocks of a page, and return what they leave."""
    names: dict = {}
    # As users have it. Flax's metrics do not compute under strict promotion.
    with jax.numpy_dtype_promotion("standard"), redirect_stdout(io.StringIO()) as said:
        for block in blocks("python", page):
            exec(compile(block, page, "exec"), names)
    return names | {"said": said.getvalue()}


@pytest.fixture(scope="module", params=[pytest.param(RECIPES, marks=pytest.mark.slow)])
def recipe(request):
    return names_of(request.param)


# All pages. -----------------------------------------------------------------------


WITH_PYTHON = [x for x in GUIDES if blocks("python", x)]


@pytest.mark.parametrize("page", choices(WITH_PYTHON, lambda x: x == "README.md"))
def test_every_python_block_runs_in_order(page):
    assert names_of(page)["gravac"].__name__ == "gravac_jax"


@pytest.mark.parametrize("page", DOCUMENTS)
def test_every_link_leads_to_a_file_and_a_heading(page):
    prose = re.sub(r"`[^`\n]*`", "`code`", prose_of(page))
    links = [x for x in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in x]
    assert links or not page.startswith("docs/")
    assert [x for x in links if is_dead(page, x)] == []


@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_has_one_title_and_no_block_that_no_test_reads(page):
    assert len(re.findall(r"^# ", prose_of(page), re.MULTILINE)) == 1
    fences = re.findall(r"^ *```(.*)$", text_of(page), re.MULTILINE)
    assert set(fences[::2]) <= {"python", "bash", "diff", "text"}
    assert "<" not in re.sub(r"<!-- .* -->|`[^`]*`", "", prose_of(page))  # no HTML


# The README. ----------------------------------------------------------------------


def test_pages_are_few_and_short_and_the_readme_leads_to_all_of_them():
    readme = text_of("README.md")
    assert len(PAGES) <= 12
    assert sum(len(text_of(x).split()) for x in PAGES) <= 12_000
    assert [x for x in PAGES[1:] if f"]({x})" not in readme] == []
    assert len(readme.partition("```")[0].split()) <= 150
    assert len(readme.splitlines()) <= 150


def test_the_diff_is_a_valid_loop_and_stays_under_six_lines_of_change():
    (diff,) = blocks("diff")
    after = [line[2:] for line in diff.splitlines() if not line.startswith("-")]
    compile("\n".join(after), "README.md", "exec")
    assert sum(line.startswith("+") for line in diff.splitlines()) < 6


def test_the_first_commands_set_up_their_own_environment_and_others_use_it():
    first, second, *others = blocks("bash")
    assert all(x.startswith("python3 -m venv .venv && ") for x in (first, second))
    others += [x for page in GUIDES[1:] for x in blocks("bash", page)]
    assert others
    assert all(x.startswith(".venv/bin/") for x in others)
    assert all(len(x.splitlines()) == 1 for x in [*blocks("bash"), *others])


# The reference. -------------------------------------------------------------------

MODULES = ("checkpoint", "elastic", "launch", "metrics", "plot", "probe")


def test_every_public_name_is_in_the_reference_and_the_packages_own_in_a_guide():
    names = {x: y for x, y in vars(gravac_jax).items() if not inspect.ismodule(y)}
    public = [x for x in names if not x.startswith("_")]
    text = " ".join(map(text_of, GUIDES))
    assert [x for x in public if not re.search(rf"(gravac\.|`){x}\b", text)] == []
    for module in MODULES:
        exported = importlib.import_module(f"gravac_jax.{module}").__all__
        public += [f"{module}.{name}" for name in exported]
    found = re.findall(r"^::: gravac_jax\.([\w.]+)$", text_of(REFERENCE), re.MULTILINE)
    assert sorted(x for x in found if x not in MODULES) == sorted(public)


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocstrings", reason="needs gravac_jax[docs]")
    pytest.importorskip("material", reason="needs gravac_jax[docs]")
    places = ["--config-file", ROOT / "docs/mkdocs.yml", "--site-dir", tmp_path]
    printed("-m", "mkdocs", "build", "--strict", *places)
    page = (tmp_path / "docs/reference/index.html").read_text()
    assert "Average gradients over replicas" in page


# Pages. ---------------------------------------------------------------------------


HELD = {"README.md": "opt_state", "docs/optimizers.md": "nadam_state"}
HELD[RECIPES] = "optimizer"


@pytest.mark.parametrize("page", choices(HELD, lambda x: x == "README.md"))
def test_nothing_is_held_back_after_the_flush(page):
    state = names_of(page)[HELD[page]]
    state = nnx.as_pure(state.opt_state) if page == RECIPES else state
    held = optax.tree.get_all_with_path(state, "residual")
    assert held
    assert all(not np.asarray(x).any() for _, x in held)


# Recipes. -------------------------------------------------------------------------


def test_figures_and_a_table_are_what_the_blocks_of_watch_and_recipes_give(recipe):
    (table,), watched = blocks("text", "docs/watch.md"), names_of("docs/watch.md")
    assert table in watched["said"]
    info = watched["info"]
    assert 0 < float(info.wire_bytes) < float(info.dense_wire_bytes) / 4
    assert jnp.issubdtype(recipe["correct"].dtype, jnp.integer)
    assert int(recipe["correct"]) == recipe["expected"] > 0
    losses = recipe["nnx_losses"]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])


def test_accumulated_gradients_are_those_of_the_whole_batch(recipe):
    batch, model = recipe["batch_of_four"], nnx.Linear(32, 10, rngs=nnx.Rngs(0))
    loss = recipe["loss_fn"](recipe["new_params"](), batch)
    np.testing.assert_allclose(recipe["accumulated_loss"], loss, **ROUNDING)
    assert int(optax.tree.get(recipe["accumulated"], "dense_steps")) == 0
    loss = recipe["nnx_loss"](model, batch)
    np.testing.assert_allclose(recipe["nnx_losses"][0], loss, **ROUNDING)
    moved = recipe["model"].kernel[...] - model.kernel[...]
    assert (np.abs(np.asarray(moved)) > 0).all()


def test_an_average_of_params_follows_them(recipe):
    state = recipe["state"]
    before = copied(state[2])
    *state, _ = recipe["averaging_step"](*state, recipe["make_batch"](64))
    jax.tree.map(agreed, (state[0], state[2]))
    for name, x in state[2].items():
        expected = 0.9 * before[name] + 0.1 * np.asarray(state[0][name])
        np.testing.assert_allclose(x, expected, **ROUNDING)
    recipe["state"] = state


def test_steps_in_a_scan_are_those_of_a_loop(recipe):
    place, params = recipe["gravac"].place, recipe["new_params"]()
    state = place((params, recipe["tx"].init(params)), recipe["mesh"])
    losses = []
    for batch in recipe["five"]:
        *state, loss = recipe["step"](*state, batch)
        losses.append(float(loss))
    np.testing.assert_allclose(recipe["losses"], losses, **ROUNDING)
    assert [x["loss"] for x in recipe["figures"]] == recipe["losses"].tolist()
    assert all(x["gravac/wire_bytes"] > 0 for x in recipe["figures"])


def test_each_part_of_the_params_has_its_own_optimizer(recipe):
    params = recipe["new_params"]()
    grads = jax.grad(recipe["loss_fn"])(params, recipe["several_batch"])
    moved = jax.tree.map(lambda x, y: x - y, copied(recipe["several_state"][0]), params)
    rate = jax.tree.map(lambda x, y: -jnp.sum(x * y) / jnp.sum(y * y), moved, grads)
    np.testing.assert_allclose(rate["hidden"], 0.01, rtol=0.2)  # sent in four bits
    np.testing.assert_allclose(rate["out"], 0.1, rtol=0.2)


def test_frozen_params_stay_and_are_not_sent(recipe):
    trained, opt_state, frozen = recipe["frozen_state"]
    params = recipe["new_params"]()
    np.testing.assert_array_equal(frozen["hidden"], params["hidden"])
    assert (np.asarray(trained["out"]) != np.asarray(params["out"])).any()
    dense_bytes = optax.tree.get(opt_state, "dense_wire_bytes")
    assert float(dense_bytes) == 7 * params["out"].size  # of 8 replicas
