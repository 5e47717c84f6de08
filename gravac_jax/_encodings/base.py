"""The interface of encodings: what one replica sends of a bucket in one step."""

import abc
from typing import Any, ClassVar, NamedTuple

import jax

from gravac_jax import _arrays
from gravac_jax._network import Comm, Traffic


class Bucket(NamedTuple):
    """What a bucket holds; static.

    Attributes:
      n: its entries, with zeros at its end, if it was filled up.
      shapes: the shapes of its arrays, one after the other: the smallest first. The
        first and the last may be parts of larger ones. A bucket of unknown arrays has
        none.

    Example:
      See `gravac.Encoding`.
    """

    n: int
    shapes: tuple[tuple[int, ...], ...] = ()


LARGE = Bucket(2**24, ((4096, 4096),))  # where an encoding shows what it saves


class Sent(NamedTuple):
    """What came of an exchange, on one replica.

    Attributes:
      mean: `[n]` float32, the mean over replicas of what was sent, the same on all.
      residual: `[n]` float32, what this replica holds back.
      energy: `[]` float32, the energy (squared norm) of what this replica has sent.

    Example:
      See `gravac.Encoding`.
    """

    mean: jax.Array
    residual: jax.Array
    energy: jax.Array


class Encoding(abc.ABC):
    """What one replica sends of a bucket in one step. Subclass it to write your own.

    A frozen dataclass with the method's own parameters, of which the first is given by
    position. `repr` shows what differs from the defaults; it is the encoding's name in
    metrics, tables, checkpoints and errors. Encodings of one class share one state on
    a ladder: the largest that one of them makes.

    Attributes:
      suits_small_leaves: whether biases, norms and small matrices are encoded, too,
        apart from the smallest, together 1/4096 of all entries;
        `gravac.transform(compress=...)` takes precedence.

    Law:
      On every replica `sent = x - residual`, and `mean` is the mean of `sent` over
      replicas, the same bits on all of them (in float32, payloads added in the order of
      the replicas; `gravac.Dense("bfloat16")` rounds that mean once more).

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> @dataclasses.dataclass(frozen=True, repr=False)
      ... class FirstHalf(gravac.Encoding):
      ...     def traffic(self, bucket, replicas):
      ...         half = gravac.Bucket(bucket.n // 2)
      ...         return gravac.Dense().traffic(half, replicas)
      ...     def exchange(self, x, state, *, bucket, key, step, comm):
      ...         half = x[: bucket.n // 2]
      ...         energy = jnp.sum(half**2)
      ...         comm.tell(energy)
      ...         mean = comm.zeros(x).at[: half.size].set(comm.mean(half))
      ...         return gravac.Sent(mean, x.at[: half.size].set(0), energy), state
      >>> tx = gravac.transform(None, send=FirstHalf(), compress=True)
      >>> grads = jnp.array([1.0, 2.0, 3.0, 4.0])
      >>> jax.jit(tx.update)(grads, tx.init(grads))[0].tolist()
      [1.0, 2.0, 0.0, 0.0]
    """

    suits_small_leaves: ClassVar[bool] = False

    @property
    def sends_whole_entries(self) -> bool:
        """Whether each entry is either sent or held back whole: yes.

        Their mean then adds up exactly. Values may be rounded to 16 bits before they
        are sent. `gravac.Momentum(masking=True)` asks.
        """
        return True

    @property
    def needs_own_params(self) -> bool:
        """Whether it suits gradients at own params alone: no, unless overridden.

        Where entries take turns, or are rounded to one bit, gradients at the shared
        params ask again for what waits. `gravac.Fastest` takes such encodings only at
        own params, unless its ladder has no others.
        """
        return False

    @abc.abstractmethod
    def traffic(self, bucket: Bucket, replicas: int) -> Traffic:
        """Return what it costs one replica to exchange a bucket."""

    def init(self, bucket: Bucket) -> Any:
        """Return this replica's state for a bucket: an empty tuple, if there is none.

        Encodings of the same class on a ladder share the largest of theirs.
        """
        return ()

    @abc.abstractmethod
    def exchange(
        self,
        x: jax.Array,
        state: Any,
        *,
        bucket: Bucket,
        key: jax.Array,
        step: jax.Array | int,
        comm: Comm,
    ) -> tuple[Sent, Any]:
        """Send what this encoding sends of a bucket, and average what all have sent.

        Args:
          x: `[n]` float32, the compensated gradient of this replica.
          state: from `init` or the last step.
          bucket: what `x` holds.
          key: a random key, the same on every replica, new at every step.
          step: `[]` int32, exchanges before this one, the same on every replica.
          comm: the other replicas. `comm.tell(energy)` before the last message lets
            figures travel along.

        Returns:
          What came of it, and the new state.
        """

    def look(self, x: jax.Array, state: Any, bucket: Bucket, key: jax.Array) -> Any:
        """Return a sample of a bucket from which `share` and `waits` are estimated.

        Encodings of the same class share it.
        """
        return x

    def share(self, looked: Any, bucket: Bucket, replicas: int) -> jax.Array:
        """Estimate the share of the energy that a step would send, `[]` float32.

        Controllers with several encodings ask for it.
        """
        raise NotImplementedError(
            f"{self!r} is one of several encodings, and does not estimate what it would"
            f" send: give it a method `share`."
        )

    def waits(self, looked: Any, bucket: Bucket, replicas: int) -> jax.Array:
        """Estimate the steps that an entry waits until it is sent, `[]` float32.

        An exchange that sends the share a of what has gathered leaves 1 - a to the
        next, and so on: (1 - a) / a steps, if chance decides what is sent.
        """
        share = self.share(looked, bucket, replicas)
        return (1 - share) / share

    def padded_size(self, n: int) -> int:
        """Return the size of a bucket for `n` entries of leaves; default: n.

        Zeros fill up the bucket, and what is held back of them is dropped.
        """
        return n

    def __repr__(self) -> str:
        """Return the constructor, with what differs from the defaults."""
        return _arrays.constructor(self)
