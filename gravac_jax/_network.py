"""All that a training step says to other replicas, and what it costs.

All that crosses the network goes through `Comm`, in float32 or as integers; metrics in
float64, and what only one replica has, go in their own dtype. `Comm` also answers what
differs from replica to replica. With `axis_name=None` a replica is alone: the same code
runs and nothing is exchanged.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _refuse, _xla
from gravac_jax._refuse import axis_names

AxisName = str | tuple[str, ...] | None


def inner_axes(mesh: Any, axis_name: AxisName) -> tuple[str, ...]:
    """Return the axes of a mesh, if it is one, along which devices share a replica."""
    names = mesh.axis_names if isinstance(mesh, jax.sharding.Mesh) else ()
    return tuple(name for name in names if name not in axis_names(axis_name))


def join(*axes: AxisName) -> AxisName:
    """Join axes into one: a name, a tuple of names, or None if there is none."""
    given = [name for name in axes if name is not None]
    names = tuple(x for name in given for x in axis_names(name))
    return names if len(given) > 1 else given[0] if given else None


@dataclasses.dataclass(frozen=True)
class Comm:
    """The replicas along `axis_name`, seen from one of them.

    Call its methods inside shard_map, pmap or vmap over the axis. An encoding of your
    own is handed one.

    Args:
      axis_name: the mapped axis, or several in a tuple; None for one replica alone.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> mean = gravac.Comm("data").mean
      >>> jax.vmap(mean, axis_name="data")(jnp.array([1.0, 3.0])).tolist()
      [2.0, 2.0]
    """

    axis_name: AxisName

    @property
    def replicas(self) -> int:
        """N, the number of replicas; static."""
        return jax.lax.axis_size(self.axis_name or ())

    @property
    def _names(self) -> tuple[str, ...]:
        return axis_names(self.axis_name)

    @property
    def is_checked(self) -> bool:
        """Whether JAX knows what varies over the axis; static."""
        # Under check_vma=False, pmap and vmap nothing is marked as varying, not even
        # the axis index. Under check_vma=True the axis index always is.
        return bool(self._names) and not self._fixed_axes(self.replica())

    @property
    def is_simulated(self) -> bool:
        """Whether vmap maps the axis; static."""
        return bool(self._names) and not self.is_checked and bool(self._differ([]))

    def _fixed_axes(self, x: jax.Array) -> list[str]:
        varying = jax.typeof(x).manual_axis_type.varying
        return [name for name in self._names if name not in varying]

    def _differ(self, leaves: Sequence[Any]) -> list[list[bool]]:
        """Return what differs along the axis, for each vmap that maps it."""
        seen: list[list[bool]] = []

        @jax.custom_batching.custom_vmap
        def same(*given: Any) -> Any:
            return given

        @same.def_vmap
        def rule(size: int, in_batched: list[bool], *given: Any) -> Any:
            is_ours, *differ = in_batched
            seen.extend([differ] if is_ours else [])  # else vmap maps something else
            return same(*given), tuple(in_batched)

        same(self.replica(), *leaves)
        return seen

    def _alike_along(self, tree: Any) -> list[set[str]]:
        """Return along which axes each leaf is the same, as far as JAX knows."""
        leaves = list(map(jnp.asarray, jax.tree.leaves(tree)))
        if self.is_checked or self.axis_name is None:
            return [set(self._fixed_axes(x)) for x in leaves]
        levels = self._differ(leaves) or [[True] * len(leaves)]  # nothing is known
        differ = map(any, zip(*levels, strict=True))
        return [set() if x else set(self._names) for x in differ]

    def check_local(self, tree: Any) -> None:
        """Raise if a leaf of `tree` is known to be the same on every replica."""
        for path, leaf in _arrays.named_leaves(tree) if self.is_checked else ():
            if fixed := self._fixed_axes(leaf):
                _refuse.summed(path, fixed)

    def check_alike(self, before: Any, after: Any) -> None:
        """Raise if a leaf that was the same on several devices is known to differ."""
        paths = [path for path, _ in _arrays.named_leaves(after)]
        both = self._alike_along(before), self._alike_along(after)
        for path, old, new in zip(paths, *both, strict=True):
            if lost := old - new:
                _refuse.differs(path, sorted(lost))

    def check_whole(self, params: Any) -> None:
        """Raise if each device is known to have a slice of some leaf of `params`."""
        for path, leaf in _arrays.named_leaves(params) if self.is_checked else ():
            if not self._fixed_axes(leaf):
                _refuse.not_whole(path, self.axis_name)

    def is_shared(self, tree: Any) -> bool:
        """Whether some leaf of `tree` is known to be the same along some axis."""
        return self.is_checked and any(self._alike_along(tree))

    def is_known_alike(self, tree: Any) -> bool:
        """Whether JAX knows `tree` to be the same on all, by its marks or in vmap."""
        return all(x == set(self._names) for x in self._alike_along(tree))

    def cast(self, tree: Any) -> Any:
        """Mark `tree` as varying over the axis, if JAX keeps such marks."""
        if not self.is_checked:
            return tree
        return jax.tree.map(lambda x: _varying(x, self._names), tree)

    def zeros(self, like: jax.Array) -> jax.Array:
        """Return float32 zeros of the shape of `like`, marked as its mean would be.

        The zeros are the same on every replica. They vary over other axes if `like`
        does.
        """
        zeros = jnp.zeros(like.shape, jnp.float32)
        varying = jax.typeof(like).manual_axis_type.varying
        return _varying(zeros, varying - set(self._names))

    def tell(self, energy: jax.Array) -> None:
        """Take the energy of what is sent along with the next message, if possible.

        An encoding calls it before its last message. Otherwise the energy takes a
        message of its own.
        """

    def mean(self, tree: Any) -> Any:
        """Return the mean of floats over replicas, in float32, by one collective."""
        leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
        if self.axis_name is None or not leaves:
            return tree
        mean = jax.lax.pmean(self.cast(_arrays.ravel(leaves)), self.axis_name)
        return jax.tree.unflatten(structure, _arrays.unravel(mean, leaves))

    def reported_mean(self, tree: Any) -> Any:
        """Return `tree` with the mean of its floats: float32, or float64 of such.

        Those that are known to be the same on all replicas are left as they are. XLA
        sends all means together.
        """
        varies = lambda x: _arrays.is_float(x) and not self.is_known_alike(x)
        wide = lambda x: x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x
        mean = lambda x: jax.lax.pmean(self.cast(wide(x)), self.axis_name)
        return jax.tree.map(lambda x: mean(x) if varies(x) else x, tree)

    def sum(self, tree: Any) -> Any:
        """Return the sum of `tree` over replicas by one collective.

        Floats are added up in float32. Sums of integers are exact, and wrap around in
        their dtype: integers travel as float32, too, in parts so small that float32
        adds them up exactly on up to 8,192 replicas. XLA can then send these sums and
        other means in one message. An all-reduce of integers beside one in a
        conditional crashes jaxlib 0.10.2 on CPUs if the program comes from JAX's cache.
        """
        whole = lambda x: x.astype(jnp.int32) if x.dtype == bool else x
        tree = jax.tree.map(lambda x: whole(jnp.asarray(x)), tree)
        if self.axis_name is None:
            return tree
        flat, split = jax.tree.flatten(jax.tree.map(_arrays.exact_parts, tree))
        total = jax.lax.psum(self.cast(_arrays.ravel(flat)), self.axis_name)
        sums = jax.tree.unflatten(split, _arrays.unravel(total, flat))
        return jax.tree.map(lambda x, y: _arrays.from_exact_parts(y, x), tree, sums)

    def bfloat16_mean(self, sent: jax.Array) -> jax.Array:
        """Return the mean of `sent` over replicas; it travels and ends as bfloat16.

        Every replica adds up one shard in float32, rounds its mean, and all shards are
        gathered. Half the bytes of a float32 ring all-reduce.

        Args:
          sent: `[n]` float32, rounded by `_arrays.round_to_bfloat16`.
        """
        rows = jnp.pad(sent, (0, -sent.size % self.replicas)).reshape(self.replicas, -1)
        swapped = self.swap(_arrays.bfloat16_to_bits(rows))
        total = jnp.sum(_arrays.bfloat16_from_bits(swapped), axis=0)
        rounded = _arrays.round_to_bfloat16(total / self.replicas)
        shards = self.gather(_arrays.bfloat16_to_bits(rounded))
        return _arrays.bfloat16_from_bits(shards).reshape(-1)[: sent.size]

    def gather(self, x: jax.Array) -> jax.Array:
        """Return every replica's `x`, the same on all: `[replicas, *x.shape]`."""
        if self.axis_name is None:
            return x[None]
        # Only this form may leave shard_map as replicated; vmap refuses it.
        form: dict[str, Any] = {"to": "invarying"} if self.is_checked else {}
        # On TPUs XLA turns a flat all-gather into an all-reduce of twice the bytes,
        # unless 1,024 divides the size. Between barriers it stays one row a replica
        # (libtpu 0.0.42).
        row = _xla.once(self.cast(x)[None])
        return _xla.once(jax.lax.all_gather(row, self.axis_name, tiled=True, **form))

    def swap(self, x: jax.Array) -> jax.Array:
        """Return, as row r, replica r's row for this replica: `[replicas, m]`."""
        if self.axis_name is None:
            return x
        # Under vmap all_to_all fails on what is the same on all replicas.
        own = jnp.where(self.replica() < 0, jnp.zeros_like(x), x)
        return jax.lax.all_to_all(self.cast(own), self.axis_name, 0, 0)

    def first(self, x: jax.Array) -> jax.Array:
        """Return the first replica's float `x`, but for the sign of zeros."""
        return jax.lax.psum(self.cast(self.owned(x)), self.axis_name or ())

    def owned(self, x: jax.Array) -> jax.Array:
        """Return `x` on the first replica, and zeros on the others."""
        return jnp.where(self.replica() == 0, x, 0)

    def replica(self) -> jax.Array:
        """Return the index of this replica, `[]` int32."""
        return jax.lax.axis_index(self.axis_name or ())

    def contrast(self, x: jax.Array) -> jax.Array:
        """Return a float32 whose mean over replicas is 0 if `x` is the same on all."""
        last = self.replicas - 1
        return x * jnp.where(self.replica() == last, -last, 1).astype(jnp.float32)

    def of_first(self, x: jax.Array) -> jax.Array:
        """Return a float32 whose mean over replicas is the first replica's `x`."""
        return self.owned(self.replicas * x.astype(jnp.float32))


@dataclasses.dataclass(frozen=True, eq=False)
class Carrier(Comm):
    """The other replicas, for an encoding whose messages take a few figures along.

    An exchange in two stages swaps parts of a bucket, and then gathers their means. The
    first rows of words that it swaps take parts of the figures with them, each replica
    averages its part, and the next row that it gathers takes the mean along. An
    exchange that only gathers takes the figures along with the first row that it
    gathers, and one that averages with its first mean, if that has few entries. If it
    does none of these, the figures have a collective of their own. Nothing is taken
    along before the encoding tells the energy that it sends, which is one of the
    figures. A Carrier serves one exchange in one branch of one step.

    Args:
      axis_name: as for `Comm`.
      figures: `[m]` float32, to be averaged over replicas.

    Law:
      `mean_of_figures(energy)` is `Comm(axis_name).mean` of the energy and the figures,
      `[1 + m]`, but for the order in which a sum of N numbers is added up.

    Cost:
      No message, if they travel along. In two stages the bytes of a ring all-reduce of
      the figures, filled up to a multiple of N; with a gather N - 1 times those of the
      figures; with a mean those of a ring all-reduce, and a copy of what is averaged
      (`Traffic.figures`).
    """

    figures: jax.Array
    _parts: dict[str, jax.Array] = dataclasses.field(default_factory=dict, repr=False)

    def tell(self, energy: jax.Array) -> None:
        """Note the energy of what is sent, so that the figures are complete."""
        self._parts["figures"] = self.cast(_arrays.ravel([energy, self.figures]))

    def _is_ready(self, *stages: str) -> bool:
        """Return whether figures are known that no message has taken along yet."""
        return "figures" in self._parts and not self._parts.keys() & {*stages}

    def mean(self, tree: Any) -> Any:
        """Return the mean of `tree`; the first one of few entries takes figures along.

        To join many entries with the figures would copy them.
        """
        sizes = list(map(jnp.size, jax.tree.leaves(tree)))
        is_small = bool(sizes) and sum(sizes) <= COPIED_ENTRIES
        if not (is_small and self._is_ready("own", "all")):
            return super().mean(tree)
        mean, self._parts["all"] = super().mean((tree, self._parts["figures"]))
        return mean

    def swap(self, x: jax.Array) -> jax.Array:
        """Swap rows of words, `[replicas, m]`; the first take figures along."""
        if not self._is_ready("own", "all"):
            return super().swap(x)
        flat = self._parts["figures"]
        parts = jnp.pad(flat, (0, -flat.size % self.replicas))
        parts = _arrays.to_words(parts.reshape(self.replicas, -1), x.dtype)
        rows, parts = _arrays.together(super().swap, [x, parts])
        self._parts["own"] = jnp.mean(parts.view(jnp.float32), axis=0)
        return rows

    def gather(self, x: jax.Array) -> jax.Array:
        """Gather words, `[m]`; the first take figures along, or means after a swap."""
        if not self._is_ready("all"):
            return super().gather(x)
        is_mean = "own" in self._parts
        given = _arrays.to_words(self._parts["own" if is_mean else "figures"], x.dtype)
        rows, parts = _arrays.together(super().gather, [x, given])
        found = parts.view(jnp.float32)
        self._parts["all"] = found.reshape(-1) if is_mean else jnp.mean(found, axis=0)
        return rows

    def mean_of_figures(self, energy: jax.Array) -> jax.Array:
        """Return the means over replicas of an energy and the figures, `[1 + m]`.

        Call it after the exchange, with the energy that it has sent.
        """
        if "all" not in self._parts:
            return super().mean(_arrays.ravel([energy, self.figures]))
        return self._parts["all"][: 1 + self.figures.size]


def if_due(is_due: Any, take: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """Return `take()` if it is due, else `otherwise()`.

    Args:
      is_due: `[]` bool, the same on all replicas; or static, for no branch.
      take: may talk to the others.
      otherwise: talks to nobody, and returns a tree like that from `take`.
    """
    if isinstance(is_due, bool):
        return take() if is_due else otherwise()

    def like(x: jax.Array, shape: Any) -> jax.Array:
        marks = shape.manual_axis_type
        return x if marks is None else _varying(x, marks.varying)  # None under vmap

    marked = jax.tree.map(like, otherwise(), jax.eval_shape(take))
    return jax.lax.cond(is_due, take, lambda: marked)


def _varying(x: jax.Array, names: Iterable[str]) -> jax.Array:
    """Mark `x` as varying over axes; pcast refuses those over which it is marked."""
    missing = tuple(sorted({*names} - jax.typeof(x).manual_axis_type.varying))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


@dataclasses.dataclass(frozen=True)
class Axes:
    """The slow axis, over which gradients are compressed, and the fast one, if any.

    Attributes:
      slow: the replicas.
      fast: the devices of one replica; gradients are averaged whole over them.
      is_sliced: whether each of these devices owns a slice of every leaf, and the
        compiler has averaged gradients over the fast axis.
    """

    slow: Comm
    fast: Comm
    is_sliced: bool = False

    @property
    def both(self) -> Comm:
        """All devices."""
        return Comm(join(self.slow.axis_name, self.fast.axis_name))

    @property
    def alike(self) -> Comm:
        """Those who should hold the same params."""
        return self.slow if self.is_sliced else self.both

    @property
    def slice_holders(self) -> Comm:
        """Those who hold the slices of a leaf; alone if none is cut."""
        return self.fast if self.is_sliced else Comm(None)


class Traffic(NamedTuple):
    """What one collective, or several, cost one replica; everything is static.

    Attributes:
      bits: what one replica says of its bucket, indices and scales included.
      payload_bytes: what one replica puts into the collectives.
      wire_bytes: what one replica sends for them.
      messages: messages that it sends one after the other, each after the one before
        has arrived: 2 (N - 1) in a ring all-reduce, N - 1 in a ring all-gather.
      carries: how a few figures travel along: with a "swap" and a gather, with a
        "gather" alone, or with a "mean". "nothing" if they need a mean of their own.

    Example:
      See `gravac.Encoding`.
    """

    bits: int
    payload_bytes: float
    wire_bytes: float
    messages: int
    carries: str = "nothing"

    def plus(self, other: "Traffic") -> "Traffic":
        """Return the cost of both; figures travel with the other one."""
        return Traffic._make([*map(operator.add, self[:4], other[:4]), other.carries])

    def figures(self, count: int, replicas: int) -> "Traffic":
        """Return the cost of averaging so many float32 figures beside it."""
        _refuse.one_of(self.carries, "carries", ("nothing", "mean", "gather", "swap"))
        if self.carries == "gather":
            own = all_gather_traffic(FLOAT32_BYTES * count, replicas)
        elif self.carries == "swap":
            own = two_stage_traffic(FLOAT32_BYTES * -(-count // replicas), replicas)
        else:
            own = mean_traffic(count, replicas)
        return own if self.carries == "nothing" else own._replace(messages=0)


FLOAT32_BYTES, BFLOAT16_BYTES, BYTE_BITS = 4, 2, 8
# Means of no more entries take figures along, which copies them. To copy as many takes
# as long as a message on a fast network; arbitrary.
COPIED_ENTRIES = 2**20


def all_gather_traffic(payload_bytes: int, replicas: int) -> Traffic:
    """Return the cost of a ring all-gather of `payload_bytes` from each replica."""
    wire_bytes = (replicas - 1) * payload_bytes
    bits = BYTE_BITS * payload_bytes
    return Traffic(bits, payload_bytes, wire_bytes, replicas - 1, "gather")


def two_stage_traffic(part_bytes: int, replicas: int) -> Traffic:
    """Return the cost of swapping parts, one for each replica, and gathering means.

    Args:
      part_bytes: of one part, as a replica sends it to its owner, and of its mean.
      replicas: N, which is the number of parts.
    """
    payload_bytes = (replicas + 1) * part_bytes
    wire_bytes = float(2 * (replicas - 1) * part_bytes)
    bits, messages = BYTE_BITS * replicas * part_bytes, 2 * (replicas - 1)
    return Traffic(bits, payload_bytes, wire_bytes, messages, "swap")


def mean_traffic(entries: int, replicas: int) -> Traffic:
    """Return the cost of `Comm.mean` of `entries`: of a ring all-reduce."""
    payload_bytes = FLOAT32_BYTES * entries
    wire_bytes = 2 * (replicas - 1) / replicas * payload_bytes
    carries = "mean" if entries <= COPIED_ENTRIES else "nothing"
    bits, messages = BYTE_BITS * payload_bytes, 2 * (replicas - 1)
    return Traffic(bits, payload_bytes, wire_bytes, messages, carries)
