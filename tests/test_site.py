"""The documentation site builds without a warning; its reference is complete."""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gravac_jax

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference.md"
MODULES = ("checkpoint", "launch", "metrics", "plot", "probe")


def public_names():
    names = {x: y for x, y in vars(gravac_jax).items() if not inspect.ismodule(y)}
    found = [x for x in names if not x.startswith("_")]
    for module in MODULES:
        exported = importlib.import_module(f"gravac_jax.{module}").__all__
        found += [f"{module}.{name}" for name in exported]
    return sorted(found)


def test_the_reference_has_every_public_name_once():
    text = REFERENCE.read_text()
    names = re.findall(r"^::: gravac_jax\.([\w.]+)$", text, re.MULTILINE)
    assert sorted(x for x in names if x not in MODULES) == public_names()


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocstrings", reason="needs gravac_jax[docs]")
    pytest.importorskip("material", reason="needs gravac_jax[docs]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    places = ["--config-file", ROOT / "docs/mkdocs.yml", "--site-dir", tmp_path]
    done = subprocess.run([*command, *places], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "docs/reference/index.html").read_text()
    assert "Average gradients over replicas" in page
