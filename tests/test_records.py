"""Tables and figures in records are what their programs make of the lines."""

import re

import pytest
import remake
from _harness import choices
from matplotlib.testing.compare import compare_images
from training import methods

TOLERANCE = 1.0  # of 255, root mean square: another matplotlib may round a pixel

# Runs that left no lines, and a record whose program is gone.
DRAWN_ELSEWHERE = {"2026-11-22_metrics/runs.png"}


def _tables_and_figures():
    kinds = (remake.RECORDS.glob(kind) for kind in ("*/*.png", "*/*.md"))
    return [path for kind in kinds for path in kind if path.name != "README.md"]


@pytest.mark.parametrize("name", choices(remake.MADE, lambda x: x.endswith(".md")))
def test_what_is_made_of_lines_is_what_they_say(name, tmp_path):
    made, kept = tmp_path / "made", remake.RECORDS / name
    made = made.with_suffix(kept.suffix)
    remake.MADE[name](made)
    if kept.suffix == ".md":
        assert made.read_text() == kept.read_text()
    else:
        assert compare_images(str(kept), str(made), TOLERANCE) is None


def test_every_table_and_figure_is_made_of_lines():
    found = {str(path.relative_to(remake.RECORDS)) for path in _tables_and_figures()}
    assert found == remake.MADE.keys() | DRAWN_ELSEWHERE


def test_every_table_and_figure_is_named_where_it_is_explained():
    for path in _tables_and_figures():
        assert path.name in path.with_name("README.md").read_text()


def test_figures_name_methods_in_words_and_no_two_alike():
    plain = [*methods.METHODS, "densehalf"]
    numbered = [f"{family}16" for family in methods.FAMILIES]
    names = [*plain, *numbered, *(f"delayed{x}" for x in numbered)]
    words = [methods.in_words(x) for x in names]
    assert [x for x in names if methods.in_words(x) == x] == []
    assert len(set(words)) == len(words)
    assert methods.in_words("localallreduced16") == "gradients in two bits, own params"
    assert methods.in_words("widefixed10") == "sparse, factor 10, 8 bytes an entry"
    inside = methods.in_words("insideallreducedadam16")
    assert inside == "AdamW's steps in two bits, learning rate inside"
    assert methods.in_words("no method") == "no method"


def test_every_method_in_a_figure_is_named_in_words():
    drawn = {path.parent for path in remake.RECORDS.glob("*/*.png")}
    files = [x for folder in drawn for x in folder.glob("*.jsonl")]
    is_drawn = lambda path: not re.search("torch|layers", path.name)
    texts = [path.read_text() for path in files if is_drawn(path)]
    names = {x for text in texts for x in re.findall(r'"method": "(\w+)"', text)}
    assert len(names) > 20
    assert [x for x in names if methods.in_words(x) == x] == []
