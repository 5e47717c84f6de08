"""Controllers decide which encoding comes next: evidence in, rung out.

A new controller is a file here, a line in `CONTROLLERS`, a name in the package's front
door, and an oracle in the tests. They see only scalars that are the same on every
replica, and know nothing of encodings but their bytes and seconds, what is estimated of
them, and whether they need own params.
"""

from gravac_jax._controllers.accordion import Accordion
from gravac_jax._controllers.fastest import Fastest
from gravac_jax._controllers.gravac import GraVAC
from gravac_jax._controllers.scheduled import Scheduled

CONTROLLERS = (Accordion, Fastest, GraVAC, Scheduled)
