"""The house itself: files on the way of a gradient, and processes of the tests."""

import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest

import gravac_jax as gravac

PACKAGE = pathlib.Path(gravac.__file__).parent
N = 64 * 64  # entries of the only leaf
MOST_FILES = 15


def files_that_handle(entries, function, *args):
    """The package's files with a function that is given, or makes, a large array.

    A mask of `entries` packed into words of 32 bits is large.
    """
    found, folder = set(), str(PACKAGE)

    def is_large(x):
        if isinstance(x, tuple | list):
            return any(map(is_large, x))
        return isinstance(x, jax.Array) and x.size >= entries // 32

    def look(frame, event, _):
        file = frame.f_code.co_filename
        is_new = event == "return" and file.startswith(folder) and file not in found
        if is_new and any(map(is_large, frame.f_locals.values())):
            found.add(file)

    sys.setprofile(look)
    try:
        jax.make_jaxpr(function)(*args)
    finally:
        sys.setprofile(None)
    return {str(pathlib.Path(file).relative_to(PACKAGE)) for file in found}


def test_a_gradient_passes_few_files_on_its_way_through_a_default_step():
    tx = gravac.transform(None, compress=True)
    grads = {"w": jnp.ones((64, 64))}
    state = tx.init(grads)
    files = files_that_handle(N, tx.update, grads, state)
    # The state is carried beside the gradient, and what is decided is scalars.
    way = files - {"_state.py"}
    assert {"_step/phases.py", "_exchanges/quantized_all_reduce.py"} <= way
    assert len(way) <= MOST_FILES, sorted(way)


def test_the_tests_of_a_file_run_in_one_process(request):
    """A pytest that is too new for pytest-xdist forgets the groups in silence."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("all tests run in this process")
    assert request.node.nodeid.endswith("@tests/test_structure.py")
