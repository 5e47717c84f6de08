"""A mesh over all devices, of one axis, or of hosts by the devices of each."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils

from gravac_jax import _refuse


def make_mesh(
    axis_names: Sequence[str] = ("data",),
    *,
    hosts: int | None = None,
    devices: Sequence[Any] | None = None,
) -> jax.sharding.Mesh:
    """Lay a mesh over devices, on one host or on many.

    With one name, all devices lie along one axis. With two, the first axis has the
    hosts, between which the network is slow, and the second the devices of each. A host
    here is what JAX calls a slice: the GPUs of a machine, or of several that NVLink
    connects, however many processes they have; the TPUs of a slice. Where JAX knows of
    no slices, as on most CPUs, a host is a process.

    `jax.make_mesh` refuses devices of several slices, such as GPUs of several machines.

    Args:
      axis_names: one or two names, the slow network's first, as in `("dcn", "ici")`.
      hosts: into how many hosts to divide the devices, in their order, where JAX cannot
        tell, as when one machine plays several. Default: what JAX tells.
      devices: the devices. Default: those of all processes.

    Returns:
      A mesh whose axes are Auto. Devices of a host are neighbours along every axis.

    Raises:
      ValueError: if there are not one or two different names, there are no devices,
        hosts differ in their number of devices, or `hosts` does not divide them.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.make_mesh().axis_names
      ('data',)
      >>> mesh = gravac.make_mesh(("dcn", "ici"), hosts=2, devices=jax.devices()[:4])
      >>> dict(mesh.shape)
      {'dcn': 2, 'ici': 2}
    """
    names = tuple(axis_names)
    is_one_name = isinstance(axis_names, str)
    if is_one_name or len(names) not in (1, 2) or len(set(names)) < len(names):
        raise ValueError(
            f"`axis_names` must be a tuple of one or two names that differ, such as"
            f" ('data',) or ('dcn', 'ici'), got {axis_names!r}. For more axes reshape"
            f" the `devices` of the mesh, and hand them to jax.sharding.Mesh."
        )
    chosen = list(jax.devices() if devices is None else devices)
    if not chosen:
        raise ValueError("`devices` is empty: leave it out for those of all processes.")
    if hosts is not None:
        _refuse.count(hosts, "hosts", "groups of devices")
    rows = _by_host(chosen) if hosts is None else _divided(chosen, hosts)
    sizes = sorted({len(x) for x in rows})
    if len(names) == 2 and len(sizes) > 1:
        raise ValueError(
            f"hosts must have as many devices each, got {sizes[0]} to {sizes[-1]}:"
            f" give `devices` that are spread evenly, or one axis name."
        )
    grid = np.concatenate(rows) if len(names) == 1 else np.stack(rows)
    return jax.sharding.Mesh(grid, names)


def _host_of(device: Any) -> int:
    return getattr(device, "slice_index", device.process_index)


def _by_host(devices: Sequence[Any]) -> list[np.ndarray]:
    ordered = sorted(devices, key=lambda x: (_host_of(x), x.id))
    groups = [list(x) for _, x in itertools.groupby(ordered, _host_of)]
    # JAX orders TPUs by how they are wired.
    return [mesh_utils.create_device_mesh((len(x),), x) for x in groups]


def _divided(devices: Sequence[Any], hosts: int) -> list[np.ndarray]:
    if len(devices) % hosts:
        raise ValueError(f"`hosts` must divide {len(devices)} devices, got {hosts}.")
    return np.split(np.array(devices, object), hosts)
