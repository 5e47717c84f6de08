"""The label that lies beside the arrays of a checkpoint: JSON with a CRC.

It has the version, `data`, and a checksum of each array. Orbax does not notice a
flipped bit: its OCDBT store and zarr3 index have a CRC, but the data of the arrays and
the file with the metadata have none. This was tried for Orbax 0.12.8 with its four
storage options, by flipping bits in every file.
"""

import contextlib
import json
import zlib
from typing import Any

import jax
import numpy as np

from gravac_jax._step import consistency

VERSION = 9

Named = dict[str, Any]  # arrays and numbers by their names in a checkpoint

_checksum_on_device = jax.jit(consistency.leaf_checksum)


def new(named: Named, data: Any, pieces: Any) -> dict[str, Any]:
    """Return the label to store beside arrays.

    Args:
      named: the arrays.
      data: the position in the training data.
      pieces: those of the buckets of the transform's state, None without one.

    Raises:
      TypeError: if an array has no checksum, or JSON cannot store `data`.
    """
    content = {"version": VERSION, "data": data, "checksums": checksums(named)}
    content["layout"] = np.asarray(pieces).tolist()  # of None it is None
    text = json.dumps(content)
    return {"label": text, "crc32": zlib.crc32(text.encode())}


def read(metadata: Any) -> tuple[Named, dict[str, Any]]:
    """Return Orbax's metadata of each array, and the label: `data`, `checksums`, ...

    Args:
      metadata: what Orbax tells of a checkpoint, with the label.

    Raises:
      ValueError: if the label is damaged, does not fit the arrays, or is of a
        checkpoint of another version.
    """
    stored, saved = metadata.custom_metadata or {}, metadata.metadata or {}
    text, crc = stored.get("label", ""), stored.get("crc32")
    is_whole = zlib.crc32(text.encode()) == crc
    content = json.loads(text) if is_whole else {"version": VERSION, "checksums": {}}
    version = content.get("version", "before 8")
    has = "checksums that are damaged or missing"
    if version != VERSION:
        has = f"version {version}, and this gravac_jax reads {VERSION}"
    elif saved and content["checksums"].keys() == saved.keys():
        return saved, content
    raise ValueError(
        f"it has {has}: restore it with what saved it, deliver what replicas hold back,"
        f" if anything (gravac.flush), and begin with its params, step.init(params) or"
        f" gravac.place((params, tx.init(params)), mesh)"
    )


def checksums(named: Named) -> dict[str, int]:
    """Return the checksum of each array or number.

    Raises:
      TypeError: if one has none.
    """
    return {name: _checksum(name, x) for name, x in named.items()}


def _checksum(name: str, x: Any) -> int:
    # JAX's takes no complex numbers, and neither an odd number of halves of a byte.
    with contextlib.suppress(TypeError, ValueError):
        if isinstance(x, jax.Array):
            # One after the other: a sharded array's has a collective, and many programs
            # with collectives at once can deadlock on devices that share a processor.
            return int(_checksum_on_device(x))
        if isinstance(x, np.ndarray) or type(x) in (int, float):
            return consistency.host_checksum(x)
    raise TypeError(
        f"`{name}` is a {getattr(x, 'dtype', type(x).__name__)}, which cannot be"
        f" saved: make it an array of real numbers, or leave it out."
    )
