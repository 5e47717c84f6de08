"""Controllers decide how few entries to send: evidence in, rung out.

A new controller is a file here, a line in `CONTROLLERS`, a name in the package's front
door, and an oracle in the tests. They see only scalars that are the same on every
replica, and know nothing of exchanges.
"""

from gravac_jax._controllers.accordion import Accordion
from gravac_jax._controllers.capped import Capped
from gravac_jax._controllers.capped import low_after_drops as low_after_drops
from gravac_jax._controllers.every import Every
from gravac_jax._controllers.fastest import Fastest
from gravac_jax._controllers.fixed import Fixed
from gravac_jax._controllers.gravac import GraVAC
from gravac_jax._controllers.scheduled import STAGES as STAGES
from gravac_jax._controllers.scheduled import Scheduled
from gravac_jax._controllers.scheduled import warm_up as warm_up

CONTROLLERS = (Accordion, Capped, Every, Fastest, Fixed, GraVAC, Scheduled)
