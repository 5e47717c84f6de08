"""An optimizer before the exchange: replicas exchange updates, not gradients."""

import copy
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gravac_jax import _arrays, _refuse
from gravac_jax._memory.base import Leaves, Memory

SIDE = 8191  # of the matrix on which an optimizer is traced; arbitrary


class OwnOptimizerState(NamedTuple):
    """The state of `OwnOptimizer` on one replica.

    Attributes:
      optimizer: the state of the optimizer, for a flat vector `[n]` of params, or for
        a dict of leaves.
      residual: `[n]` float32, what this replica still has to send.
    """

    optimizer: Any
    residual: jax.Array


@dataclasses.dataclass(frozen=True)
class OwnOptimizer(Memory):
    """Lets each replica run an optimizer of its own, and exchanges its updates.

    After an exchange that sends little, an optimizer sees gradients that are sparse,
    rounded or late: Adam's second moment would be that of what arrives, and momentum
    would begin when a gradient arrives. Here each replica's optimizer sees its own
    gradients as they are, and its updates are added to what the replica holds back.
    What the exchange does not send stays, and is sent later.

    It takes the place of the optimizer: `gravac.adamw` and `gravac.sgd` are of this
    kind. Take gradients at `gravac.own_params`, as `gravac.train_step` does. At the
    shared params a replica would ask again for the updates that it holds back.

    Any transformation of Optax will do that works entry by entry: it sees the buckets,
    flat vectors, in place of the params. SGD, Adam, Lion and RMSProp do. Muon,
    Adafactor and LAMB look at whole leaves, and are refused without `by_leaf`, as are
    clips by a norm. Those that remember the params that they began with, as
    schedule-free ones and Prodigy do, are refused: other replicas' updates move them.

    Give it the whole optimizer, such as `optax.adamw(1e-3)`, after which nothing may
    scale its updates: one is then scaled by the learning rate at which it was made,
    even if it is sent later, and what decays are the replica's own params. Or let
    decoupled weight decay and the learning rate come after `gravac.transform` in the
    chain: updates that wait then shrink as the learning rate falls.

    Law:
      The sum of what was sent plus what is held is the sum of the optimizer's updates,
      as they were scaled. With one replica that sends everything it is the optimizer
      itself. With N replicas, what is sent is the mean of updates, not the update of a
      mean. For SGD with momentum both are the same. What gives its updates a size, as
      Adam, Lion and Muon do, makes updates that point apart, and their mean is shorter,
      by up to sqrt(N): with `keeps_norm` updates are scaled so that it is as long.

    Cost:
      The optimizer's state and 4 bytes, per parameter and replica: 8 bytes of state in
      all for momentum, 12 for Adam. With `by_leaf` the bucket is cut into leaves and
      put together again, two more passes over it.

    Args:
      optimizer: a transformation of Optax, such as `optax.adam(1e-3)`.
      by_leaf: whether the optimizer sees whole leaves, in place of a flat vector: a
        dict by their paths, such as `['dense']['kernel']`. It sees the compressed
        leaves and those that go dense apart, with a state for each, so that a mask must
        be a function of such a dict, and a clip belongs into `gravac.transform`. It is
        always given params. The model may not be sharded.
      keeps_norm: whether updates are scaled so that their mean over replicas is as long
        as they are, in rows of 1,024 entries. For optimizers that give updates a size,
        and not for momentum SGD, whose mean is short because noise cancels. Lion lost
        0.5% at most after an exchange of two bits, and up to 4.5% before it. What an
        optimizer adds besides, such as weight decay, is scaled, too: let it come after
        the transform. Four bytes a row are sent: 2% of two bits, and an eighth of
        two bits of an eighth of the entries.

    Raises:
      TypeError: if `optimizer` is not a transformation of Optax, or
        `by_leaf` or `keeps_norm` not a bool.
      ValueError: if the optimizer does not work on a flat vector and `by_leaf` is not
        set, or remembers the params that it began with; from `gravac.transform`, if
        leaves are asked for, and it has slices of them only.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> memory = gravac.OwnOptimizer(optax.scale_by_adam())
      >>> gradient = jnp.array([3.0, -0.1])
      >>> compensated, state = memory.compensate(gradient, memory.init(2))
      >>> [round(x, 3) for x in compensated.tolist()]
      [1.0, -1.0]

    References:
      Tang et al., 1-bit Adam, ICML 2021, which exchanges compressed momentum; Basu et
      al., Qsparse-local-SGD, NeurIPS 2019, which exchanges compressed updates.
    """

    is_at_own_params = True
    optimizer: optax.GradientTransformation = dataclasses.field(repr=False)
    by_leaf: bool = False
    keeps_norm: bool = False
    # What it does with leaves does not show on a vector.
    needs_params: bool = dataclasses.field(default=True, init=False, repr=False)
    _leaves: Leaves | None = dataclasses.field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        kind = optax.GradientTransformation
        _refuse.instance(self.optimizer, kind, "optimizer", "optax.sgd(0.1)")
        _refuse.instance(self.by_leaf, bool, "by_leaf", "False")
        _refuse.instance(self.keeps_norm, bool, "keeps_norm", "False")
        _refuse_start(self.optimizer, self.by_leaf)
        if self.by_leaf:
            return
        why, needs_params = _on_a_vector(self.optimizer)
        object.__setattr__(self, "needs_params", needs_params)
        if why:
            raise ValueError(
                f"gravac.OwnOptimizer runs an optimizer on flat vectors of many leaves,"
                f" got one that {why}: give a clip to the transform,"
                f" clip=gravac.ClipByGlobalNorm(1.0), and put what is masked after it."
                f" For Muon, LAMB and others that look at a leaf write"
                f" gravac.OwnOptimizer(..., by_leaf=True)."
            )

    def of_leaves(self, leaves: Leaves) -> "OwnOptimizer":
        """Return the memory of a bucket that holds these leaves, in this order."""
        paths = [path for path, _ in leaves]
        if len(set(paths)) < len(paths):
            raise ValueError(f"two leaves of the params have the same path: {paths}")
        memory = copy.copy(self)
        object.__setattr__(memory, "_leaves", leaves)
        return memory

    def init(self, n: int) -> OwnOptimizerState:
        """Return the optimizer's first state and an empty residual."""
        optimizer = ()
        if self._leaves != ():
            optimizer = self.optimizer.init(self._cut(jnp.zeros(n, jnp.float32)))
        return OwnOptimizerState(optimizer, jnp.zeros(n, jnp.float32))

    def compensate(
        self, gradient: jax.Array, state: Any, own_params: jax.Array | None = None
    ) -> tuple[jax.Array, OwnOptimizerState]:
        """Return the residual plus this replica's own step."""
        if self._leaves == ():
            return state.residual, state
        own = own_params if own_params is None else self._cut(own_params)
        # Optax mixes dtypes, which a strict setting of the user's would refuse.
        with jax.numpy_dtype_promotion("standard"):
            made: Any = self.optimizer.update(self._cut(gradient), state.optimizer, own)
        step, optimizer = made
        steps = [step] if self._leaves is None else [step[x] for x, _ in self._leaves]
        step = _arrays.ravel(steps, gradient.size)
        return state.residual + step, state._replace(optimizer=optimizer)

    def _cut(self, vector: jax.Array) -> Any:
        """Return what the optimizer sees of `vector`, `[n]` float32."""
        if self._leaves is None:
            return vector
        like = [jax.ShapeDtypeStruct(shape, jnp.float32) for _, shape in self._leaves]
        arrays = _arrays.unravel(vector, like)
        return {path: x for (path, _), x in zip(self._leaves, arrays, strict=True)}


def _on_a_vector(optimizer: optax.GradientTransformation) -> tuple[str, bool]:
    """Return why an optimizer cannot run on a vector, or "", and if it needs params."""
    leaf = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
    is_mask = lambda x: isinstance(x, optax.MaskedState)
    try:
        state: Any = jax.eval_shape(optimizer.init, leaf)
    except Exception as error:  # of a mask that has the form of the params, too
        return f"raises {_arrays.brief(error)}", True
    if any(map(is_mask, jax.tree.leaves(state, is_leaf=is_mask))):
        return "looks at the tree of the params", True
    trace = functools.partial(jax.make_jaxpr(optimizer.update), leaf, state)
    needs_params = False
    with jax.numpy_dtype_promotion("standard"):
        try:
            jaxpr = trace().jaxpr
        except Exception:  # as one with weight decay raises
            needs_params, jaxpr = True, trace(leaf).jaxpr
    is_one = any(_refuse.reached(jaxpr, [False] * len(jaxpr.invars), _adds_up))
    return ("adds up entries, as for a norm" if is_one else ""), needs_params


def _adds_up(eqn: Any) -> bool:
    """Return whether an equation makes less of a matrix, but whether all is finite."""
    sides = lambda xs: max((jnp.shape(x.aval).count(SIDE) for x in xs), default=0)
    is_figure = any(_arrays.is_float(x.aval) for x in eqn.outvars)
    return is_figure and sides(eqn.outvars) < sides(eqn.invars)


def _refuse_start(optimizer: optax.GradientTransformation, by_leaf: bool) -> None:
    """Refuse an optimizer that remembers the params that it began with.

    The steps of the other replicas move the params, and it would not know. Nothing is
    run to find it out: jax.distributed.initialize, which may come later, wants to be
    called before any program runs.
    """
    of = lambda x: {"['leaf']": x[None]} if by_leaf else x
    one = jax.ShapeDtypeStruct((1,), jnp.float32)
    try:
        begun = jax.make_jaxpr(lambda x: optimizer.init(of(x)))(one).jaxpr
    except Exception:  # one that asks for certain leaves
        return
    if any(_refuse.reached(begun, [True])):
        raise ValueError(
            "gravac.OwnOptimizer needs an optimizer of gradients alone, got one that"
            " remembers the params that it began with: let it come after the exchange,"
            " optax.chain(gravac.transform(), ...), with gradients at shared params."
        )
