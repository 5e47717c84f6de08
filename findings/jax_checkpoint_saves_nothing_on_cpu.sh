#!/usr/bin/env bash
# JAX 0.10.2 on CPUs: `jax.checkpoint` of layers in a Python loop saves no memory.
#
# Surprise: the program of the gradient of 16 layers needs the same memory, and computes
#   the same number of sines, with and without `jax.checkpoint`. The barriers that JAX
#   puts in are gone before XLA joins equal computations, so XLA undoes it. In `lax.scan`
#   over the same layers `jax.checkpoint` does save memory.
# Why one would guess otherwise: `prevent_cse=True` promises barriers against just that,
#   they stand in the lowered program, and `memory_analysis()` of a program compiled for
#   CPUs is a usual way to choose what to checkpoint before going to an accelerator.
# Seen with: jax and jaxlib 0.10.2.
# Source: the argument `prevent_cse` in
#   https://docs.jax.dev/en/latest/_autosummary/jax.checkpoint.html
# Instead: scan over the layers, or compile for the accelerator itself
#   (`jax.experimental.topologies` needs none).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
export JAX_PLATFORMS=cpu XLA_FLAGS=

venv/bin/python - <<'PY'
import jax
import jax.numpy as jnp

print("jax", jax.__version__)
LAYERS, WIDTH, ROWS = 16, 64, 4096


def layer(x, w):
    return jnp.sin(jnp.sin(x @ w))


def unrolled(layer):
    def loss(weights, x):
        for w in weights:
            x = layer(x, w)
        return jnp.sum(x)

    return loss


def scanned(layer):
    def loss(weights, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0])

    return loss


def compiled(loss):
    """Return MB of temporary memory, sines, and barriers before and after compiling."""
    shapes = [(LAYERS, WIDTH, WIDTH), (ROWS, WIDTH)]
    args = [jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes]
    lowered = jax.jit(jax.grad(loss)).lower(*args)
    made = lowered.compile()
    text = made.as_text()
    memory = made.memory_analysis().temp_size_in_bytes / 1e6
    barriers = lowered.as_text().count("optimization_barrier")
    return memory, text.count(" sine("), barriers, text.count(" opt-barrier(")


plain, saved = compiled(unrolled(layer)), compiled(unrolled(jax.checkpoint(layer)))
in_scan, saved_in_scan = compiled(scanned(layer)), compiled(scanned(jax.checkpoint(layer)))
for name, x in {
    "loop": plain,
    "loop, jax.checkpoint": saved,
    "scan": in_scan,
    "scan, jax.checkpoint": saved_in_scan,
}.items():
    print("  {:21}{:6.1f} MB, {:2} sines, barriers: {:2} lowered, {} compiled".format(name, *x))
print("  expected: jax.checkpoint needs less memory in both forms")
shares = saved[0] / plain[0], saved_in_scan[0] / in_scan[0]
print("  seen:     {:.2f} of the memory in a loop, {:.2f} in a scan".format(*shares))
assert saved[2] >= LAYERS and saved[3] == 0, "FAILED: the barriers are still there"
assert saved[:2] == plain[:2], "FAILED: jax.checkpoint makes a difference in a loop now"
assert saved_in_scan[0] < 0.6 * in_scan[0], "FAILED: it makes none in a scan now"
print("As stated: on CPUs XLA undoes jax.checkpoint in a Python loop, not in a scan.")
PY
