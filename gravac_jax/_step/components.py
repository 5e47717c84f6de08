"""Components: what a transform is made of, and the state that it begins with."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _buckets, _checks, _info, _state, _step_checks
from gravac_jax._buckets import Buckets
from gravac_jax._clipping import Clip
from gravac_jax._collectives import AxisName
from gravac_jax._controllers.base import Controller
from gravac_jax._controllers.cost_model import WireCost
from gravac_jax._error_feedback import NoMemory
from gravac_jax._error_feedback.base import Memory
from gravac_jax._exchanges.base import Exchange
from gravac_jax._slices import Slices
from gravac_jax._state import LocalState, TransformState


@dataclasses.dataclass(frozen=True)
class Components:
    """The components of one transform.

    The arguments are those of `gravac.transform`.
    """

    axis_name: AxisName
    dense_axis_name: AxisName
    is_sharded: bool
    slices: Slices | None
    clip: Clip | None
    weight_decay: float
    exchange: Exchange
    memory: Memory
    controller: Controller
    compress: Any
    delay: int
    wire: WireCost | None
    seed: int
    check_every: int

    def __post_init__(self) -> None:
        _checks.axis(self.axis_name)
        _checks.two_axes(self.axis_name, self.dense_axis_name, self.is_sharded)
        why = "It is the share of the params that is added to their gradient."
        _checks.within(self.weight_decay, "weight_decay", 0, 1, why)
        if self.clip is not None:
            _checks.component(self.clip, Clip, "clip", "gravac.ClipByGlobalNorm(1.0)")
        if self.wire is not None:
            wires = "gravac.WireCost(), or probe.read(file)"
            _checks.component(self.wire, WireCost, "wire", wires)
        _checks.ladder(self.controller.ladder)
        _checks.delay(self.delay)
        _checks.seed(self.seed)
        if self.waits and isinstance(self.memory, NoMemory):
            raise ValueError(
                "`delay` and gravac.Every need a memory: what is not sent yet waits"
                " there, and NoMemory() forgets it. Use memory=gravac.Residual(), the"
                " default."
            )
        if self.memory.masks and not self.exchange.sends_whole_entries:
            _checks.cannot_mask(self.memory, self.exchange)
        if self.memory.needs_leaves and self.is_sharded:
            raise ValueError(
                "`memory` runs an optimizer on whole leaves, and with `sharded` each"
                " device has slices of them. Use an optimizer that works entry by"
                " entry: memory=gravac.Steps(optax.adam(1e-3))."
            )
        if self.check_every:
            _checks.positive_integer(
                self.check_every, "check_every", "steps, or 0 for never"
            )

    @property
    def waits(self) -> bool:
        """Whether a gradient waits in the memory before the others hear of it."""
        waits = bool(self.delay) or self.controller.has_rounds
        return waits or self.memory.forgets

    def init(self, params: Any) -> TransformState:
        """Return the state before the first step, in its local form."""
        _step_checks.update.gradients(params, "params")
        buckets = self.plan(params)
        _buckets.warn_if_wide(buckets)
        if self.compress is not False:
            _buckets.warn_if_empty(buckets)
        if self.slices is None:
            return self.initial(buckets)
        self.slices.check(params)
        return self.slices.place(functools.partial(self.initial, buckets))

    def plan(self, tree: Any, like: Any = None) -> Buckets:
        """Decide which leaves are compressed; buckets hold what a device owns.

        Args:
          tree: what is packed, whose dtypes the buckets keep.
          like: the params that `compress` is asked about, if not `tree`.
        """
        asked = tree if like is None else like
        buckets = _buckets.plan(asked, self.compress, self.exchange.padded_size)
        if like is not None:
            buckets = dataclasses.replace(buckets, leaves=_buckets.leaves_of(tree))
        if self.slices is None:
            return buckets
        # Few bits would round the zeros that stand for a leaf of another device.
        is_cut = self.slices.are_cut(buckets.leaves)
        both = zip(buckets.is_compressed, is_cut, strict=True)
        leaves = self.slices.shapes(buckets.leaves)
        chosen = tuple(map(all, both))
        return dataclasses.replace(buckets, leaves=leaves, is_compressed=chosen)

    def initial(self, buckets: Buckets) -> TransformState:
        """Return the state before the first step, of what a device owns."""
        sizes, ladder = buckets.sizes, self.controller.ladder
        exchanges = zip(self.shaped(buckets), sizes, strict=True)
        memories = zip(self.memories(buckets), buckets.part_sizes, strict=True)
        rung, controller = self.controller.init()
        told, rounds = (), ()
        if self.waits:
            told = _state.nothing_told(self.controller)
        if self.controller.has_rounds:
            rounds = _state.first_round(self.controller, controller)
        return TransformState(
            steps=jnp.zeros((), jnp.int32),
            ladder=jnp.asarray(ladder, jnp.float32),
            layout=self._layout(buckets),
            local=LocalState(
                replica=jnp.full((), -1, jnp.int32),
                told=told,
                memory=tuple(x.init(n) for x, n in memories),
                exchange=tuple(x.init(n, ladder) for x, n in exchanges),
            ),
            rung=rung,
            ahead=jnp.stack([rung, rung]),
            controller=controller,
            past_rungs=jnp.full(_state.PAST_STEPS, -1, jnp.int32),
            round=rounds,
            info=_info.before_the_first_step(len(ladder)),
        )

    def _layout(self, buckets: Buckets) -> jax.Array:
        slices = 1 if self.slices is None else self.slices.inner_devices
        pieces = [(*piece, slices) for piece in buckets.layout]
        return jnp.asarray(pieces, jnp.int32).reshape(-1, 3)

    def memories(self, buckets: Buckets) -> list[Memory]:
        """Return the memory of each bucket, and of the leaves that go dense."""
        if not self.memory.needs_leaves:
            return [self.memory for _ in buckets.part_sizes]
        if not buckets.are_whole:
            raise ValueError(
                f"`memory` runs an optimizer on whole leaves, and a leaf lies in two of"
                f" {len(buckets.sizes)} buckets, of at most 2**30 entries each. Use an"
                f" optimizer that works entry by entry:"
                f" memory=gravac.Steps(optax.adam(1e-3))."
            )
        return [self.memory.of_leaves(x) for x in buckets.named_shapes]

    def shaped(self, buckets: Buckets) -> list[Exchange]:
        """Return the exchange of each bucket."""
        return [self.exchange.shaped(shapes) for shapes in buckets.shapes]
