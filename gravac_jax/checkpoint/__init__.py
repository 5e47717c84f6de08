"""Save training state so that nothing is lost, and restore it on any devices.

A residual is gradient that no replica has received yet. A checkpoint holds the residual
of every replica. A run on as many replicas gets back the same bits; on more or fewer
replicas the mean of the residuals stays the same::

    from gravac_jax import checkpoint

    with checkpoint.Checkpointer("run/checkpoints", save_every=500) as checkpointer:
        state, start = (params, opt_state), 0
        if saved := checkpointer.restore(state, params):
            state, start = saved.tree, saved.step
        for step in range(start, steps):
            *state, loss = train_step(*state, batch(step))
            checkpointer.save(step + 1, tuple(state), state[0])
            if checkpointer.is_preempted:
                break

Orbax writes the files, in the background and from all processes at once. It is an
extra: `pip install '.[checkpoint]'` in the clone.

`_checkpointer` decides when to save and which checkpoint to read. `_format` turns
training state into named arrays, and fits those of a checkpoint to the state of a run.
`_layout` gives residuals the shapes of the params, on any number of replicas.
`_checksums` notices damage.
"""

from gravac_jax.checkpoint._checkpointer import Checkpointer, CheckpointError, Restored

__all__ = ["CheckpointError", "Checkpointer", "Restored"]
