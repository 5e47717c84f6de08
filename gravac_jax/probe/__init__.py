"""Tells whether gradient compression will pay, before you change your code.

    python -m gravac_jax probe --params 66e6

times training steps on the devices it runs on: dense ones, and one kind for each
encoding, such as `Bits(2)`. The gradient has the given number of entries and costs
nothing to compute. To time your own computation too, give it your loss,
`--loss package.module:function`: a function without arguments that returns
`(loss_fn, params, batch)`, with the batch of one replica. With `--headroom` the probe
times only dense steps and steps without an exchange. Their ratio is the most that any
compression can win. To time other encodings, write them as in Python:

    python -m gravac_jax probe --params 66e6 --send "Bits(1, turns=4)" "TopK(30)"

On a cluster, start the probe as you start your training script:

    srun python -m gravac_jax.launch -m gravac_jax probe --loss package.module:function

`--json FILE` writes all results to a file. A controller can start from the network
that the probe measured:

    from gravac_jax import probe
    gravac.transform(network=probe.read(FILE))
"""

from gravac_jax.probe._command import main as main
from gravac_jax.probe._results import read as read

__all__ = ["main", "read"]
