"""What is written beside the arrays of a checkpoint, so that damage to any is seen.

Orbax's format does not see a bit that has flipped in an array.
"""

import json
import zlib
from typing import Any

import jax

from gravac_jax import _consistency
from gravac_jax._arrays import Path
from gravac_jax._checkpoint import restore_checks
from gravac_jax._checkpoint.ledger import Named

_on_device = jax.jit(_consistency.leaf_checksum)


def write(written: Named, data: Any) -> dict[str, Any]:
    """What is written beside the arrays, so that damage to any of it is seen."""
    checksums = {"/".join(path): x for path, x in _checksums(written).items()}
    try:
        text = json.dumps({"data": data, "checksums": checksums})
        if json.loads(text)["data"] != data:
            raise ValueError("it comes back as something else")
    except (TypeError, ValueError) as error:
        restore_checks.json_data(data, error)
    return {"label": text, "crc32": zlib.crc32(text.encode())}


def read(found: Any, shapes: Named) -> dict[str, Any]:
    """What was written; if it was not by this class, no data and no checksums."""
    is_ours = any(path[-1:] == ("version",) for path in shapes)
    if shapes and not found and not is_ours:
        return {"data": None, "checksums": {}}
    text = (found or {}).get("label", "")
    if not text or zlib.crc32(text.encode()) != found.get("crc32"):
        raise ValueError("what was written about it is damaged or missing")
    label = json.loads(text)
    if set(label["checksums"]) != {"/".join(path) for path in shapes}:
        raise ValueError("the list of its arrays is damaged")
    return label


def check(read: Named, checksums: dict[str, int]) -> None:
    """Complain of arrays that are not what was written."""
    found = {"/".join(path): x for path, x in _checksums(read).items()}
    bad = [name for name, x in found.items() if checksums.get(name, x) != x]
    if bad:
        raise ValueError(f"{len(bad)} of its arrays are damaged: {', '.join(bad[:3])}")


def _checksums(arrays: Named) -> dict[Path, int]:
    on_host = _consistency.host_checksum
    one = lambda x: (_on_device if isinstance(x, jax.Array) else on_host)(x)
    sums = jax.device_get({path: one(x) for path, x in arrays.items()})
    return {path: int(x) for path, x in sums.items()}
