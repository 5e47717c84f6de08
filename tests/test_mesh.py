"""Meshes know which devices a fast network connects."""

import dataclasses

import jax
import pytest

import gravac_jax as gravac


@dataclasses.dataclass(frozen=True)
class Process:
    """A device that tells its process alone, as those of CPUs do."""

    id: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "fake"


@dataclasses.dataclass(frozen=True)
class Slice(Process):
    """A device that tells its slice, as GPUs and TPUs do."""

    slice_index: int = 0


# Two machines of two GPUs each, in JAX's order, which is that of processes.
LAYOUTS = {
    "a process for each GPU": [Slice(i, i, slice_index=i // 2) for i in range(4)],
    "a process for each machine": [
        Slice(i, i // 2, slice_index=i // 2) for i in range(4)
    ],
    "in another order": [Slice(i, i, slice_index=i // 2) for i in (0, 2, 1, 3)],
    "no slices told": [Process(i, i // 2) for i in range(4)],
}


def ids(mesh):
    return [[x.id for x in row] for row in mesh.devices.reshape(mesh.shape["dcn"], -1)]


@pytest.mark.parametrize("devices", LAYOUTS.values(), ids=LAYOUTS)
def test_machines_lie_along_the_first_axis(devices):
    mesh = gravac.make_mesh(("dcn", "ici"), devices=devices)
    assert dict(mesh.shape) == {"dcn": 2, "ici": 2}
    assert ids(mesh) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("devices", LAYOUTS.values(), ids=LAYOUTS)
def test_one_axis_has_the_devices_of_a_machine_beside_each_other(devices):
    mesh = gravac.make_mesh(devices=devices)
    assert [x.id for x in mesh.devices] == [0, 1, 2, 3]


def test_devices_are_grouped_by_machine_where_their_numbers_alternate():
    devices = [Slice(i, i, slice_index=i % 2) for i in range(4)]
    assert ids(gravac.make_mesh(("dcn", "ici"), devices=devices)) == [[0, 2], [1, 3]]
    assert [x.id for x in gravac.make_mesh(devices=devices).devices] == [0, 2, 1, 3]


def test_it_is_what_a_step_runs_on():
    mesh = gravac.make_mesh()
    assert mesh.axis_names == ("data",)
    assert list(mesh.devices) == jax.devices()
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_one_machine_plays_several():
    mesh = gravac.make_mesh(("dcn", "ici"), hosts=4)
    assert dict(mesh.shape) == {"dcn": 4, "ici": jax.device_count() // 4}
    assert list(mesh.devices.flat) == jax.devices()


def test_machines_that_differ_lie_along_one_axis_alone():
    devices = LAYOUTS["a process for each GPU"][:3]
    assert gravac.make_mesh(devices=devices).size == 3
    with pytest.raises(ValueError, match="as many devices each, got 1 to 2"):
        gravac.make_mesh(("dcn", "ici"), devices=devices)


@pytest.mark.parametrize("names", ["data", (), ("a", "b", "c"), ("a", "a")])
def test_other_numbers_of_axes_are_refused(names):
    with pytest.raises(ValueError, match="a tuple of one or two names"):
        gravac.make_mesh(names)


def test_hosts_must_divide_the_devices():
    with pytest.raises(ValueError, match="`hosts` must divide 8 devices, got 3"):
        gravac.make_mesh(hosts=3)
    with pytest.raises(ValueError, match="`hosts` must be a whole number"):
        gravac.make_mesh(hosts=0)


def test_no_devices_are_refused():
    with pytest.raises(ValueError, match="`devices` is empty"):
        gravac.make_mesh(devices=[])
