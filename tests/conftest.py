"""Eight virtual devices, JAX at its strictest, and little time spent on compiling."""

import os
import shutil
import tempfile

import jax
import pytest

# Before a backend starts: half the time of most tests is LLVM's. `XLA_FLAGS=` in the
# environment leaves everything as users have it.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", QUICK)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# What one test compiled serves the others, those in other processes too. It lasts for
# one run: executables that are found on disk were made from the sources as they are.
CACHE = "JAX_COMPILATION_CACHE_DIR"
LIMITS = {
    "jax_persistent_cache_min_compile_time_secs": 0.1,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # not in a worker, which inherits it
        os.environ[CACHE] = tempfile.mkdtemp(prefix="gravac-tests-")
        os.environ.update({name.upper(): str(x) for name, x in LIMITS.items()})
    jax.config.update("jax_compilation_cache_dir", os.environ[CACHE])
    for name, x in LIMITS.items():
        jax.config.update(name, x)


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(CACHE), ignore_errors=True)


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Free what a module compiled: each program maps memory, and maps run out."""
    yield
    jax.clear_caches()
