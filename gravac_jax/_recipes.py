"""Papers as one line: components that `transform` wires."""

from typing import Any

import optax

from gravac_jax import _checks
from gravac_jax._clipping import ClipByGlobalNorm, NoClip
from gravac_jax._comm import AxisName
from gravac_jax._compressors import SampledTopK
from gravac_jax._controllers import STAGES, Fixed, warm_up
from gravac_jax._memory import Momentum
from gravac_jax._transform import transform


def dgc(
    axis_name: AxisName = "data",
    *,
    factor: float = 1000,
    momentum: float = 0.9,
    nesterov: bool = False,
    max_norm: float | None = None,
    warm_up_steps: int = 0,
    **others: Any,
) -> optax.GradientTransformationExtraArgs:
    """Deep Gradient Compression, all five parts of it.

    Accumulation, momentum correction, local clipping, momentum factor masking and
    warm-up, with a threshold from a sample for each tensor; the optimizer after it has
    no momentum: `optax.chain(gravac.dgc(), optax.sgd(0.1))`. For coupled weight decay
    give `weight_decay`.

    Args:
      axis_name: as for `gravac.transform`.
      factor: after the warm-up; 1000 sends 0.1%.
      momentum: m of momentum correction.
      nesterov: whether it looks ahead.
      max_norm: of the averaged gradient, for local clipping; None for none.
      warm_up_steps: in which the factor rises by the paper's stages of 4, 16, 64 and
        250, those below `factor`.
      others: arguments of `gravac.transform`, which take precedence.

    Returns:
      `gravac.transform(...)` with these components.

    Raises:
      TypeError: as `gravac.transform`.
      ValueError: as the components.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> tx = optax.chain(gravac.dgc(axis_name=None, factor=100), optax.sgd(0.1))
      >>> params = {"w": jnp.ones((256, 256))}
      >>> updates, opt_state = tx.update(params, tx.init(params))
      >>> float(optax.tree.get(opt_state, "StepInfo").factor) > 99
      True

    References:
      Lin et al., Deep Gradient Compression, ICLR 2018; the authors' code differs in its
      warm-up and clips only if it is told to.
    """
    _checks.factor(factor)
    stages = [x for x in STAGES if x < factor] if warm_up_steps else []
    controller = warm_up(warm_up_steps, (*stages, factor)) if stages else Fixed(factor)
    components: dict[str, Any] = {
        "compressor": SampledTopK(),
        "memory": Momentum(momentum, nesterov, masking="literal"),
        "controller": controller,
        "clip": NoClip() if max_norm is None else ClipByGlobalNorm(max_norm),
        "bucket_bytes": 1,
    }
    if others.get("exchange") is not None:
        del components["compressor"]
    return transform(axis_name, **{**components, **others})
