"""Tables and figures in records are what their programs make of the lines."""

import pytest
import remake
from matplotlib.testing.compare import compare_images

TOLERANCE = 1.0  # of 255, root mean square: another matplotlib may round a pixel

# Runs that left no lines, and a record whose program is gone.
DRAWN_ELSEWHERE = {"2026-11-21_growth/growth.png", "2026-11-22_metrics/runs.png"}


def _tables_and_figures():
    kinds = (remake.RECORDS.glob(kind) for kind in ("*/*.png", "*/*.md"))
    return [path for kind in kinds for path in kind if path.name != "README.md"]


@pytest.mark.parametrize("name", remake.MADE)
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
