#!/usr/bin/env bash
# XLA for CPUs (jaxlib 0.10.2) compiles faster if it does not know where slices begin.
#
# Surprise: a program that takes 64 slices of one size at known places has 64 different
#   kernels, and takes over ten times as long to compile as one that is handed the places
#   as arguments: that has one kernel, called 64 times. Constants cost compile time.
# Why one would guess otherwise: static slices are what users are told to prefer, known
#   places let a compiler skip clamping, and XLA does join kernels that are equal. But the
#   places are constants inside the kernels, so no two of them are equal.
# Seen with: jax and jaxlib 0.10.2 (1.6 s and 0.06 s of CPU time on two x86-64 cores).
# Source: none known.
# Instead: for many slices of one size, such as the leaves of a flat vector of parameters,
#   pass the places as separate scalars. Elements of one array of places do not help: the
#   index into that array is then a constant inside the kernel.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
export JAX_PLATFORMS=cpu XLA_FLAGS=

venv/bin/python - <<'PY'
import re
import time

import jax
import jax.numpy as jnp
import numpy as np

print("jax", jax.__version__)
COUNT, SIZE = 64, 100
starts = [1017 * i for i in range(COUNT)]
x = jnp.arange(COUNT * 1100, dtype=jnp.float32) / 1e4


def known(x):
    return [jnp.sin(x[start : start + SIZE]) for start in starts]


def unknown(x, *starts):
    return [jnp.sin(jax.lax.dynamic_slice(x, (start,), (SIZE,))) for start in starts]


def of_array(x, starts):
    return unknown(x, *starts)


def compiled(f, *args):
    """Return the program, its different kernels, and the CPU seconds it took."""
    lowered = jax.jit(f).lower(*args)
    begin = time.process_time()
    made = lowered.compile()
    seconds = time.process_time() - begin
    bodies = re.findall(r"^%\S*computation\S* .*?\{\n(.*?)^\}", made.as_text(), re.M | re.S)
    kernels = {re.sub(r"%[\w.-]+|metadata=\{.*?\}", "", body) for body in bodies}
    return made, len(kernels), seconds


compiled(jnp.cos, x)  # what only the first compilation pays
made, kernels, seconds = compiled(known, x)
scalars = [np.int32(start) for start in starts]
made_unknown, one, few_seconds = compiled(unknown, x, *scalars)
_, many, _ = compiled(of_array, x, np.int32(starts))
same = all(map(np.array_equal, made(x), made_unknown(x, *scalars)))
print("  expected: known places compile at least as fast as unknown ones")
print(f"  seen: {kernels} kernels at known places, {seconds:.2f} s of CPU time")
print(f"        {one} kernel at places handed in, {few_seconds:.2f} s")
print(f"        {many} kernels at places that are elements of one array")
assert same, "FAILED: the results differ"
assert kernels == many == COUNT, "FAILED: XLA shares kernels of known places now"
assert one == 1, "FAILED: XLA no longer shares the kernel of unknown places"
assert seconds > 3 * few_seconds, "FAILED: known places no longer take longer to compile"
print("As stated: XLA compiles a kernel for each known place, and one for all unknown ones.")
PY
