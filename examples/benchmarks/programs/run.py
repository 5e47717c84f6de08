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

With `--inner 2 2` the compiler shards the GPT of each of two replicas over four
devices. The record then has all collectives: those between replicas, and those within.
"""

import dataclasses
import importlib.metadata
import json
import math
import os
import re
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
import numpy as np
from common.journal import Journal, Line
from jax.experimental import topologies

import gravac_jax as gravac
from programs import gpt, sliced
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
# Of every8...: the program of a step that exchanges nothing. Of a ladder: the program
# of one rung, as gravac.train_step compiles it for an accelerator.
LOCAL_STEP, ONE_RUNG = "between", re.compile(r"rung(\d)")


@dataclasses.dataclass(frozen=True)
class Args:
    """What to compile.

    Args:
      out: The record, JSONL; what is in it is not compiled again.
      methods: Names as in training/methods.py; Adam follows if the memory has none.
        "between" before an every...: a step of its rounds that exchanges nothing;
        "rung3" before one with a ladder: the program of its fourth rung.
      device: What to compile for: four of them, or those of two replicas.
      millions: Entries of the model, in millions: 1, 25 or 100.
      texts: A folder for the programs themselves.
      inner: Devices of a replica along "fsdp" and "tp"; none for one device each. There
        are two more methods then, by a plain jit: "jit", and "alone" of one replica.
    """

    out: Path
    methods: tuple[str, ...] = ("dense", "allreduced16", "default")
    device: Literal["v5e", "h100"] = "v5e"
    millions: tuple[int, ...] = (1, 25)
    texts: Path | None = None
    inner: tuple[int, ...] = ()


def lowered(name: str, millions: int, mesh: Any) -> tuple[Any, int]:
    """Return a method's step, lowered for the devices of `mesh`, and its params."""
    known: dict[str, Any] = {"is_due": False} if name.startswith(LOCAL_STEP) else {}
    if rung := ONE_RUNG.match(name):
        known = {"rung": int(rung[1])}
    method = ONE_RUNG.sub("", name, count=1).removeprefix(LOCAL_STEP)
    step = gpt.step(method, millions, known)
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
        lambda *args: step.take(*args)[:2],
        mesh=mesh,
        in_specs=(*specs, jax.P("data")),
        out_specs=specs,
    )
    entries = sum(x.size for x in jax.tree.leaves(params))
    return jax.jit(mapped, donate_argnums=(0, 1)).lower(*state, batch), entries


def described(device: str, count: int) -> tuple[list[Any], dict[str, str]]:
    """Return devices of a kind, and the version of what compiles for them."""
    if device == "v5e":
        topology = topologies.get_topology_desc(f"v5e:2x{count // 2}", "tpu")
        package = "libtpu"
    else:
        topology = topologies.get_topology_desc(
            "", "cuda", target_config=H100, topology=f"1x1x{count}"
        )
        package = "jax-cuda13-pjrt"
    return topology.devices, {package: importlib.metadata.version(package)}


def compiled(name: str, millions: int, step: Any, texts: Path | None) -> Any:
    """Compile a lowered step, and return it, its program and the seconds it took."""
    start = time.perf_counter()
    made = step.compile()
    seconds = time.perf_counter() - start
    text = made.as_text() or ""
    if texts:
        texts.mkdir(parents=True, exist_ok=True)
        (texts / f"{name}_{millions}.txt").write_text(text)
    return made, Program(text), round(seconds, 1)


def read(name: str, millions: int, mesh: Any, texts: Path | None) -> Line:
    """Compile a method's step, and return what its program shows."""
    step, entries = lowered(name, millions, mesh)
    made, program, seconds = compiled(name, millions, step, texts)
    bucket_bytes = 4 * entries
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
        "compile_seconds": seconds,
    }


def read_sliced(name: str, millions: int, devices: Any, texts: Path | None) -> Line:
    """Do so where the compiler shards the GPT, over `devices[replica, fsdp, tp]`."""
    mesh = sliced.mesh_of(devices[:1] if name == sliced.ALONE else devices)
    step = sliced.lowered(name, millions, mesh, ROWS)
    _, program, seconds = compiled(name, millions, step, texts)
    counts = sliced.counted(program, devices[0].size)
    return {**counts, "compile_seconds": seconds}


def main(args: Args) -> None:
    """Compile each method's step, and print its line."""
    shape = (sliced.REPLICAS, *args.inner) if args.inner else (4,)
    devices, version = described(args.device, math.prod(shape))
    inner = {"inner": args.inner} if args.inner else {}
    journal = Journal(args.out, {"device": args.device, **inner, **version})
    place: Any = np.array(devices).reshape(shape)
    how: Any = read_sliced
    if not args.inner:
        how, place = read, jax.sharding.Mesh(place, ("data",))
    for millions in args.millions:
        for name in args.methods:
            make = lambda name=name, n=millions: how(name, n, place, args.texts)
            line = journal.once(make, method=name, millions=millions)
            print(json.dumps(line), flush=True)
