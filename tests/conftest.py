"""Eight virtual devices, JAX at its strictest, and a cache of compiled programs.

Compiling takes longer than all else here. So kernels, of which most run once, are not
optimised, unless `XLA_FLAGS` is set: `XLA_FLAGS= pytest` runs as users run; LLVM gets
each program whole, since there is a worker for each core. And what a program compiles
to is kept across runs in pytest's cache (`.pytest_cache/d/xla-...`; `pytest
--cache-clear` empties it).
"""

import gc
import hashlib
import os
import pathlib
import platform

import jax
import numpy as np
import pytest
from _harness import AS_USERS

# Child processes have them, too.
FLAGS = dict.fromkeys(AS_USERS, 0) | {"xla_cpu_parallel_codegen_split_count": 1}
os.environ.setdefault("XLA_FLAGS", " ".join(f"--{k}={x}" for k, x in FLAGS.items()))
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tracing allocates what stays: to look through all of it time and again takes a tenth
# of a run.
gc.set_threshold(200_000, 20, 100)

CACHE = "JAX_COMPILATION_CACHE_DIR"
LIMITS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
MOST_BYTES = 2**30  # of the cache, at the end of a run
MOST_MAPS = 20_000  # of 65,530 that Linux gives a process
FOLDER = pytest.StashKey[pathlib.Path]()


def pytest_configure(config):
    cache = getattr(config, "cache", None)  # none under `-p no:cacheprovider`
    if cache is None or CACHE in os.environ:  # a user's, or inherited by a worker
        return
    folder = config.stash[FOLDER] = cache.mkdir(f"xla-{_processor()}")
    for name, x in {CACHE: str(folder), **LIMITS}.items():
        os.environ[name.upper()] = str(x)  # for child processes
        jax.config.update(name.lower(), x)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Keep the tests of a file in one process: they share what they compile."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.split("::")[0]))
    # The longest group first, so that no worker waits for the other at the end.
    group = lambda item: item.get_closest_marker("xdist_group").args[0]
    items.sort(key=lambda item: group(item) != "processes")


def _processor():
    """Return a hash of what the processor is and can do.

    JAX's keys hold the program, the flags and the versions of JAX and XLA, but not the
    instructions for which XLA compiled.
    """
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    about = {x for x in lines if x.startswith(("model name", "flags", "Features"))}
    text = "\n".join([platform.machine(), platform.processor(), *sorted(about)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def pytest_unconfigure(config):
    gc.freeze()  # there is nothing left to look for
    folder = config.stash.get(FOLDER, None)
    if folder is None or hasattr(config, "workerinput"):
        return
    size, files = 0, [(x.stat(), x) for x in folder.iterdir()]
    for stat, file in sorted(files, key=lambda x: -x[0].st_atime):
        size += stat.st_size
        if size > MOST_BYTES:  # the least recently used go
            file.unlink(missing_ok=True)


@pytest.fixture
def standard_promotion():
    """Let dtypes be promoted as users have it, which Optax and Flax rely on."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def fast_keys():
    """Have random keys that compile in a fraction of the time."""
    with jax.default_prng_impl("unsafe_rbg"):
        yield


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """Return a folder with the files of every task."""
    import _task_files  # and Flax, which most tests do not need

    return _task_files.write_all(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def text(data_dir):
    """Return a file of 12,800 bytes of text."""
    return data_dir / "input.txt"


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Free what was compiled before maps run out: each program maps memory."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if not maps.exists() or maps.read_text().count("\n") > MOST_MAPS:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def rng_from_the_start(request):
    """Let each test of a module draw the same numbers, in every order of tests."""
    drawn = getattr(request.module, "RNG", None)
    if drawn is not None:
        drawn.bit_generator.state = np.random.default_rng(0).bit_generator.state
