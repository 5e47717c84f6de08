"""The house itself: files on the way of a gradient, and processes of the tests."""

import itertools
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest
from _harness import make_mesh

import gravac_jax as gravac

PACKAGE = pathlib.Path(gravac.__file__).parent
N = 64 * 64  # entries of the only leaf


def way_of_a_gradient(tx):
    """Return the package's files that a gradient passes in one update, in order.

    Each function that returns counts once, if it was given or made a large array. A
    mask of all entries packed into words of 32 bits is large.
    """
    mesh, way = make_mesh(), []
    state = gravac.place(tx.init({"w": jnp.zeros((64, 64))}), mesh)
    specs = gravac.state_specs(state)

    def step(state, gradients):
        return tx.update(jax.tree.map(lambda x: x[0], gradients), state)[::-1]

    options = {"in_specs": (specs, jax.P("data")), "out_specs": (specs, jax.P())}
    step = jax.shard_map(step, mesh=mesh, check_vma=False, **options)

    def is_large(x):
        nested = isinstance(x, tuple | list) and any(map(is_large, x))
        return nested or (isinstance(x, jax.Array) and x.size >= N // 32)

    def look(frame, event, _):
        file = frame.f_code.co_filename
        is_ours = event == "return" and file.startswith(str(PACKAGE))
        if is_ours and any(map(is_large, frame.f_locals.values())):
            way.append(str(pathlib.Path(file).relative_to(PACKAGE)))

    sys.setprofile(look)
    try:
        jax.make_jaxpr(step)(state, {"w": jnp.ones((len(mesh.devices), 64, 64))})
    finally:
        sys.setprofile(None)
    return way


@pytest.mark.parametrize(
    ("send", "most_files", "most_changes"),
    [(gravac.Bits(2), 12, 50), (gravac.Fastest(), 14, 170)],
    ids=repr,
)
def test_a_gradient_passes_few_files_and_seldom_another(send, most_files, most_changes):
    way = way_of_a_gradient(gravac.transform(send=send))
    assert {"_step/update.py", "_step/phases.py", "_encodings/bits.py"} <= set(way)
    assert len(set(way)) <= most_files, sorted(set(way))
    # A workaround reads as the function of JAX whose place it takes: no stop.
    stops = [file for file in way if file != "_xla.py"]
    assert sum(x != y for x, y in itertools.pairwise(stops)) <= most_changes


def test_the_tests_of_a_file_run_in_one_process(request):
    """A pytest that is too new for pytest-xdist forgets the groups in silence."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("all tests run in this process")
    assert request.node.nodeid.endswith("@tests/test_structure.py")
