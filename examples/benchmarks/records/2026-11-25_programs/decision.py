"""Time a decision of `Fastest` on a CPU, and count the kernels of its program.

`PYTHONPATH` says which checkout is looked at; the argument is its name.
"""

import json
import re
import statistics
import sys
import time

import jax
import jax.numpy as jnp

import gravac_jax as gravac

TIMES = 300
KERNEL = re.compile(r" (fusion|dot|copy)\(")

controller = gravac.Fastest()
rungs = len(controller.ladder)
ones = jnp.ones(rungs)
told = {
    "step": jnp.int32(5),
    "first_sparse": jnp.int32(1),
    "energies": ones,
    "energy": jnp.ones(()),
    "gradient_energy": jnp.ones(()),
    "gradient_energies": ones,
    "predicted_parts": jnp.ones((rungs, 4)),
    "measured_seconds": jnp.full(rungs, jnp.nan).at[1].set(0.01),
    "local_seconds": None,
    "steps": jnp.int32(1),
    "wire_bytes": ones,
}
decide = lambda told, state: controller.decide(
    gravac.Evidence(replicas=2, **told), state
)
rung, state = controller.init()
compiled = jax.jit(decide).lower(told, state).compile()
text = compiled.as_text()
seconds = []
for _ in range(TIMES):
    start = time.perf_counter()
    jax.block_until_ready(compiled(told, state))
    seconds.append(time.perf_counter() - start)
line = {
    "of": sys.argv[1],
    "kernels": len(KERNEL.findall(text[text.index("ENTRY") :])),
    "microseconds": round(1e6 * statistics.median(seconds)),
}
print(json.dumps(line))
