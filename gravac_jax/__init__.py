"""Adaptive gradient compression for data-parallel JAX, as one Optax transformation.

Replicas exchange gradients in a few bits, or the few entries that matter, and remember
the rest. A controller decides how few while training runs::

    import gravac_jax as gravac
    tx = optax.chain(gravac.transform(), optax.sgd(0.1))
"""

from gravac_jax._controllers import Fastest as Fastest
from gravac_jax._controllers import GraVAC as GraVAC
from gravac_jax._controllers import Scheduled as Scheduled
from gravac_jax._controllers.base import Controller as Controller
from gravac_jax._controllers.base import Evidence as Evidence
from gravac_jax._encodings import Bits as Bits
from gravac_jax._encodings import Dense as Dense
from gravac_jax._encodings import Encoding as Encoding
from gravac_jax._encodings import LowRank as LowRank
from gravac_jax._encodings import TopK as TopK
from gravac_jax._encodings.base import Bucket as Bucket
from gravac_jax._encodings.base import Sent as Sent
from gravac_jax._evidence.cost_model import WireCost as WireCost
from gravac_jax._loop.delivery import flush as flush
from gravac_jax._loop.delivery import own_params as own_params
from gravac_jax._loop.gradients import value_and_grad as value_and_grad
from gravac_jax._loop.guard import guard as guard
from gravac_jax._loop.nnx import nnx_data_parallel as nnx_data_parallel
from gravac_jax._loop.nnx import nnx_flush as nnx_flush
from gravac_jax._loop.nnx import nnx_value_and_grad as nnx_value_and_grad
from gravac_jax._loop.outer import outer as outer
from gravac_jax._loop.parallel import data_parallel as data_parallel
from gravac_jax._loop.placement import make_mesh as make_mesh
from gravac_jax._loop.placement import place as place
from gravac_jax._loop.placement import state_specs as state_specs
from gravac_jax._loop.step_clock import StepClock as StepClock
from gravac_jax._loop.train_step import train_step as train_step
from gravac_jax._memory import Memory as Memory
from gravac_jax._memory import Momentum as Momentum
from gravac_jax._memory import OwnOptimizer as OwnOptimizer
from gravac_jax._memory import Residual as Residual
from gravac_jax._network import Comm as Comm
from gravac_jax._network import Traffic as Traffic
from gravac_jax._step.bucketing import matrices as matrices
from gravac_jax._step.clipping import ClipByGlobalNorm as ClipByGlobalNorm
from gravac_jax._step.consistency import checksum as checksum
from gravac_jax._step.consistency import resync as resync
from gravac_jax._step.norms import norm_of_mean as norm_of_mean
from gravac_jax._step.step_info import StepInfo as StepInfo
from gravac_jax._transform import adamw as adamw
from gravac_jax._transform import dgc as dgc
from gravac_jax._transform import diloco as diloco
from gravac_jax._transform import sgd as sgd
from gravac_jax._transform import transform as transform

__version__ = "0.1.0"
