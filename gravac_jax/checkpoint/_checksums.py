"""Notice damaged checkpoints: a checksum of each array, beside the arrays.

Orbax does not notice a flipped bit: its OCDBT store and zarr3 index have a CRC, but the
data of the arrays and the file with the metadata have none. This was tried for Orbax
0.12.8 with its four storage options, by flipping bits in every file.
"""

import contextlib
import json
import zlib
from typing import Any

import jax

from gravac_jax._loop import consistency
from gravac_jax.checkpoint._layout import Named, Path

_on_device = jax.jit(consistency.leaf_checksum)


def label(named: Named, data: Any) -> dict[str, Any]:
    """Return the metadata to store beside the arrays: a text, and its CRC.

    The text is JSON, `{"data": data, "checksums": {"0/dense/kernel": 123, ...}}`.

    Raises:
      TypeError: if an array has no checksum; if JSON does not give `data` back.
    """
    content = {"data": data, "checksums": checksums(named)}
    with contextlib.suppress(TypeError, ValueError):
        text = json.dumps(content)
        if json.loads(text)["data"] == data:
            return {"label": text, "crc32": zlib.crc32(text.encode())}
    raise TypeError(
        f"JSON gives back only numbers and strings, in lists and dicts with string"
        f" keys: make `data` of these, got {data!r}."
    )


def read_label(metadata: Any, saved: Named) -> tuple[Any, dict[str, int]]:
    """Return `data` and the checksums of the arrays.

    Args:
      metadata: what was stored beside the arrays.
      saved: what was found of the arrays, by path.

    Raises:
      ValueError: if the metadata is damaged, or does not fit the arrays.
    """
    text, crc = (metadata or {}).get("label", ""), (metadata or {}).get("crc32")
    if not text or zlib.crc32(text.encode()) != crc:
        raise ValueError(
            "the file with its checksums is damaged or missing. What was not saved by"
            " gravac_jax.checkpoint has none: restore it as it was saved, and begin"
            " with its params, step.init(params) or gravac.place((params,"
            " tx.init(params)), mesh)"
        )
    content = json.loads(text)
    if content["checksums"].keys() != set(map("/".join, saved)):
        raise ValueError("the list of its arrays is damaged")
    return content["data"], content["checksums"]


def verify(named: Named, expected: dict[str, int]) -> None:
    """Raise ValueError if an array is not what was saved."""
    bad = [name for name, x in checksums(named).items() if expected[name] != x]
    if bad:
        raise ValueError(f"{len(bad)} of its arrays are damaged: {', '.join(bad[:3])}")


def checksums(named: Named) -> dict[str, int]:
    """Return the checksum of each array or number, by its path joined by slashes."""
    return {"/".join(path): _checksum(path, x) for path, x in named.items()}


def _checksum(path: Path, x: Any) -> int:
    # No checksum takes complex numbers, or an odd number of halves of a byte.
    with contextlib.suppress(TypeError, ValueError):
        if isinstance(x, jax.Array):
            # One after the other: a sharded array's has a collective, and many programs
            # with collectives at once can deadlock on devices that share a processor.
            return int(_on_device(x))
        if hasattr(x, "dtype") or type(x) in (int, float):
            return int(consistency.host_checksum(x))
    raise TypeError(
        f"`tree` holds a {getattr(x, 'dtype', type(x).__name__)} at {'/'.join(path)},"
        f" which cannot be saved: make it an array of real numbers, or leave it out."
    )
