"""Meshes know which devices a fast network connects."""

import dataclasses

import jax
import pytest

import gravac_jax as gravac

ONE, TWO = ("data",), ("dcn", "ici")


@dataclasses.dataclass(frozen=True)
class Process:
    """A device that tells its process alone, as CPUs of one process do."""

    id: int
    process_index: int
    platform, device_kind = "gpu", "fake"


@dataclasses.dataclass(frozen=True)
class Slice(Process):
    """A device that tells its slice, as those of a job of several processes do."""

    slice_index: int


# Two machines of two GPUs each, in JAX's order, which is that of processes.
LAYOUTS = {
    "a process for each GPU": [Slice(i, i, i // 2) for i in range(4)],
    "a process for each machine": [Slice(i, i // 2, i // 2) for i in range(4)],
    "in another order": [Slice(i, i, i // 2) for i in (0, 2, 1, 3)],
    "no slices told": [Process(i, i // 2) for i in range(4)],
    "numbers that alternate": [Slice(i, i, i % 2) for i in range(4)],
}
UNEVEN = LAYOUTS["a process for each GPU"][:3]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_machines_lie_along_the_first_axis_and_their_devices_side_by_side(layout):
    expected = [0, 2, 1, 3] if "alternate" in layout else [0, 1, 2, 3]
    for names, shape in ((ONE, (4,)), (TWO, (2, 2))):
        mesh = gravac.make_mesh(names, devices=LAYOUTS[layout])
        assert (mesh.axis_names, mesh.devices.shape) == (names, shape)
        assert [x.id for x in mesh.devices.flat] == expected


def test_by_default_it_has_all_devices_and_one_machine_may_play_several():
    four = gravac.make_mesh(TWO, hosts=4)
    for mesh, names, shape in ((gravac.make_mesh(), ONE, (8,)), (four, TWO, (4, 2))):
        assert (mesh.axis_names, mesh.devices.shape) == (names, shape)
        assert list(mesh.devices.flat) == jax.devices()
        assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_machines_that_differ_lie_along_one_axis_alone():
    assert gravac.make_mesh(devices=UNEVEN).size == 3


def test_one_host_alone_is_warned_about():
    with pytest.warns(UserWarning, match="one host, so that.*pass hosts=2"):
        assert gravac.make_mesh(("dcn", "ici")).devices.shape == (1, 8)


REFUSED = [
    ("as many devices each, got 1 to 2", {"axis_names": TWO, "devices": UNEVEN}),
    ("as many devices each, got 2 to 3.*`hosts`", {"axis_names": TWO, "hosts": 3}),
    ("`hosts` must be a whole number", {"hosts": 0}),
    ("a mesh needs a device", {"devices": [], "hosts": 3}),
]
NAMES = "data", "ab", (), ("a", "b", "c"), ("a", "a")
REFUSED += [("a tuple of one or two names", {"axis_names": x}) for x in NAMES]


@pytest.mark.parametrize(("says", "given"), REFUSED)
def test_what_makes_no_mesh_is_refused(says, given):
    with pytest.raises(ValueError, match=says):
        gravac.make_mesh(**given)
