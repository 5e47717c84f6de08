"""What goes in one step in few bits: all entries, or some of them in sections.

Where parts of a bucket take turns, the first section of a message is the part that is
due. Some leaves may be spared: they go in every step, in a second section, with more
bits. They are the first of the bucket.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax._buckets import MIN_ENTRIES


class Section(NamedTuple):
    """A section of a message.

    Attributes:
      entries: the number of its entries.
      length: the entries of a row, which share scales; a multiple of 32.
      bits: the bits of an entry, as a replica sends it.
      bits_back: the bits of an entry of the mean, where that is rounded as well.
    """

    entries: int
    length: int
    bits: int
    bits_back: int

    @property
    def rows(self) -> int:
        """How many rows it has, of which the last may be padded."""
        return -(-self.entries // self.length)


class Message(NamedTuple):
    """What goes in one step.

    Attributes:
      n: entries of the bucket.
      sections: that of the part that is due, and that of spared leaves, if any.
    """

    n: int
    sections: tuple[Section, ...]

    @property
    def entries(self) -> int:
        """The entries that go."""
        return sum(x.entries for x in self.sections)

    @property
    def part(self) -> int:
        """The entries of the part that is due."""
        return self.sections[0].entries

    @property
    def spared(self) -> int:
        """The entries of leaves that go in every step."""
        return self.entries - self.part

    @property
    def parts(self) -> int:
        """How many parts take turns. The last may overlap the one before."""
        return max(1, -(-(self.n - self.spared) // max(self.part, 1)))

    def starts(self, step: jax.Array | int) -> list[jax.Array | int]:
        """Return the first entry of each section, `[]` int32."""
        turn = self.spared + step % self.parts * self.part
        due = jnp.minimum(turn, self.n - self.part)
        return [due, 0][: len(self.sections)]


def small_entries(shapes: Sequence[tuple[int, ...]], most: int) -> int:
    """Return how many entries the first leaves have that are small: `most` at most.

    Leaves are spared whole or not at all.
    """
    sizes = itertools.takewhile(lambda size: size < MIN_ENTRIES, map(math.prod, shapes))
    ends = itertools.takewhile(lambda end: end <= most, itertools.accumulate(sizes))
    return max(ends, default=0)
