#!/usr/bin/env bash
# Orbax 0.12.8: a checkpoint whose metric is NaN pushes out the best one.
#
# Surprise: a CheckpointManager that keeps the best checkpoint deletes the one of accuracy
#   0.9 when the next metric is NaN, keeps that of the NaN, and names it as best. What
#   comes later, however bad, may push out the NaN in turn. Checkpoints are sorted by
#   metric, and a NaN, which compares as False with everything, ends wherever it stood.
# Why one would guess otherwise: a run that diverges is what `best_fn` protects from, an
#   infinite metric is ranked as expected, and Ray Tune treats NaN as worst.
# Seen with: orbax-checkpoint 0.12.8.
# Source: https://github.com/ray-project/ray/pull/23862 (the same trap, fixed in Ray Tune).
# Instead: rank NaN as worst in `best_fn`, as `nan_is_worst` below does.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 orbax-checkpoint==0.12.8
export JAX_PLATFORMS=cpu

venv/bin/python - <<'PY'
import math
import tempfile
from importlib.metadata import version

import numpy as np
import orbax.checkpoint as ocp

print("orbax-checkpoint", version("orbax-checkpoint"))
NAN, INF = math.nan, math.inf


def accuracy(metrics):
    return metrics["accuracy"]


def nan_is_worst(metrics):
    return -INF if math.isnan(metrics["accuracy"]) else metrics["accuracy"]


def kept(accuracies, best_fn=accuracy):
    """Return the accuracy of the one checkpoint that is kept, and of the best."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=1, best_fn=best_fn, best_mode="max", enable_async_checkpointing=False
    )
    with tempfile.TemporaryDirectory() as path, ocp.CheckpointManager(path, options=options) as m:
        for step, x in enumerate(accuracies):
            state = ocp.args.StandardSave({"w": np.ones(3)})
            m.save(step, args=state, metrics={"accuracy": x})
        (step,) = m.all_steps()
        return accuracies[step], accuracies[m.best_step()]


def show(accuracies, expected, found):
    print(f"  {str(accuracies):28} expected: {expected}   seen: {found[0]} kept, {found[1]} best")


for accuracies in ([0.9, 0.5], [0.9, -INF]):
    show(accuracies, 0.9, kept(accuracies))
    assert kept(accuracies) == (0.9, 0.9), "FAILED: numbers are not ranked as expected"
for accuracies, stated in {(0.9, NAN): NAN, (0.9, 0.8, NAN, 0.7, 0.6): 0.7}.items():
    found = kept(accuracies)
    show(list(accuracies), 0.9, found)
    assert str(found) == str((stated, stated)), f"FAILED: {stated} is no longer kept"
    assert kept(accuracies, nan_is_worst) == (0.9, 0.9), "FAILED: the way out does not help"
print("As stated: a NaN pushes out the best checkpoint. With nan_is_worst it does not.")
PY
