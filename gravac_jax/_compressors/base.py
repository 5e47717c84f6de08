"""The interface of compressors, and its laws.

A compressor sees one flat bucket and a static number of entries. It knows nothing of
replicas, of pytrees or of what was left over from earlier steps.
"""

import abc
from typing import Any

import jax

from gravac_jax._payload import Payload


class Compressor(abc.ABC):
    """Chooses which entries of a bucket travel.

    Law:
      The payload holds exactly `count(n, factor)` entries of the bucket, unchanged and
      none twice, and with it at least the average energy:
      `|bucket - sent|**2 <= (1 - k / n) |bucket|**2`.
      Multi-level compression is free: `narrow(compress(x, k), j)` is
      `compress(x, j)` for every `j <= k`.
    """

    @abc.abstractmethod
    def init(self, n: int) -> Any:
        """The state carried from step to step, for a bucket of `n` entries."""

    @abc.abstractmethod
    def count(self, n: int, factor: float) -> int:
        """k, the entries that are sent of `n` at `factor`; static."""

    @abc.abstractmethod
    def compress(
        self, bucket: jax.Array, state: Any, *, k: int, key: jax.Array
    ) -> tuple[Payload, Any]:
        """Choose `k` entries of `bucket`.

        Args:
          bucket: `[n]` float32.
          state: from `init` or the last call.
          k: static, from `count`.
          key: a random key, the same on every replica, new at every step.

        Returns:
          The payload and the new state.
        """

    @abc.abstractmethod
    def narrow(self, payload: Payload, k: int) -> Payload:
        """Compress a payload further, to `k` entries, without the bucket.

        The second level of GraVAC's multi-level compression (Tyagi and Swany, 2023).
        """
