"""Checks of what a step is given, while it is traced or called.

They raise before anything is changed. Trouble that only shows in the values becomes a
counter in StepInfo instead.
"""

from gravac_jax._step_checks import losses as losses
from gravac_jax._step_checks import meshes as meshes
from gravac_jax._step_checks import objects as objects
from gravac_jax._step_checks import steps as steps
from gravac_jax._step_checks import update as update
