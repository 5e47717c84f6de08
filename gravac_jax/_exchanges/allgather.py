"""Everybody sends its own selection to everybody."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _collect, _comm, _compaction, _curve, _payload, _tree
from gravac_jax._comm import Comm
from gravac_jax._compressors import Threshold
from gravac_jax._compressors.base import Compressor, thinned
from gravac_jax._exchanges.base import Exchange, Exchanged, Traffic
from gravac_jax._exchanges.dense import dense_mean, dense_traffic
from gravac_jax._payload import Payload


class Selected(NamedTuple):
    """A selection from a bucket: the payload, then as in `Exchanged`."""

    payload: Payload
    residual: jax.Array
    energies: jax.Array
    energy: jax.Array


def select(
    compressor: Compressor,
    bucket: jax.Array,
    state: Any,
    k: jax.Array,
    slots: jax.Array,
    sparse: Sequence[int],
    *,
    counts: tuple[int, ...],
    key: jax.Array,
) -> tuple[Selected, Any]:
    """All of an exchange that needs no other replica.

    Args:
      compressor: chooses the entries.
      bucket: `[n]` float32.
      state: the compressor's.
      k: `[]` int32, how many entries to mark.
      slots: `[]` int32, how many the step sends: `n` if dense, 0 if skipped, else `k`.
      sparse: static, the values above 0 that `k` may have.
      counts: static, entries per rung, whose energies are asked for.
      key: a random key.

    Returns:
      The selection, its payload as large as the largest of `sparse`, and the new state.
    """
    n, energy = bucket.size, _tree.energy(bucket)
    outlook = _curve.look(bucket, counts, k, key)
    choice, state = compressor.mark(
        bucket, state, k=k, bracket=outlook.bracket, key=key
    )
    marks = thinned(choice, k, key)
    filled = sparse[0] if len(set(sparse)) == 1 else k
    collected = _collect.collect(bucket, marks, filled, max(sparse), outlook.thresholds)
    energies = _curve.energies(
        outlook, marks, counts, slots, collected, energy, n, compressor.is_blind
    )
    is_empty = (slots == n) | _tree.is_never(energies)
    residual = jnp.where(is_empty, 0, _compaction.clear(bucket, marks))
    return Selected(collected.payload, residual, energies, energy), state


@dataclasses.dataclass(frozen=True)
class AllGather(Exchange):
    """All-gathers what a compressor selects, and adds it up in replica order.

    The bucket is compressed once, for the rung that was decided; what the other rungs
    would have sent is read from that payload, for smaller factors with a sample of the
    rest. A rung that would send every entry is a dense mean instead.

    Cost:
      (N - 1) alpha + (N - 1) 8 k beta, against a dense ring's 2 (N - 1) / N 4 n beta:
      it moves fewer bytes than dense above a factor of N.

    Args:
      compressor: chooses the entries.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.AllGather(gravac.TopK()).traffic(1000, factor=100, replicas=4)
      Traffic(entries=10, payload_bytes=80, wire_bytes=240)

    References:
      Lin et al., Deep Gradient Compression, ICLR 2018; Tyagi and Swany, GraVAC, 2023.
    """

    compressor: Compressor = Threshold()  # noqa: RUF009 (frozen, without arrays)

    def init(self, n: int, ladder: tuple[float, ...]) -> Any:
        """The compressor's state."""
        del ladder
        return self.compressor.init(n)

    def exchange(
        self,
        bucket: jax.Array,
        state: Any,
        rung: jax.Array,
        *,
        ladder: tuple[float, ...],
        key: jax.Array,
        comm: Comm,
    ) -> tuple[Exchanged, Any]:
        """Mark once; then one branch per rung, and one that sends nothing."""
        n = bucket.size
        counts = tuple(self.compressor.count(n, factor) for factor in ladder)
        sparse = [k for k in counts if k < n]
        if not sparse:
            energy = _tree.energy(bucket)
            energies = jnp.broadcast_to(energy, (len(ladder),))
            mean, residual = dense_mean(bucket, rung == len(ladder), comm)
            return Exchanged(mean, residual, energies, energy), state

        # A dense step sends no payload, but looks at one: whether it pays to compress
        # again is what the controller has to know. A skipped step marks nothing.
        looked_at = sparse[len(sparse) // 2]
        marked = [*(k if k < n else looked_at for k in counts), 0]
        k = jnp.asarray(marked, jnp.int32)[rung]
        slots = jnp.asarray([*counts, 0], jnp.int32)[rung]
        selected, state = select(
            self.compressor, bucket, state, k, slots, sparse, counts=counts, key=key
        )
        packed = _payload.pack(selected.payload)

        def mean_of(k: int) -> Any:
            if k == n:
                return lambda: comm.mean(bucket)
            gathered = lambda: comm.gather(packed[:, :k])  # [replicas, 2, k]
            return lambda: _payload.add_up(gathered(), n, comm.replicas)

        branches = [*map(mean_of, counts), lambda: jnp.zeros(n, jnp.float32)]
        mean = jax.lax.switch(rung, branches)
        return Exchanged(mean, *selected[1:]), state

    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """8 bytes an entry that is sent; 4 where all are."""
        k = self.compressor.count(n, factor)
        if k == n:
            return dense_traffic(n, replicas)
        payload_bytes = _payload.ENTRY_BYTES * k
        wire_bytes = _comm.gather_wire_bytes(payload_bytes, replicas)
        return Traffic(k, payload_bytes, wire_bytes)
