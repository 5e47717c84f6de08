"""Time training steps of two checkouts, in turns.

python steps.py TASK DATA_DIR OLD_DIR NEW_DIR prints one JSON line: milliseconds of a
step in each checkout, and their ratio, as quartiles over the turns.
"""

import json
import pathlib
import statistics
import subprocess
import sys
import time

TURNS, STEPS, SETTLING = 40, 10, 40
EXAMPLES = str(pathlib.Path(__file__).parents[3])


def serve(task_name, data_dir, checkout):
    """Take steps for as long as another line comes in; answer with their median."""
    sys.path[:0] = [checkout, EXAMPLES]
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    import numpy as np
    import optax
    import tasks

    import gravac_jax as gravac

    assert gravac.__file__.startswith(checkout), gravac.__file__
    task, mesh = (
        tasks.load(task_name, pathlib.Path(data_dir)),
        jax.make_mesh((2,), ("d",)),
    )
    tx = optax.chain(gravac.transform("d"), optax.sgd(task.learning_rate / 10, 0.9))

    def train_step(params, opt_state, batch):
        loss, grads = gravac.value_and_grad(task.loss, "d")(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = task.init(jax.random.key(0))
    state = gravac.place((params, tx.init(params)), mesh, "d")
    step = gravac.data_parallel(train_step, mesh, "d")
    rows = [task.train[97 * i % len(task.train)] for i in range(2 * task.rows)]
    batch = jax.tree.map(lambda *x: np.stack(x), *rows)

    def one():
        nonlocal state
        start = time.perf_counter()
        *state, _ = jax.block_until_ready(step(*state, batch))
        return (time.perf_counter() - start) * 1e3

    for _ in range(SETTLING):
        one()
    for _ in sys.stdin:
        sys.stdout.write(f"{statistics.median(one() for _ in range(STEPS))}\n")
        sys.stdout.flush()


def main(task_name, data_dir, *checkouts):
    """Let both checkouts take steps in turns, the order changing each time."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, __file__, "--serve", task_name, data_dir]
    sides = [subprocess.Popen([*command, x], **pipes) for x in checkouts]
    found = ([], [])
    for turn in range(TURNS):
        for i in (0, 1) if turn % 2 else (1, 0):
            sides[i].stdin.write("\n")
            sides[i].stdin.flush()
            found[i].append(float(sides[i].stdout.readline()))
    for side in sides:
        side.communicate()
    quartiles = lambda x: [round(q, 3) for q in statistics.quantiles(x, n=4)]
    ratios = [new / old for old, new in zip(*found, strict=True)]
    row = {"before": found[0], "after": found[1], "ratio": ratios}
    line = {"task": task_name} | {name: quartiles(x) for name, x in row.items()}
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
