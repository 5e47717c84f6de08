"""Controllers decide which encoding comes next: evidence in, rung out.

A new controller is a file here, a line in `CONTROLLERS`, a name in the package's front
door, and an oracle in the tests. They see only scalars that are the same on every
replica. Beside the ladders that some begin with, they know nothing of encodings but
their bytes and seconds, what is estimated of them, and whether they need own params.
"""

from typing import Any

from gravac_jax import _arrays
from gravac_jax._controllers.base import Controller
from gravac_jax._controllers.fastest import Fastest
from gravac_jax._controllers.gravac import GraVAC
from gravac_jax._controllers.scheduled import Scheduled
from gravac_jax._encodings import Encoding

CONTROLLERS = (Fastest, GraVAC, Scheduled)


def controller_of(send: Any) -> Controller:
    """Return what chooses among encodings; of one encoding, what always takes it."""
    if isinstance(send, Encoding):
        return Scheduled((send,), ())
    if not isinstance(send, Controller):
        raise TypeError(
            f"`send` must be an encoding such as gravac.Bits(2), or a controller such"
            f" as gravac.Fastest((gravac.Dense(), gravac.Bits(2))) or gravac.Fastest(),"
            f" got {_arrays.brief(send)}."
        )
    return send
