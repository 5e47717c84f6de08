"""What each rung of a ladder costs, in all buckets of a step."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gravac_jax import _network, _refuse
from gravac_jax._encodings.dense import Dense
from gravac_jax._encodings.ladder import Ladder
from gravac_jax._network import Traffic


class RungCosts(NamedTuple):
    """What each rung sends. Static.

    Attributes:
      factors: `[rungs]`, bits of the buckets in float32 over bits sent.
      payload_bytes: `[rungs]`.
      wire_bytes: `[rungs]`.
      messages: `[rungs]`, sent one after the other.
      is_dense: `[rungs]`, 1 where nothing is encoded, else 0.
      dense: a float32 mean of all leaves.
    """

    factors: np.ndarray
    payload_bytes: np.ndarray
    wire_bytes: np.ndarray
    messages: np.ndarray
    is_dense: np.ndarray
    dense: Traffic


def rung_costs(
    ladders: Sequence[Ladder], entries: int, size: int, replicas: int, rides: bool
) -> RungCosts:
    """Work out what each rung sends.

    Args:
      ladders: the encodings of each bucket.
      entries: of all leaves, without the zeros that fill up a bucket.
      size: how many numbers replicas average in every step, dense leaves included.
      replicas: N.
      rides: whether they travel with the first bucket.
    """
    fused = sum(x.bucket.n for x in ladders)
    dense_bits = 8 * _network.FLOAT32_BYTES * fused
    apart = _network.mean_traffic(size, replicas)
    beside = [(x, size if rides and i == 0 else 0) for i, x in enumerate(ladders)]
    rows = []
    for rung in range(len(ladders[0].encodings)):
        parts = [ladder.traffic(rung, count, replicas) for ladder, count in beside]
        sent = functools.reduce(Traffic.plus, parts if rides else [*parts, apart])
        bits = sum(x.bits for x in parts)
        is_dense = all(x.sent_at(replicas)[rung] == Dense() for x in ladders)
        rows.append((dense_bits / bits if bits else 1.0, *sent[1:4], is_dense))
    # Without figures: beside a few entries they weigh more, and each kind of message
    # carries others.
    bytes_of = lambda bucket, x: x.traffic(bucket, replicas).wire_bytes
    alone = [[bytes_of(x.bucket, y) for y in x.sent_at(replicas)] for x in ladders]
    bytes_alone = np.sum(alone, axis=0)
    if np.any(np.diff(bytes_alone) > 0):
        pairs = zip(ladders[0].encodings, bytes_alone, strict=True)
        listed = "".join(f"\n  {x!r:<28} {n:14,.0f}" for x, n in pairs)
        raise ValueError(
            f"the bytes of a ladder must fall, got for {replicas} replicas and a step"
            f" of {fused:,} entries:{listed}\nPut the encodings in the"
            f" order of their bytes, or leave one out."
        )
    each = np.asarray(rows, np.float32).T
    return RungCosts(*each, dense=_network.mean_traffic(entries, replicas))


def warn_if_dense(ladders: Sequence[Ladder], replicas: int) -> None:
    """Warn about rungs that are dense because their payloads would weigh more."""
    pairs = lambda x: zip(x.encodings, x.sent_at(replicas), strict=True)
    sent = [dict(pairs(x)) for x in ladders if x.bucket.n]
    becomes_dense = lambda x: any(y[x] != x and isinstance(y[x], Dense) for y in sent)
    if named := list(filter(becomes_dense, ladders[0].encodings)):
        _refuse.warn(
            f"with {replicas} replicas {', '.join(map(repr, named))} would send more"
            f" bytes than a dense step, which is taken instead: but for the start of a"
            f" warm-up, choose gravac.Bits(2) or gravac.LowRank(4)."
        )
