"""Compile a training step for TPUs or GPUs without having one, and read the program.

For each method: what its collectives carry, the bytes that one replica puts into those
of all rungs, where they begin and end among the matrix products of both passes, how
many kernels there are, and how much memory the step needs beside its arguments, in
buckets. It runs on any machine with Linux, and needs no TPU and no GPU:

    pip install 'jax[tpu]'
    python examples/benchmarks programs --out FILE.jsonl
    pip install jax-cuda13-plugin jax-cuda13-pjrt
    python examples/benchmarks programs --device h100 --out FILE.jsonl
"""

import dataclasses
import importlib.metadata
import itertools
import json
import math
import os
import re
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
import optax
from common.journal import Journal, Line
from jax.experimental import topologies
from training.methods import after, arguments, is_local

import gravac_jax as gravac

ITEM_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "u16": 2, "s16": 2, "u8": 1}
COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
COLLECTIVE = re.compile(rf"= (.*?) ((?:{COLLECTIVES})(?:-start)?)\(")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
OPERATION = re.compile(r"%?([\w.-]+) = .*? ([a-z\-]+)\(")
KERNELS = {"fusion", "custom-call", "copy", "sort", "scatter", "reduce"}

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


@dataclasses.dataclass(frozen=True)
class Args:
    """What to compile.

    Args:
      out: The record, JSONL; methods that are in it are not compiled again.
      methods: Names as in training/methods.py; Adam follows if the memory has none.
      device: What to compile for: four of them.
      texts: A folder for the programs themselves.
      layers: The number of square matrices, with tanh between them.
      width: The side of a matrix.
    """

    out: Path
    methods: tuple[str, ...] = ("dense", "fixed100", "lowrank100", "default")
    device: Literal["v5e", "h100"] = "v5e"
    texts: Path | None = None
    layers: int = 3
    width: int = 1024


def compiled(name: str, args: Args, mesh: Any) -> tuple[str, float]:
    """Return a step's program for the devices of `mesh`, and its memory in bytes."""
    chosen = arguments(name)
    tx = optax.chain(
        gravac.transform(**chosen),
        *after(chosen, optax.scale_by_adam(), None),
        optax.scale_by_learning_rate(0.1),
    )

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        for matrix in params:
            x = jnp.tanh(x @ matrix)
        return jnp.mean(x**2)

    def train_step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        where = params
        if is_local(name):
            where = gravac.local_params(tx, params, opt_state)
        _, grads = gravac.value_and_grad(loss_fn)(where, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    matrix = jax.ShapeDtypeStruct((args.width, args.width), jnp.float32)
    params = [matrix] * args.layers
    opt_state = jax.eval_shape(tx.init, params)
    specs = gravac.state_specs((params, opt_state))

    def placed(spec: Any, x: Any) -> Any:
        shape = x.shape if spec == jax.P() else (mesh.size, *x.shape)
        sharding = jax.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

    is_spec = lambda x: isinstance(x, jax.P)
    state = jax.tree.map(placed, specs, (params, opt_state), is_leaf=is_spec)
    batch = jax.ShapeDtypeStruct((256, args.width), jnp.float32)
    step = jax.shard_map(
        train_step, mesh=mesh, in_specs=(*specs, jax.P("data")), out_specs=specs
    )
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
        *state, placed(jax.P("data"), batch)
    )
    program = lowered.compile()
    memory: Any = program.memory_analysis()
    return program.as_text() or "", memory.temp_size_in_bytes


def collectives(text: str, replicas: int) -> list[Line]:
    """Return each collective of a program, with the bytes that one replica puts in."""
    found = []
    for result, kind in COLLECTIVE.findall(text):
        arrays = ARRAY.findall(re.sub(r"\{[^}]*\}", "", result))
        size = lambda shape: math.prod(map(int, filter(None, shape.split(","))))
        total = sum(ITEM_BYTES[dtype] * size(shape) for dtype, shape in arrays)
        # The result of a gather holds the bytes of all replicas.
        shares = replicas if kind.startswith("all-gather") else 1
        of = " ".join(f"{dtype}[{shape}]" for dtype, shape in arrays)
        found.append({"kind": kind, "of": of, "payload_bytes": total // shares})
    return found


def operations(text: str) -> list[tuple[str, str, str]]:
    """Return the name, the kind and the line of what is scheduled, in order."""
    lines = text[text.index("ENTRY") :].splitlines()
    found = [(OPERATION.search(line), line) for line in lines]
    return [(match[1], match[2], line) for match, line in found if match]


def order(text: str) -> str:
    """Return the schedule: matrix products M, loops L, branches B, collectives."""
    marks: list[str] = []
    for name, kind, line in operations(text):
        if re.match(COLLECTIVES, kind):
            marks.append(f"[{kind}]")
        elif name.startswith("async-collective"):  # on TPUs, a fusion
            marks.append(f"[{'-'.join(name.split('.')[0].split('-')[:3])}]")
        elif kind in {"while", "conditional"}:
            marks.append("L" if kind == "while" else "B")
        elif "dot_general" in line and kind in {"fusion", "convolution", "custom-call"}:
            marks.append("M")
    runs = [(mark, len(list(run))) for mark, run in itertools.groupby(marks)]
    return " ".join(mark if n == 1 else f"{n}{mark}" for mark, n in runs)


def described(device: str) -> tuple[list[Any], dict[str, str]]:
    """Return four devices of a kind, and the version of what compiles for them."""
    if device == "v5e":
        topology = topologies.get_topology_desc("v5e:2x2", "tpu")
        package = "libtpu"
    else:
        topology = topologies.get_topology_desc(
            "", "cuda", target_config=H100, topology="1x1x4"
        )
        package = "jax-cuda13-pjrt"
    return topology.devices, {package: importlib.metadata.version(package)}


def main(args: Args) -> None:
    """Compile each method's step, and print its line."""
    devices, version = described(args.device)
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    bucket_bytes = 4 * args.layers * args.width**2
    setting = {"device": args.device, "layers": args.layers, "width": args.width}
    journal = Journal(args.out, {**setting, **version})

    def line_of(name: str) -> Line:
        text, memory_bytes = compiled(name, args, mesh)
        if args.texts:
            args.texts.mkdir(parents=True, exist_ok=True)
            (args.texts / f"{name}.txt").write_text(text)
        return {
            "collectives": collectives(text, len(devices)),
            "order": order(text),
            "kernels": sum(kind in KERNELS for _, kind, _ in operations(text)),
            "memory_in_buckets": round(memory_bytes / bucket_bytes, 1),
        }

    for name in args.methods:
        line = journal.once(lambda name=name: line_of(name), method=name)
        print(json.dumps(line), flush=True)
