"""Around a step: what a training loop needs beside the transform.

`train_step.py` puts together what is public and stands in the files beside it:
gradients of each replica (`gradients.py`), the mesh and the state on it
(`placement.py`), a step on all replicas (`parallel.py`), own params and flush
(`delivery.py`), times (`step_clock.py`), skipping a bad step (`guard.py`) and Flax NNX
(`nnx.py`). `outer.py` makes the optimizer of rounds, `chain.py` looks into optimizers,
and `watch.py` warns when replicas part.
"""
