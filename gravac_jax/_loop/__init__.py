"""Around a step: what a training loop needs beside the transform.

`train_step.py` puts together what is public and stands in the files beside it:
gradients of each replica (`gradients.py`), the mesh and the state on it (`mesh.py`,
`placement.py`), a step on all replicas (`parallel.py`), own params and flush
(`delivery.py`), times (`step_clock.py`), comparing and skipping (`consistency.py`) and
Flax NNX (`nnx.py`). `ahead.py` knows which program comes next; `chain.py` looks into
optimizers.
"""
