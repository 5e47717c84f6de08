"""What goes in one step in few bits: all entries, or some of them in sections.

The first section of a message is the part whose turn it is, or all entries. Some leaves
may be spared: they go in every step, in a second section, with more bits. They are the
first of the bucket. If the first section is all entries, it has them, too, and what the
second one says of them counts.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax._buckets import MIN_ENTRIES
from gravac_jax._selection.entries import WORD_BITS


class Section(NamedTuple):
    """A section of a message.

    Attributes:
      entries: the number of its entries.
      length: the entries of a row, which share scales; a multiple of 32.
      bits: the bits of an entry, as a replica sends it.
      bits_back: the bits of an entry of the mean, if there is a second stage.
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
    def part(self) -> int:
        """The entries of the part that is due."""
        return self.sections[0].entries

    @property
    def is_whole(self) -> bool:
        """Whether this part is all entries."""
        return self.part == self.n

    @property
    def spared(self) -> int:
        """The entries of leaves that go in every step."""
        return sum(x.entries for x in self.sections[1:])

    @property
    def overridden_rows(self) -> int:
        """Rows of the first section that spared leaves have, too, up to a row's end.

        What is sent of them counts once: the energy of these rows is left out.
        """
        return self.spared // self.sections[0].length if self.is_whole else 0

    @property
    def words(self) -> int:
        """What `Traffic.entries` counts: entries once each, in the bits of the part."""
        due = self.sections[0]
        entries = due.rows * due.length + (0 if self.is_whole else self.spared)
        return due.bits * (entries // WORD_BITS)

    @property
    def turns(self) -> int:
        """How many parts take turns. The last may overlap the one before."""
        return -(-(self.n - self.spared) // self.part) if self.n else 1

    def starts(self, step: jax.Array | int) -> list[jax.Array | int]:
        """Return the first entry of each section: 0, if the part is all entries."""
        turn = self.spared + step % self.turns * self.part
        due = jnp.minimum(turn, self.n - self.part)
        return [due, 0][: len(self.sections)]


def small_ends(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the entries up to each small leaf's end, as long as leaves are small."""
    sizes = itertools.takewhile(lambda size: size < MIN_ENTRIES, map(math.prod, shapes))
    return list(itertools.accumulate(sizes))
