"""Compile a training step for TPUs without having one, and read the program.

For each method: what its collectives carry, the bytes that one replica puts into those
of all rungs, where they stand among the matrix products of the backward pass, and how
much memory the step needs beside its arguments, in buckets. It runs on any machine with
Linux, and needs no TPU:

    pip install 'jax[tpu]'
    python examples/benchmarks programs --out FILE.jsonl
"""

import dataclasses
import importlib.metadata
import json
import math
import os
import re
from pathlib import Path
from typing import Any

# Before JAX starts: TPUs are described, not looked for.
os.environ.update(
    JAX_PLATFORMS="cpu",
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
from training.methods import arguments

import gravac_jax as gravac

ITEM_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "u16": 2, "s16": 2, "u8": 1}
COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
COLLECTIVE = re.compile(rf"= (.*?) ((?:{COLLECTIVES})(?:-start)?)\(")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Args:
    """What to compile.

    Args:
      out: The record, JSONL; methods that are in it are not compiled again.
      methods: Names as in training/methods.py.
      texts: A folder for the programs themselves.
      topology: The topology of the TPU slice.
      layers: The number of square matrices, with tanh between them.
      width: The side of a matrix.
    """

    out: Path
    methods: tuple[str, ...] = ("dense", "fixed100", "lowrank100", "default")
    texts: Path | None = None
    topology: str = "v5e:2x2"
    layers: int = 3
    width: int = 1024


def compiled(name: str, args: Args, mesh: Any) -> tuple[str, float]:
    """Return a step's program for the devices of `mesh`, and its memory in bytes."""
    tx = optax.chain(gravac.transform(**arguments(name)), optax.sgd(0.1))

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        for matrix in params:
            x = jnp.tanh(x @ matrix)
        return jnp.mean(x**2)

    def train_step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        _, grads = gravac.value_and_grad(loss_fn)(params, x)
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


def order(text: str) -> str:
    """Return the schedule: matrix products M, loops L, branches B, collectives."""
    entry, marks = text[text.index("ENTRY") :].splitlines(), []
    for line in entry:
        match = re.search(r"= .*? ([a-z\-]+)\(", line)
        kind = match[1] if match else ""
        if re.match(COLLECTIVES, kind):
            marks.append(f"[{kind}]")
        elif kind in {"while", "conditional"}:
            marks.append("L" if kind == "while" else "B")
        elif "dot_general" in line and kind in {"fusion", "convolution"}:
            marks.append("M")
    return " ".join(marks)


def main(args: Args) -> None:
    """Compile each method's step, and print its line."""
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=args.topology
    ).devices
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    bucket_bytes = 4 * args.layers * args.width**2
    setting = {"topology": args.topology, "layers": args.layers, "width": args.width}
    setting["libtpu"] = importlib.metadata.version("libtpu")
    journal = Journal(args.out, setting)

    def line_of(name: str) -> Line:
        text, memory_bytes = compiled(name, args, mesh)
        if args.texts:
            args.texts.mkdir(parents=True, exist_ok=True)
            (args.texts / f"{name}.txt").write_text(text)
        return {
            "collectives": collectives(text, len(devices)),
            "order": order(text),
            "memory_in_buckets": round(memory_bytes / bucket_bytes, 1),
        }

    for name in args.methods:
        line = journal.once(lambda name=name: line_of(name), method=name)
        print(json.dumps(line), flush=True)
