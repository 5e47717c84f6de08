#!/usr/bin/env bash
# JAX 0.10.2 on CPUs: devices have a `slice_index` only in a job of several processes,
# and all processes of one machine have the same one.
#
# Surprise: `device.slice_index` of a CPU is an AttributeError in one process. In a job of
#   two processes it is there, and 0 in both. So code that takes processes for hosts
#   "where devices have no slice_index" finds one host in a rehearsal of two processes on
#   one machine, and `mesh_utils.create_hybrid_device_mesh` refuses a mesh of two hosts.
# Why one would guess otherwise: slices are known as a matter of TPUs. A look at the
#   devices of one process says that CPUs have none, and an attribute of a class is not
#   expected to come with `jax.distributed.initialize`.
# Seen with: jax and jaxlib 0.10.2, x86-64, Linux.
# Source: https://github.com/jax-ml/jax/pull/26906 (a way to set it, asked for in order to
#   rehearse slices on one machine).
# Instead: pass `process_is_granule=True`, or say how many hosts one machine plays.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2

cat > alone.py <<'PY'
import jax

print("jax", jax.__version__)
has = hasattr(jax.devices()[0], "slice_index")
print(f"  one process: has a slice_index     expected: False   seen: {has}")
assert not has, "FAILED: a CPU of one process has a slice_index now"
PY
cat > job.py <<'PY'
import sys

import jax
from jax.experimental import mesh_utils

jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
found = sorted({(x.process_index, x.slice_index) for x in jax.devices()})
try:
    made = mesh_utils.create_hybrid_device_mesh((2,), (2,)).shape
except ValueError as error:
    made = f"ValueError: {error}"
by_process = mesh_utils.create_hybrid_device_mesh((2,), (2,), process_is_granule=True)
if sys.argv[2] == "0":
    print("  two processes: (process, slice)    expected: a slice each")
    print(f"                                     seen: {found}")
    print(f"  a hybrid mesh of two hosts         seen: {made}")
    print(f"  with process_is_granule            seen: {by_process.shape}")
assert found == [(0, 0), (1, 0)], "FAILED: the processes have other slices now"
assert "slices" in str(made), "FAILED: the hybrid mesh is made now"
assert by_process.shape == (4,), "FAILED: processes are no granules now"
PY
venv/bin/python alone.py
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
venv/bin/python job.py "$port" 1 & other=$!
venv/bin/python job.py "$port" 0
wait "$other"
echo "As stated: a slice_index comes with the job, and is one for the whole machine."
