#!/usr/bin/env bash
# Orbax 0.12.8: after jax.distributed was shut down and initialized again, no checkpoint can be read.
#
# Surprise: two processes save and load a checkpoint, call `jax.distributed.shutdown`, and form a
#   job again. JAX's own barriers and collectives work in it, and every load by Orbax raises
#   TimeoutError, "WaitAtBarrierAsync() was cancelled", at once: it asks the client of the first job.
# Why one would guess otherwise: shutdown and initialize are how processes re-form a job in place,
#   and Orbax is given nothing of the first: the checkpointer is made anew, too.
# Who meets it: elastic training that goes on in the same processes when members change, and
#   notebooks or services that connect to one job after another.
# Seen with: orbax-checkpoint 0.12.8, jax and jaxlib 0.10.2, two processes on one machine.
# Source: https://docs.jax.dev/en/latest/_autosummary/jax.distributed.shutdown.html
# Instead: read what a job begins with before the first `jax.distributed.initialize`, or start
#   the processes anew.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 orbax-checkpoint==0.12.8
export JAX_PLATFORMS=cpu

cat >member.py <<'PY'
import os
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.extend import backend
from orbax.checkpoint import v1 as ocp

index, *ports = map(int, sys.argv[1:])
for number, port in enumerate(ports, 1):
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
    multihost_utils.sync_global_devices("all are here")  # JAX works in both jobs
    try:
        with ocp.training.Checkpointer(os.path.abspath("checkpoints")) as checkpointer:
            if number == 1:
                checkpointer.save(1, {"x": np.arange(3)})
            seen = str(checkpointer.load(1)["x"].tolist())
    except Exception as error:
        seen = f"{type(error).__name__}: {' '.join(str(error).split())[:170]}"
    print(f"  job {number}, process {index}: expected: [0, 1, 2]; seen: {seen}", flush=True)
    assert (seen == "[0, 1, 2]") == (number == 1), "FAILED: it is otherwise"
    assert number == 1 or "CANCELLED" in seen, "FAILED: another error"
    jax.distributed.shutdown()
    backend.clear_backends()
PY

venv/bin/python - <<'PY'
import os
import socket
import subprocess
import sys
from importlib.metadata import version

print("orbax-checkpoint", version("orbax-checkpoint"), "jax", version("jax"))
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
ports = [str(x.getsockname()[1]) for x in sockets]
[x.close() for x in sockets]
start = lambda i: subprocess.Popen([sys.executable, "member.py", str(i), *ports], stderr=log)
with open(os.devnull, "w") as log:
    statuses = [x.wait(300) for x in list(map(start, range(2)))]
assert statuses == [0, 0], f"FAILED: the processes ended with {statuses}"
print("As stated: the second job can read no checkpoint, and JAX itself works in it.")
PY
