#!/usr/bin/env bash
# JAX on CPUs (jax 0.10.2) has no pool of memory: large arrays are new pages at each call.
#
# Surprise: scaling 16 million numbers takes 13 times as long if the result is a new array
#   as it does in place. The C library gives back to Linux what is freed above 32 MB, outputs
#   as well as temporaries of a program, so that every call has Linux clear 16,000 small
#   pages. With GLIBC_TUNABLES=glibc.malloc.hugetlb=1 it clears a few hundred, most of
#   them large, and the same call is several times as fast.
# Why one would guess otherwise: on GPUs and TPUs JAX keeps memory in a pool, arithmetic on
#   large arrays is thought to wait for memory and not for the kernel, and a loop that frees
#   and makes arrays of one size is the case that allocators are made for. Smaller arrays
#   depend on what was freed before, so that times of one program jump between runs.
# Seen with: jax and jaxlib 0.10.2, glibc 2.36, Linux with transparent huge pages "madvise"
#   (27 ms, in place 1.9 ms, with large pages 5.5 ms of CPU time on two x86-64 cores).
# Source: glibc's manual, M_MMAP_THRESHOLD (at most 32 MB by itself) and glibc.malloc.hugetlb.
# Instead: set GLIBC_TUNABLES=glibc.malloc.hugetlb=1 before Python starts, donate arguments,
#   and look at page faults (resource.getrusage) before comparing times on CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
export JAX_PLATFORMS=cpu XLA_FLAGS=
unset GLIBC_TUNABLES MALLOC_ARENA_MAX MALLOC_MMAP_THRESHOLD_ MALLOC_TRIM_THRESHOLD_

cat > measure.py <<'PY'
import json
import resource
import statistics
import sys
import time

import jax
import jax.numpy as jnp

CALLS = 20
scale = jax.jit(lambda x: 0.99 * x + 1, donate_argnums=0 if "donate" in sys.argv else ())
x = jnp.ones(16_000_000)
for _ in range(5):  # compile, and let the C library learn what is freed
    x = scale(x).block_until_ready()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before, seconds = faults(), []
for _ in range(CALLS):
    start = time.process_time()
    x = scale(x).block_until_ready()
    seconds.append(time.process_time() - start)
print(json.dumps([(faults() - before) / CALLS, 1e3 * statistics.median(seconds)]))
PY

new=$(venv/bin/python measure.py)
in_place=$(venv/bin/python measure.py donate)
large=$(GLIBC_TUNABLES=glibc.malloc.hugetlb=1 venv/bin/python measure.py)
venv/bin/python - "$new" "$in_place" "$large" <<'PY'
import json
import pathlib
import platform
import sys

import jax

pages = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
mode = pages.read_text().split("[")[1].split("]")[0] if pages.exists() else "unknown"
print("jax", jax.__version__, *platform.libc_ver(), "huge pages:", mode)
new, in_place, large = map(json.loads, sys.argv[1:])
print("  expected: the second to the last call faults in no memory, whatever is donated")
for name, (faults, ms) in zip(["a new array", "in place", "large pages"], [new, in_place, large]):
    print(f"  seen: {name:12} {faults:8.0f} page faults a call, {ms:.1f} ms of CPU time")
assert mode == "madvise", "the script needs a kernel that gives large pages if asked"
assert new[0] > 10_000, "FAILED: a new array no longer costs a fault for each page"
assert in_place[0] < 100, "FAILED: the donated array is faulted in, too"
assert new[1] > 2 * in_place[1], "FAILED: a new array takes no longer than in place"
assert large[0] < 2000, "FAILED: the tunable does not make large pages"
assert large[1] < new[1], "FAILED: large pages are no faster"
print("As stated: Linux clears every page of a large result anew at each call.")
PY
