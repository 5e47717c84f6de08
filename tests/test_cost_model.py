"""Seconds follow from bytes and messages."""

import pytest

import gravac_jax as gravac


def test_a_step_is_compute_then_latency_then_bytes_over_bandwidth():
    wire = gravac.WireCost(
        bytes_per_second=1024, latency_seconds=0.25, compute_seconds=2
    )
    assert wire.step_seconds(512, messages=3) == 2 + 3 * 0.25 + 0.5


def test_only_compressed_steps_select():
    wire = gravac.WireCost(100, 0.5, compute_seconds=2, selection_seconds=0.25)
    assert wire.parts(300, 4, is_dense=True) == (2, 0, 2, 3)
    assert wire.parts(300, 4, is_dense=False) == (2, 0.25, 2, 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bytes_per_second", 0),
        ("bytes_per_second", -125e6),
        ("bytes_per_second", "1 Gbit/s"),
        ("latency_seconds", -1e-3),
        ("latency_seconds", float("nan")),
        ("compute_seconds", float("inf")),
        ("compute_seconds", True),
    ],
)
def test_a_figure_that_no_network_has_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"`{name}`"):
        gravac.WireCost(**{name: value})
