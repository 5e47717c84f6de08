"""The step clock reports right times, and makes the host wait only for old steps."""

import gc
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _harness import wait_until

import gravac_jax as gravac
from gravac_jax._loop import step_clock


class Output:
    """The output of a step that ends when the test says so."""

    def __init__(self):
        self.is_done = threading.Event()

    def block_until_ready(self):
        assert self.is_done.wait(20)
        return self


class Wall:
    """A clock on the wall that the test turns."""

    def __init__(self, monkeypatch):
        self.now, self.was_read = 100.0, threading.Event()
        monkeypatch.setattr(step_clock.time, "perf_counter", self.read)

    def read(self):
        now = self.now
        if threading.current_thread() is not threading.main_thread():
            self.was_read.set()
        return now

    def finish(self, output):
        """Let a step end, and return when the clock's thread has read the time."""
        self.was_read.clear()
        output.is_done.set()
        assert self.was_read.wait(20)


@pytest.fixture
def wall(monkeypatch):
    return Wall(monkeypatch)


def begin(clock):
    output = Output()
    times = clock.times()
    clock.record(output)
    return output, times


def test_a_time_runs_from_the_end_of_the_step_before_and_without_pauses(wall):
    clock = gravac.StepClock()
    (first, times), (second, _) = begin(clock), begin(clock)
    assert times["step_seconds"] == 0
    wall.now += 3
    wall.finish(first)
    wall.now += 5
    wall.finish(second)
    clock.wait()
    times = clock.times()
    assert (times["step_seconds"], times["steps_ago"]) == (5, 1)
    wall.now += 1000
    (third, _), (fourth, _) = begin(clock), begin(clock)
    wall.now += 2
    wall.finish(third)
    clock._running[0].end.result()
    times = clock.times()
    assert (times["step_seconds"], times["steps_ago"]) == (2, 2)
    wall.finish(fourth)
    clock.wait()
    assert clock.times()["steps_ago"] == 1
    unknown = clock.times()
    assert unknown["step_seconds"] == 0
    types = [type(x) for found in (times, unknown) for x in found.values()]
    assert types == 2 * [np.float32, np.int32], "another would compile the step again"


def test_the_host_runs_four_steps_ahead_and_no_more(wall):
    clock = gravac.StepClock()
    outputs = [begin(clock)[0] for _ in range(4)]
    asking = threading.Thread(target=clock.times)
    asking.start()
    asking.join(0.2)
    assert asking.is_alive()
    for output in outputs:
        output.is_done.set()
    asking.join(20)
    assert not asking.is_alive()


def test_a_step_that_compiles_has_no_time_and_the_next_step_has():
    clock = gravac.StepClock()
    step = jax.jit(lambda x, seconds: x * 2 + jnp.where(seconds > 0, 0, 0))
    x, found = jnp.float32(1.0), []
    for _ in range(4):
        times = clock.times()
        found.append(float(times["step_seconds"]))
        x = step(x, times["step_seconds"])
        clock.record(x)
        clock.wait()
    assert found[:2] == [0, 0]
    assert (np.array(found[2:]) > 0).all()


def test_a_failed_step_has_no_time():
    class Broken:
        def block_until_ready(self):
            raise RuntimeError("the step failed")

    clock = gravac.StepClock()
    clock.times()
    clock.record(Broken())
    clock.wait()
    with pytest.warns(UserWarning, match="step 0 is unknown: the step failed"):
        assert clock.times()["step_seconds"] == 0


def test_a_program_may_end_while_steps_are_running():
    program = """
import jax, jax.numpy as jnp, gravac_jax as gravac
step = jax.jit(lambda x, **times: (x @ x / 1e3, x.sum()))
clock, x = gravac.StepClock(), jnp.ones((700, 700))
for _ in range(6):
    x, loss = step(x, **clock.times())
    clock.record(loss)
print("done")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


def test_a_deleted_clock_leaves_no_thread():
    before = threading.active_count()
    for _ in range(5):
        clock = gravac.StepClock()
        clock.times()
        clock.record(jnp.ones(2))
        clock.wait()
    del clock
    gc.collect()
    wait_until(lambda: threading.active_count() <= before)


def test_a_step_recorded_without_asking_for_times_began_with_the_clock(wall):
    clock, output = gravac.StepClock(), Output()
    clock.record(output)
    wall.now += 3
    wall.finish(output)
    clock.wait()
    assert clock.times()["step_seconds"] == 3
