"""Record what every step did, in a file, in TensorBoard or in the terminal.

The state of the optimizer holds the figures of the last step. A `Recorder` fetches them
while the next step runs, and gives them to writers::

    from gravac_jax import metrics

    with (
        metrics.first_host(
            lambda: metrics.JsonlWriter("runs/one.jsonl"),
            lambda: metrics.TensorBoardWriter("runs/one"),
            lambda: metrics.LiveView(steps),
        ) as writer,
        metrics.Recorder(writer) as recorder,
    ):
        for i in range(steps):
            params, opt_state, loss = train_step(params, opt_state, batch(i))
            recorder.record(i, opt_state, loss=loss)

A writer is any object with the three methods of `metrics.Writer`. This one sends the
figures to Weights & Biases; open it with `lambda: Wandb(project="one")`::

    class Wandb:
        def __init__(self, **options): self.run = wandb.init(**options)
        def write(self, step, scalars): self.run.log(dict(scalars), step=step)
        def flush(self): pass
        def close(self): self.run.finish()

`TensorBoardWriter` and `LiveView` need an extra: `pip install '.[tools]'` in the
clone.
"""

from gravac_jax.metrics._explain import explain
from gravac_jax.metrics._jsonl import JsonlWriter, read_jsonl
from gravac_jax.metrics._live_view import LiveView
from gravac_jax.metrics._recorder import Recorder, Writer, first_host
from gravac_jax.metrics._scalars import scalars, scalars_of_steps
from gravac_jax.metrics._tensorboard import TensorBoardWriter

__all__ = [
    "JsonlWriter",
    "LiveView",
    "Recorder",
    "TensorBoardWriter",
    "Writer",
    "explain",
    "first_host",
    "read_jsonl",
    "scalars",
    "scalars_of_steps",
]
