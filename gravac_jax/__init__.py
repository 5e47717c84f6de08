"""Adaptive gradient compression for data-parallel JAX, as one Optax transformation.

Replicas exchange the few gradient entries that matter, remember the rest, and decide
how few while training runs::

    import gravac_jax as gravac
    tx = optax.chain(gravac.transform(), optax.sgd(0.1))
"""

from gravac_jax._agreement import checksum as checksum
from gravac_jax._agreement import resync as resync
from gravac_jax._buckets import matrices as matrices
from gravac_jax._clipping import ClipByGlobalNorm as ClipByGlobalNorm
from gravac_jax._clipping import ClipByValue as ClipByValue
from gravac_jax._clipping import NoClip as NoClip
from gravac_jax._clock import StepClock as StepClock
from gravac_jax._compressors import ApproxTopK as ApproxTopK
from gravac_jax._compressors import BlockTopK as BlockTopK
from gravac_jax._compressors import Identity as Identity
from gravac_jax._compressors import RandomK as RandomK
from gravac_jax._compressors import RedSync as RedSync
from gravac_jax._compressors import SampledTopK as SampledTopK
from gravac_jax._compressors import SIDCo as SIDCo
from gravac_jax._compressors import Threshold as Threshold
from gravac_jax._compressors import TopK as TopK
from gravac_jax._controllers import Accordion as Accordion
from gravac_jax._controllers import Capped as Capped
from gravac_jax._controllers import Fastest as Fastest
from gravac_jax._controllers import Fixed as Fixed
from gravac_jax._controllers import GraVAC as GraVAC
from gravac_jax._controllers import Scheduled as Scheduled
from gravac_jax._controllers import low_after_drops as low_after_drops
from gravac_jax._controllers import warm_up as warm_up
from gravac_jax._delivery import flush as flush
from gravac_jax._delivery import local_params as local_params
from gravac_jax._encoding import BFloat16 as BFloat16
from gravac_jax._encoding import Float16 as Float16
from gravac_jax._encoding import Float32 as Float32
from gravac_jax._encoding import Int8 as Int8
from gravac_jax._encoding import Int32 as Int32
from gravac_jax._encoding import UInt16 as UInt16
from gravac_jax._exchanges import AllGather as AllGather
from gravac_jax._exchanges import Cheapest as Cheapest
from gravac_jax._exchanges import DenseMean as DenseMean
from gravac_jax._exchanges import DenseMean16 as DenseMean16
from gravac_jax._exchanges import LeaderIndices as LeaderIndices
from gravac_jax._exchanges import LowRank as LowRank
from gravac_jax._exchanges import SharedRandomK as SharedRandomK
from gravac_jax._exchanges import by_rank as by_rank
from gravac_jax._grad import value_and_grad as value_and_grad
from gravac_jax._guard import guard as guard
from gravac_jax._info import StepInfo as StepInfo
from gravac_jax._ladder import exponential as exponential
from gravac_jax._ladder import geometric as geometric
from gravac_jax._memory import Adam as Adam
from gravac_jax._memory import Momentum as Momentum
from gravac_jax._memory import NoMemory as NoMemory
from gravac_jax._memory import Residual as Residual
from gravac_jax._parallel import data_parallel as data_parallel
from gravac_jax._parallel import simulate as simulate
from gravac_jax._placement import init as init
from gravac_jax._placement import place as place
from gravac_jax._placement import state_specs as state_specs
from gravac_jax._recipes import adamw as adamw
from gravac_jax._recipes import dgc as dgc
from gravac_jax._throughput import WireCost as WireCost
from gravac_jax._transform import transform as transform

__version__ = "0.1.0"
