"""Every record says what it shows."""

from pathlib import Path

import pytest

RECORDS = Path(__file__).parents[1] / "examples/benchmarks/records"
FOLDERS = sorted(x for x in RECORDS.iterdir() if x.is_dir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda x: x.name)
def test_every_table_and_figure_is_named_where_it_is_explained(folder):
    text = (folder / "README.md").read_text()
    found = [*folder.glob("*.png"), *folder.glob("*.md")]
    names = {x.name for x in found} - {"README.md"}
    assert {x for x in names if x not in text} == set()
