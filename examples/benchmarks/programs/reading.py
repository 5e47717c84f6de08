"""Read a compiled program: its kernels, loops, conditionals, bytes and collectives.

A program is the text of an optimised, scheduled HLO module, as `Compiled.as_text()`
returns it. Whatever a device launches is a kernel here: fusions, library calls, sorts,
copies. A collective is none.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import numpy as np

DTYPE_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "c64": 8, "c128": 16}
COLLECTIVE = re.compile(
    "(all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute"
    "|ragged-all-to-all|reduce-scatter)(-start)?"
)
ARRAY = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")
NAME = re.compile(r"%([\w.-]+)")
BEGIN = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TWO_BRANCHES = re.compile(r"true_computation=%([\w.-]+), false_computation=%([\w.-]+)")
# What takes no time of its own, or is counted elsewhere.
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "while", "conditional", "call"),
}
VIEWS = {"bitcast", "get-tuple-element"}
PARTS = {"slice", "dynamic-slice", "gather"}
CHANGES = {"dynamic-update-slice": 1, "scatter": 2}  # the operand that is put in
GROUPS = re.compile(
    r"replica_groups=(?:(\{\{[\d,{}]*\}\})|\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
    r"|mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\})"
)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One line of a computation.

    Attributes:
      name: Its name in the program.
      shape: The shape of its result, as written.
      kind: The opcode.
      operands: The names of its operands.
      rest: Attributes, metadata and the backend's configuration, as written.
      is_root: Whether its result is that of the computation.
    """

    name: str
    shape: str
    kind: str
    operands: tuple[str, ...]
    rest: str
    is_root: bool

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return bytes_of(self.shape)

    @property
    def collective(self) -> str | None:
        """The kind of collective that starts here, if one does."""
        match = COLLECTIVE.fullmatch(self.kind)
        return match[1] if match else None

    @property
    def is_kernel(self) -> bool:
        """Whether the device runs a kernel for it."""
        is_free = self.kind in FREE or self.kind.endswith(("-start", "-done"))
        is_view = "ConcatBitcast" in self.rest
        is_scalar = self.bytes <= 8 and self.kind not in {"fusion", "copy"}
        return not (is_free or is_view or is_scalar or self.collective)

    @property
    def is_product(self) -> bool:
        """Whether it multiplies matrices, as models do."""
        is_call = "gemm" in self.rest or "gemm" in self.name
        is_dot = self.kind in {"dot", "convolution"} or "dot_general" in self.rest
        return self.is_kernel and (is_call or is_dot)


@dataclasses.dataclass(frozen=True)
class Conditional:
    """A choice among branches.

    Attributes:
      name: Where it stands in the program.
      branches: What each branch costs, in the order of the program.
    """

    name: str
    branches: tuple["Cost", ...]


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a computation costs each time it runs, at the most expensive branches.

    Attributes:
      launches: Kernels that run; those in a loop count once a turn.
      bytes: What these kernels read and write.
    """

    launches: int = 0
    bytes: int = 0

    def plus(self, other: "Cost", times: int = 1) -> "Cost":
        """Return the cost of both, of the other one so many times."""
        launches = self.launches + times * other.launches
        return Cost(launches, self.bytes + times * other.bytes)


class Program:
    """A program's computations, and what they cost.

    Args:
      text: The program.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, Operation]] = {}
        self.entry = ""
        current: dict[str, Operation] = {}
        for line in text.splitlines():
            if line.startswith((" ", "}")):
                if operation := _parse(line):
                    current[operation.name] = operation
            elif begin := BEGIN.match(line):
                current = self.computations.setdefault(begin[2], {})
                self.entry = begin[2] if begin[1] else self.entry
        self._costs: dict[str, Cost] = {}

    @functools.cached_property
    def scheduled(self) -> list[list[Operation]]:
        """The entry and all bodies and branches that it reaches, each in its order."""
        found, waiting = {}, [self.entry]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found[name] = list(self.computations[name].values())
                for x in found[name]:
                    waiting += self.inner(x)
        return list(found.values())

    def inner(self, x: Operation) -> list[str]:
        """Return the computations that an operation runs: a body, or branches."""
        if x.kind == "while":
            return [_named(x.rest, "body")]
        if x.kind == "conditional":
            return _branches(x)
        return [_named(x.rest, "to_apply")] if x.kind == "call" else []

    def _all(self) -> Iterator[Operation]:
        for operations in self.scheduled:
            yield from operations

    @property
    def kernels(self) -> int:
        """Kernels in the program, those of all branches."""
        return sum(x.is_kernel for x in self._all())

    @property
    def turns(self) -> list[int | None]:
        """The turns of each loop; None where only the device knows."""
        return [_turns(x) for x in self._all() if x.kind == "while"]

    @property
    def conditionals(self) -> list[Conditional]:
        """All conditionals, with the cost of each branch."""
        found = [x for x in self._all() if x.kind == "conditional"]
        costs = [tuple(map(self.cost, _branches(x))) for x in found]
        return [Conditional(x.name, y) for x, y in zip(found, costs, strict=True)]

    def cost(self, computation: str | None = None) -> Cost:
        """Return what a computation costs, or the whole program."""
        name = computation or self.entry
        if name not in self._costs:
            there = self.computations[name]
            cost = Cost()
            for x in there.values():
                cost = cost.plus(self._cost_of(x, there))
            self._costs[name] = cost
        return self._costs[name]

    def _cost_of(self, x: Operation, there: dict[str, Operation]) -> Cost:
        inner = [self.cost(name) for name in self.inner(x)]
        if x.kind == "while":
            # Loops of unknown length take at most one turn here: `_xla.only_if`.
            return Cost().plus(inner[0], _turns(x) or 1)
        if inner:
            return max(inner, key=lambda cost: cost.bytes)
        return Cost(1, self._moved(x, there)) if x.is_kernel else Cost()

    def _moved(self, x: Operation, there: dict[str, Operation]) -> int:
        """Return the bytes that a kernel reads and writes.

        Of what it only reads a part of, that part counts; of what it changes in place,
        the change.
        """
        sizes = [there[name].bytes for name in x.operands if name in there]
        if x.kind in PARTS:
            return 2 * x.bytes
        if x.kind in CHANGES:
            return 2 * sum(sizes[1:])
        inner = self.computations.get(_named(x.rest, "calls")) if x.rest else None
        if x.kind != "fusion" or inner is None:
            return sum(sizes) + x.bytes
        roots = [y for y in inner.values() if y.is_root]
        written = [inner[name] for y in roots for name in y.operands]
        results = written if roots[0].kind == "tuple" else roots
        return _read(inner) + sum(_written(y, inner) for y in results)

    def collectives(self, replicas: int) -> list[dict[str, object]]:
        """Return each collective: what a replica puts in, and what runs meanwhile.

        `between` counts the kernels from its start to its end, and `products` the
        matrix products among them; None if it is synchronous.
        """
        found = []
        for operations in self.scheduled:
            for i, x in enumerate(operations):
                if not x.collective:
                    continue
                done = _done(operations, i)
                during = operations[i:done] if done else []
                found.append(
                    {
                        "kind": x.collective,
                        "payload_bytes": _payload(x, replicas),
                        "between": sum(y.is_kernel for y in during) if done else None,
                        "products": sum(y.is_product for y in during) if done else None,
                    }
                )
        return found


def groups(text: str) -> list[list[int]]:
    """Return the groups of devices that a collective puts together.

    Args:
      text: Its attributes, as written, or its whole line.
    """
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", text):
        return np.reshape(_numbers(pairs[1]), (-1, 2)).tolist()
    match = GROUPS.search(text)
    assert match, text
    listed, shape, dims, turn, mesh, ids, ids_turn, axes = match.groups()
    if listed:
        return [_numbers(x) for x in re.findall(r"\{([\d,]+)\}", listed)]
    if shape:
        return _turned(dims, turn).reshape(_numbers(shape)).tolist()
    sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", mesh)}
    devices = _turned(ids, ids_turn) if ids else np.arange(math.prod(sizes.values()))
    devices = devices.reshape([*sizes.values()])
    inside = [list(sizes).index(x) for x in re.findall(r"\w+", axes)]
    outside = [i for i in range(len(sizes)) if i not in inside]
    count = math.prod(devices.shape[i] for i in inside)
    return devices.transpose(outside + inside).reshape(-1, count).tolist()


def _numbers(text: str) -> list[int]:
    return [int(x) for x in re.findall(r"\d+", text)]


def _turned(dims: str, turn: str | None) -> np.ndarray:
    shape = _numbers(dims)
    order = _numbers(turn) if turn else range(len(shape))
    return np.arange(math.prod(shape)).reshape(shape).transpose(order)


def _parse(line: str) -> Operation | None:
    left, equals, right = line.strip().partition(" = ")
    if not equals:
        return None
    right = re.sub(r"/\*.*?\*/", "", right)
    stop = _closing(right) if right.startswith("(") else right.index(" ")
    shape, right = right[:stop], right[stop:].strip()
    kind, _, right = right.partition("(")
    stop = _closing("(" + right) - 2
    inside, rest = right[:stop], right[stop + 1 :]
    operands = tuple(NAME.findall(inside)) or ((inside,) if inside else ())
    is_root = left.startswith("ROOT ")
    name = left.removeprefix("ROOT ").lstrip("%")
    return Operation(name, shape, kind, operands, rest, is_root)


def _closing(text: str) -> int:
    """Return where the parenthesis that `text` begins with is closed: one after it."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.end()
    return len(text)


def bytes_of(shape: str) -> int:
    """Return the bytes of a shape, or of all shapes in a tuple."""
    found = ARRAY.findall(re.sub(r"\{[^}]*\}", "", shape))
    return sum(_dtype_bytes(dtype) * _entries(sizes) for dtype, sizes in found)


def _dtype_bytes(dtype: str) -> int:
    bits = re.sub(r"\D", "", dtype)
    return DTYPE_BYTES.get(dtype) or max(1, int(bits or 8) // 8)


def _entries(sizes: str) -> int:
    return math.prod(map(int, filter(None, sizes.split(","))))


def _named(rest: str, attribute: str) -> str:
    match = re.search(rf"{attribute}=%?([\w.-]+)", rest)
    return match[1] if match else ""


def _branches(x: Operation) -> list[str]:
    if match := BRANCHES.search(x.rest):
        return NAME.findall(match[1])
    match = TWO_BRANCHES.search(x.rest)
    return [match[1], match[2]] if match else []


def _turns(x: Operation) -> int | None:
    match = re.search(r'known_trip_count":\s*\{"n":\s*"(\d+)"', x.rest)
    return int(match[1]) if match else None


def _seen(x: Operation, inner: dict[str, Operation]) -> Operation:
    """Return what a view is of."""
    while x.kind in VIEWS:
        x = inner[x.operands[0]]
    return x


def _changed(x: Operation, inner: dict[str, Operation]) -> Operation | None:
    """Return the parameter that an operation changes in place, if it does."""
    if x.kind not in CHANGES:
        return None
    whole = _seen(inner[x.operands[0]], inner)
    return whole if whole.kind == "parameter" else None


def _read(inner: dict[str, Operation]) -> int:
    """Return the bytes of parameters that the result of a kernel is made of."""
    shares = dict.fromkeys(inner, 0.0)  # of the entries of each value
    for x in reversed(inner.values()):
        own = 1.0 if x.is_root else min(1.0, shares[x.name])
        for i, name in enumerate(x.operands):
            if x.kind == "broadcast" or (i == 0 and x.kind in PARTS):
                shares[name] += own * x.bytes / max(1, inner[name].bytes)
            elif name in inner and not (i == 0 and _changed(x, inner)):
                shares[name] += own
    parameters = [x for x in inner.values() if x.kind == "parameter"]
    return sum(round(min(1.0, shares[x.name]) * x.bytes) for x in parameters)


def _written(x: Operation, inner: dict[str, Operation]) -> int:
    x = _seen(x, inner)
    if _changed(x, inner):
        return inner[x.operands[CHANGES[x.kind]]].bytes
    return x.bytes


def _done(operations: list[Operation], start: int) -> int | None:
    """Return where a collective ends that runs beside other work; None if none does."""
    x = operations[start]
    if not x.kind.endswith("-start"):
        return None
    reads = lambda y: x.name in y.operands and y.kind.endswith("-done")
    return next((i for i, y in enumerate(operations) if i > start and reads(y)), None)


def _payload(x: Operation, replicas: int) -> int:
    """Return the bytes that one replica puts in."""
    size = bytes_of(x.shape)
    if x.kind.endswith("-start") and x.shape.startswith("("):
        shapes = ARRAY.findall(re.sub(r"\{[^}]*\}", "", x.shape))
        dtype, sizes = shapes[-1]  # the result; before it comes the operand
        size = _dtype_bytes(dtype) * _entries(sizes)
    # The result of a gather holds the bytes of all replicas.
    return size // replicas if x.collective == "all-gather" else size
