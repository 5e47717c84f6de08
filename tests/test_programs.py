"""What the benchmark `programs` reads from a compiled program."""

import jax
import jax.numpy as jnp
from common import journal
from programs import reading, report
from programs.reading import Program

PROGRAM = """HloModule step, is_scheduled=true

%fused_slice (p.0: f32[1000], p.1: s32[]) -> f32[10] {
  %p.0 = f32[1000]{0} parameter(0)
  %p.1 = s32[] parameter(1)
  %n = f32[1000]{0} negate(%p.0)
  ROOT %part = f32[10]{0} dynamic-slice(%n, %p.1), dynamic_slice_sizes={10}
}

%few (p.2: f32[10]) -> f32[10] {
  %p.2 = f32[10]{0} parameter(0)
  ROOT %copy.1 = f32[10]{0} copy(%p.2)
}

%many (p.3: f32[10]) -> f32[10] {
  %p.3 = f32[10]{0} parameter(0)
  %copy.2 = f32[10]{0} copy(%p.3)
  ROOT %copy.3 = f32[10]{0} copy(%copy.2)
}

%turn (p.4: (s32[], f32[10])) -> (s32[], f32[10]) {
  %p.4 = (s32[], f32[10]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p.4), index=0
  %x = f32[10]{0} get-tuple-element(%p.4), index=1
  %copy.4 = f32[10]{0} copy(%x)
  ROOT %next = (s32[], f32[10]{0}) tuple(%i, %copy.4)
}

ENTRY %main (a: f32[1000], i: s32[], /*index=2*/b: f32[10]) -> f32[4,10] {
  %a = f32[1000]{0} parameter(0)
  %i.1 = s32[] parameter(1)
  %b = f32[10]{0:T(128)} parameter(2)
  %all-gather-start = (f32[10]{0}, f32[4,10]{1,0}) all-gather-start(%b), dimensions={0}
  %slice_fusion = f32[10]{0} fusion(%a, %i.1), kind=kLoop, calls=%fused_slice
  %branch = f32[10]{0} conditional(%i.1, %slice_fusion, %slice_fusion), \
branch_computations={%few, %many}
  %state = (s32[], f32[10]{0}) tuple(%i.1, %branch)
  %loop = (s32[], f32[10]{0}) while(%state), condition=%less, body=%turn, \
backend_config={"known_trip_count":{"n":"7"}}
  ROOT %all-gather-done = f32[4,10]{1,0} all-gather-done(%all-gather-start)
}
"""


def test_kernels_count_once_a_turn_and_in_the_longest_branch():
    program = Program(PROGRAM)
    assert (program.kernels, program.turns) == (1 + 1 + 2 + 1, [7])
    assert program.cost().launches == 1 + 2 + 7
    (branches,) = (x.branches for x in program.conditionals)
    assert [x.launches for x in branches] == [1, 2]


def test_of_what_a_kernel_reads_a_part_of_the_part_counts():
    copies, part, index = (2 + 7) * 2 * 40, 2 * 40, 4
    assert Program(PROGRAM).cost().bytes == copies + part + index


def test_a_collective_shows_what_runs_beside_it():
    assert Program(PROGRAM).collectives(replicas=4) == [
        {"kind": "all-gather", "payload_bytes": 40, "between": 1, "products": 0}
    ]


def test_turns_of_a_compiled_loop_are_known():
    steps = lambda x: jax.lax.scan(lambda y, _: (jnp.sin(y), None), x, length=9)[0]
    text = jax.jit(steps).lower(jnp.ones(100)).compile().as_text()
    assert Program(text or "").turns == [9]


def test_devices_that_a_collective_puts_together_are_read_in_every_spelling():
    spellings = {
        "replica_groups={{0,1},{2,3}}": [[0, 1], [2, 3]],
        "replica_groups=[2,2]<=[4]": [[0, 1], [2, 3]],
        "replica_groups=[2,2]<=[2,2]T(1,0)": [[0, 2], [1, 3]],
        "source_target_pairs={{0,1},{1,0}}": [[0, 1], [1, 0]],
        "replica_groups=mesh['a'=2,'b'=2] {'b'}": [[0, 1], [2, 3]],
        "replica_groups=mesh['a'=2,'b'=2] {'a'}": [[0, 2], [1, 3]],
    }
    assert {text: reading.groups(text) for text in spellings} == spellings


def test_a_row_says_what_a_method_costs_beyond_a_dense_step(tmp_path):
    line = {"method": "dense", "millions": 1, "entries": 900_000, "kernels": 107}
    line |= {"passes": 37.5, "turns": [], "conditionals": [], "temporaries": 2.4}
    line |= {"collectives": [], "compile_seconds": 6.2}
    sent = {"payload_bytes": 2e5, "between": 4}
    other = {"method": "Bits(2)", "kernels": 111, "passes": 34.3, "turns": [None, 7]}
    other |= {"collectives": [sent, {"payload_bytes": 100, "between": 1}]}
    book = journal.Journal(tmp_path / "record.jsonl", {})
    book.append(line, {**line, **other})
    row = report.text(book.path).splitlines()[-1].strip("| ").split(" | ")
    assert row == ["Bits(2)", "0.9", "4", "-3.2", "7", "0", "2.4", "0.2, 4", "6"]
