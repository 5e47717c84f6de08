"""Components: what a transform is made of, and the state that it begins with."""

import dataclasses
import functools
import operator
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _refuse
from gravac_jax._controllers.base import Controller, check_ladder
from gravac_jax._encodings.base import Bucket
from gravac_jax._encodings.dense import Dense
from gravac_jax._encodings.ladder import Ladder
from gravac_jax._evidence.cost_model import WireCost
from gravac_jax._memory.base import Memory
from gravac_jax._network import AxisName
from gravac_jax._step import bucketing, norms, step_info
from gravac_jax._step.bucketing import Buckets
from gravac_jax._step.clipping import ClipByGlobalNorm
from gravac_jax._step.slicing import Slices
from gravac_jax._step.states import PAST_STEPS, LocalState, Round, Told, TransformState


@dataclasses.dataclass(frozen=True)
class Components:
    """The components of one transform.

    The arguments are those of `gravac.transform`; `controller` is that of `send`, or
    one that always takes the only encoding.
    """

    axis_name: AxisName
    fast_axis_name: AxisName
    slices: Slices | None
    clip: ClipByGlobalNorm | None
    weight_decay: float
    memory: Memory
    controller: Controller
    every: int | Callable[[Any], Any]
    compress: Any
    delay: int
    network: WireCost | None

    def __post_init__(self) -> None:
        _refuse.two_axes(self.axis_name, self.fast_axis_name)
        _refuse.number(self.weight_decay, "weight_decay", low=0, high=1)
        memories = "gravac.Residual() or gravac.OwnOptimizer(optax.adam(1e-3))"
        _refuse.instance(self.memory, Memory, "memory", memories)
        if self.clip is not None:
            clips = "gravac.ClipByGlobalNorm(1.0)"
            _refuse.instance(self.clip, ClipByGlobalNorm, "clip", clips)
        if self.network is not None:
            networks = "gravac.WireCost() or probe.read(file)"
            _refuse.instance(self.network, WireCost, "network", networks)
        check_ladder(self.controller.ladder, type(self.controller).__name__)
        _refuse.one_of(self.delay, "delay", (0, 1))
        if not callable(self.every):
            _refuse.count(self.every, "every", "steps; a function of the step may, too")
        self._refuse_pairs()

    def _refuse_pairs(self) -> None:
        """Refuse components that do not go together."""
        for encoding in self.controller.ladder:
            if self.memory.masking and not encoding.sends_whole_entries:
                raise ValueError(
                    f"a memory that masks needs encodings that send whole entries, such"
                    f" as gravac.TopK(100), got {encoding!r}: write"
                    f" memory=gravac.Momentum(0.9, masking=False)."
                )
        if self.memory.by_leaf and self.slices is not None:
            _refuse.by_leaf("with `shardings` each device has slices of them")

    @property
    def is_told_late(self) -> bool:
        """Whether a gradient waits in the memory before the others hear of it."""
        return bool(self.delay) or self.has_rounds

    @property
    def needs_own_params(self) -> bool:
        """Whether gradients at the shared params cost much, whatever is decided."""
        at_shared = [self.controller.ladder[i] for i in self.controller.reach(False)]
        holds = self.memory.is_at_own_params and at_shared != [Dense()]
        return self.is_told_late or holds or any(x.needs_own_params for x in at_shared)

    @property
    def has_rounds(self) -> bool:
        """Whether some steps are local and exchange nothing."""
        return self.every != 1

    @property
    def kinds(self) -> int:
        """Of how many kinds a timed step may be: a rung, or with rounds local."""
        return len(self.controller.ladder) + self.has_rounds

    def round_steps(self, step: jax.Array) -> jax.Array:
        """Return the length of the round that begins at a step, `[]` int32."""
        steps = self.every(step) if callable(self.every) else self.every
        return jnp.maximum(jnp.int32(jnp.round(steps)), 1)

    def init(self, params: Any) -> TransformState:
        """Return the state before the first step: of one replica, or placed slices."""
        _refuse.gradients(params, "params")
        buckets = self.plan(params)
        bucketing.warn_if_wide(buckets)
        if self.compress is not False:
            bucketing.warn_if_empty(buckets)
        if self.slices is None:
            return self.initial(buckets)
        self.slices.cuts(jax.tree.leaves(params))  # refuses: arrays show how they lie
        return self.slices.place(functools.partial(self.initial, buckets))

    def plan(self, tree: Any, like: Any = None) -> Buckets:
        """Decide which leaves are compressed; buckets hold what a device owns.

        Args:
          tree: what is packed, whose dtypes the buckets keep.
          like: the params that `compress` is asked about, if not `tree`.
        """
        asked = tree if like is None else like
        suits = all(x.suits_small_leaves for x in self.controller.ladder)
        padded = lambda n: max(x.padded_size(n) for x in self.controller.ladder)
        buckets = bucketing.plan(asked, self.compress, padded, suits)
        leaves, chosen = bucketing.leaves_of(tree), buckets.is_compressed
        if self.slices is not None:
            # Few bits would round the zeros that stand for a leaf of another device.
            leaves, are_cut = self.slices.slices_of(leaves)
            chosen = tuple(map(operator.and_, chosen, are_cut))
        return dataclasses.replace(buckets, leaves=leaves, is_compressed=chosen)

    def initial(self, buckets: Buckets) -> TransformState:
        """Return the state before the first step, of what a device owns."""
        ladder = self.controller.ladder
        memories = zip(self.memories(buckets), buckets.sizes, strict=True)
        rung, controller = self.controller.init()
        told, rounds, known = (), (), ()
        sharing = 1 if self.slices is None else self.slices.inner_devices
        layout = [(*piece, sharing) for piece in buckets.layout]
        if self.memory.keeps_norm:
            known = tuple(map(norms.none, buckets.sizes))
        if self.is_told_late:
            zeros = lambda *shape: jnp.zeros(shape, jnp.float32)
            rungs = zeros(len(ladder)) if self.controller.looks_at == "gradient" else ()
            times, own_norms = zeros(2, self.kinds), tuple(map(norms.untold, known))
            # Before the first step there is nothing to tell.
            told = Told(zeros(), zeros(), (zeros(), zeros()), rungs, times, own_norms)
        if self.has_rounds:
            first = self.round_steps(jnp.zeros((), jnp.int32))
            rounds = Round(first, self.round_steps(first), jnp.zeros((), jnp.int32))
        return TransformState(
            steps=jnp.zeros((), jnp.int32),
            ladder=jnp.array([zlib.crc32(repr(x).encode()) for x in ladder], "uint32"),
            layout=jnp.asarray(layout, jnp.int32),
            local=LocalState(
                replica=jnp.full((), -1, jnp.int32),
                told=told,
                memory=tuple(x.init(n) for x, n in memories),
                encodings=tuple(x.init() for x in self.ladders(buckets)),
                norms=known,
            ),
            decided=rung,
            next_rungs=jnp.stack([rung, rung]),
            controller=controller,
            past_rungs=jnp.full(PAST_STEPS, -1, jnp.int32),
            round=rounds,
            loss=jnp.zeros((), jnp.float32),
            info=step_info.before_the_first_step(len(ladder)),
        )

    def memories(self, buckets: Buckets) -> list[Memory]:
        """Return the memory of each bucket, and of the leaves that go dense."""
        if not self.memory.by_leaf:
            return [self.memory for _ in buckets.sizes]
        leaves = [x.leaf for part in buckets.parts for x in part]
        if len(set(leaves)) < len(leaves):
            _refuse.by_leaf(f"a leaf lies in two of {len(buckets.parts) - 1} buckets")
        return list(map(self.memory.of_leaves, buckets.named))

    def ladders(self, buckets: Buckets) -> list[Ladder]:
        """Return the encodings of each bucket."""
        ladder = self.controller.ladder
        is_looked_at = len(ladder) > 1 and self.controller.looks_at == "bucket"
        pairs = zip(buckets.sizes[:-1], buckets.parts[:-1], strict=True)
        each = [Bucket(n, tuple(x.shape for x in part)) for n, part in pairs]
        return [Ladder(ladder, bucket, is_looked_at) for bucket in each]
