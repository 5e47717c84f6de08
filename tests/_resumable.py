"""A training run, in one process or several, that tests kill and start again.

    python tests/_resumable.py DIRECTORY STEPS [SECONDS]

It prints every step, then sleeps for SECONDS. At the end every process prints a
checksum of all bits of params and state that it holds.
"""

import sys
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gravac_jax as gravac
from gravac_jax import checkpoint

WIDTH = 256


def main(directory: str, steps: int, seconds: float = 0.0) -> None:
    mesh = gravac.make_mesh()
    memory, send = gravac.Momentum(0.5), gravac.Bits(2, turns=2)
    tx = optax.chain(gravac.transform(memory=memory, send=send), optax.sgd(0.05))
    params = {"w": jnp.ones((WIDTH, WIDTH)), "b": jnp.zeros(WIDTH)}

    def train_step(params, opt_state, x):
        loss = lambda p, x: jnp.mean((jnp.tanh(x @ p["w"] / WIDTH) + p["b"][None]) ** 2)
        _, grads = gravac.value_and_grad(loss)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def batch(step):
        rng = np.random.default_rng([step, jax.process_index()])
        return np.float32(rng.normal(size=(4 * jax.local_device_count(), WIDTH)))

    step = gravac.data_parallel(train_step, mesh)
    state, start = gravac.place((params, tx.init(params)), mesh), 0
    with checkpoint.Checkpointer(directory, save_every=3) as checkpointer:
        if saved := checkpointer.restore(state, state[0]):
            state, start = saved.tree, saved.step
            say(f"restored {start}")
        for i in range(start, steps):
            state = step(*state, batch(i))
            checkpointer.save(i + 1, state, state[0])
            say(f"step {i + 1}")
            time.sleep(seconds)
            if checkpointer.is_preempted:
                say(f"preempted {i + 1}")
                return
    crc = 0
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            crc = zlib.crc32(np.asarray(shard.data).tobytes(), crc)
    sys.stdout.write(f"end {jax.process_index()} {crc}\n")


def say(line: str) -> None:
    if jax.process_index() == 0:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *map(float, sys.argv[3:]))
