"""Indices as they are: the off switch of the family."""

import dataclasses

import jax

from gravac_jax._encoding.base import IndexEncoding


@dataclasses.dataclass(frozen=True)
class Int32(IndexEncoding):
    """Indices travel as they are: the default.

    Cost:
      4 bytes an entry.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.AllGather(indices=gravac.Int32()).traffic(10_000, 100, replicas=2)
      Traffic(entries=100, payload_bytes=600, wire_bytes=600, messages=1)
    """

    def encode(self, indices: jax.Array, n: int) -> tuple[jax.Array, ...]:
        """The indices."""
        del n
        return (indices,)

    def decode(self, parts: tuple[jax.Array, ...], k: int, n: int) -> jax.Array:
        """The indices."""
        del k, n
        return parts[0]
