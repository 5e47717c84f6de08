"""Compile a training step for TPUs or GPUs without having one, and read the program.

The step is a GPT's: forward and backward pass, exchange, Adam. For each method the
record has kernels, the turns of loops, conditionals, bytes that kernels read and write,
temporary memory, what collectives carry and what runs beside them, and the time to
compile. It runs on any machine with Linux, and needs no TPU and no GPU:

    pip install -e '.[examples]' 'jax[tpu]'       # libtpu
    python examples/benchmarks programs --device v5e --out FILE.jsonl
    pip install -e '.[examples,cuda]'             # 4.6 GB
    python examples/benchmarks programs --device h100 --out FILE.jsonl
    python examples/benchmarks programs.report FILE.jsonl
"""

import dataclasses
import importlib.metadata
import json
import os
import time
from pathlib import Path
from typing import Any, Literal

# Before JAX starts: TPUs and GPUs are described, not looked for.
os.environ.update(
    JAX_PLATFORMS="cpu",
    JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE="v5litepod-4",
)

import jax
import jax.numpy as jnp
from common.journal import Journal, Line
from jax.experimental import topologies

import gravac_jax as gravac
from programs import gpt
from programs.reading import Program

# An NVIDIA H100 with NVLink, as XLA's GpuTargetConfigProto has it.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84978434048
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
ROWS = 1  # windows of a replica: few activations, so that temporaries are buckets
DEVICES = 4


@dataclasses.dataclass(frozen=True)
class Args:
    """What to compile.

    Args:
      out: The record, JSONL; what is in it is not compiled again.
      methods: Names as in training/methods.py; Adam follows exchanged gradients.
      device: What to compile for: four of them.
      millions: Entries of the model, in millions: 1, 25 or 100.
      rung: The rung whose program is compiled, as gravac.train_step does for an
        accelerator; None for the branches of all rungs.
    """

    out: Path
    methods: tuple[str, ...] = ("dense", "adamw Bits(2)", "adamw Fastest()")
    device: Literal["v5e", "h100"] = "v5e"
    millions: tuple[int, ...] = (1, 25)
    rung: int | None = None


def lowered(name: str, millions: int, rung: int | None, mesh: Any) -> tuple[Any, int]:
    """Return a method's step, lowered for the devices of `mesh`, and its params."""
    step = gpt.step(name, millions)
    known = {} if rung is None else {"rung": rung}
    tokens = jax.ShapeDtypeStruct((ROWS, gpt.LENGTH), jnp.int32)
    params = jax.eval_shape(step.model.init, jax.random.key(0), tokens)
    opt_state = jax.eval_shape(step.tx.init, params)
    specs = gravac.state_specs((params, opt_state))

    def placed(spec: Any, x: Any) -> Any:
        shape = x.shape if spec == jax.P() else (mesh.size, *x.shape)
        sharding = jax.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

    is_spec = lambda x: isinstance(x, jax.P)
    state = jax.tree.map(placed, specs, (params, opt_state), is_leaf=is_spec)
    batch = jax.ShapeDtypeStruct(
        (mesh.size * ROWS, gpt.LENGTH),
        jnp.int32,
        sharding=jax.NamedSharding(mesh, jax.P("data")),
    )
    mapped = jax.shard_map(
        lambda *args: step.take(*args, **known)[:2],
        mesh=mesh,
        in_specs=(*specs, jax.P("data")),
        out_specs=specs,
    )
    entries = sum(x.size for x in jax.tree.leaves(params))
    return jax.jit(mapped, donate_argnums=(0, 1)).lower(*state, batch), entries


def described(device: str) -> tuple[list[Any], dict[str, str]]:
    """Return devices of a kind, and the version of what compiles for them."""
    if device == "v5e":
        topology = topologies.get_topology_desc(f"v5e:2x{DEVICES // 2}", "tpu")
        package = "libtpu"
    else:
        topology = topologies.get_topology_desc(
            "", "cuda", target_config=H100, topology=f"1x1x{DEVICES}"
        )
        package = "jax-cuda13-pjrt"
    return topology.devices, {package: importlib.metadata.version(package)}


def read(name: str, millions: int, mesh: Any, args: Args) -> Line:
    """Compile a method's step, and return what its program shows."""
    step, entries = lowered(name, millions, args.rung, mesh)
    start = time.perf_counter()
    made = step.compile()
    seconds = time.perf_counter() - start
    program, bucket_bytes = Program(made.as_text() or ""), 4 * entries
    cost, memory = program.cost(), made.memory_analysis()
    branches = [[vars(y) for y in x.branches] for x in program.conditionals]
    return {
        "entries": entries,
        "kernels": program.kernels,
        "launches": cost.launches,
        "passes": round(cost.bytes / bucket_bytes, 2),
        "turns": program.turns,
        "conditionals": branches,
        "temporaries": round(memory.temp_size_in_bytes / bucket_bytes, 2),
        "collectives": program.collectives(mesh.size),
        "compile_seconds": round(seconds, 1),
    }


def main(args: Args) -> None:
    """Compile each method's step, and print its line."""
    devices, version = described(args.device)
    journal = Journal(args.out, {"device": args.device, "rung": args.rung, **version})
    mesh = jax.sharding.Mesh(devices, ("data",))
    for millions in args.millions:
        for name in args.methods:
            make = lambda name=name, n=millions: read(name, n, mesh, args)
            line = journal.once(make, method=name, millions=millions)
            print(json.dumps(line), flush=True)
