"""Times of steps are right, and asking for them waits for nothing but old steps."""

import gc
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gravac_jax as gravac
from gravac_jax import _clock


class Output:
    """What a step returns: there when the test says so."""

    def __init__(self):
        self.is_done = threading.Event()

    def block_until_ready(self):
        assert self.is_done.wait(20)
        return self


class Time:
    """A clock on the wall that the test turns."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(_clock.time, "perf_counter", lambda: self.now)


@pytest.fixture
def wall(monkeypatch):
    return Time(monkeypatch)


def finish(clock, output):
    """Let a step end, and see that it is noticed."""
    before = clock._finished.steps
    output.is_done.set()
    clock._finished.wait_for(before + 1)


def begin(clock):
    output = Output()
    times = clock.times()
    clock.record(output)
    return output, times


def test_a_step_takes_from_the_end_of_the_one_before(wall):
    clock = gravac.StepClock()
    first, times = begin(clock)
    assert np.isnan(times["step_seconds"])
    second, _ = begin(clock)
    wall.now += 3
    finish(clock, first)
    wall.now += 5
    finish(clock, second)
    times = clock.times()
    assert (times["step_seconds"], times["measured_step"]) == (5, 1)


def test_a_pause_between_steps_does_not_count(wall):
    clock = gravac.StepClock(steps=7)
    first, _ = begin(clock)
    finish(clock, first)
    wall.now += 1000
    second, _ = begin(clock)
    wall.now += 2
    finish(clock, second)
    times = clock.times()
    assert (times["step_seconds"], times["measured_step"]) == (2, 8)


def test_nothing_finished_is_not_a_number(wall):
    clock = gravac.StepClock()
    outputs = [begin(clock) for _ in range(_clock.AHEAD)]
    assert all(np.isnan(times["step_seconds"]) for _, times in outputs)
    for output, _ in outputs:
        finish(clock, output)
    assert clock.times()["measured_step"] == _clock.AHEAD - 1
    assert np.isnan(clock.times()["step_seconds"])


def test_the_host_may_run_four_steps_ahead_and_no_more(wall):
    clock = gravac.StepClock()
    outputs = [begin(clock)[0] for _ in range(_clock.AHEAD)]
    asked = threading.Thread(target=clock.times)
    asked.start()
    asked.join(0.2)
    assert asked.is_alive()
    finish(clock, outputs[0])
    asked.join(20)
    assert not asked.is_alive()
    for output in outputs[1:]:
        finish(clock, output)


def test_a_step_that_compiles_has_no_time_and_the_next_one_has():
    clock = gravac.StepClock()
    step = jax.jit(lambda x, seconds: x * 2 + jnp.where(seconds > 0, 0, 0))
    x, found = jnp.float32(1.0), []
    for _ in range(4):
        times = clock.times()
        found.append(float(times["step_seconds"]))
        x = step(x, times["step_seconds"])
        clock.record(x)
        clock.wait()
    assert np.isnan(found[:2]).all()
    assert (np.array(found[2:]) > 0).all()


def test_a_step_that_failed_has_no_time(wall):
    class Broken:
        def block_until_ready(self):
            raise RuntimeError("the step failed")

    clock = gravac.StepClock()
    clock.times()
    clock.record(Broken())
    clock.wait()
    with pytest.warns(UserWarning, match="the step failed.*its loss"):
        assert np.isnan(clock.times()["step_seconds"])


def test_nothing_to_wait_for_is_refused():
    clock = gravac.StepClock()
    clock.times()
    with pytest.raises(ValueError, match="nothing to wait for in None"):
        clock.record(None)


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


def test_a_clock_that_is_gone_leaves_no_thread():
    before = threading.active_count()
    for _ in range(5):
        clock = gravac.StepClock()
        clock.times()
        clock.record(jnp.ones(2))
        clock.wait()
    del clock
    gc.collect()
    deadline = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_types_do_not_change_so_that_a_step_compiles_once():
    clock = gravac.StepClock()
    output, times = begin(clock)
    finish(clock, output)
    later = clock.times()
    kinds = lambda x: {name: type(value) for name, value in x.items()}
    assert kinds(times) == kinds(later)
    assert kinds(later) == {"step_seconds": np.float32, "measured_step": np.int32}


def test_steps_cannot_be_negative():
    with pytest.raises(ValueError, match="0 or more, got -1"):
        gravac.StepClock(steps=-1)


def test_a_controller_gets_the_times_of_a_run():
    tx = gravac.transform(None, compress=True, controller=gravac.Fastest())

    @jax.jit
    def step(params, state, **times):
        updates, state = tx.update(params, state, **times)
        return params - 0.1 * updates, state, jnp.sum(updates)

    clock, params = gravac.StepClock(), jnp.ones(500)
    state = tx.init(params)
    for _ in range(10):
        params, state, loss = step(params, state, **clock.times())
        clock.record(loss)
        clock.wait()
    assert state.controller.timing.times >= 2
    assert 0 < state.controller.timing.seconds < 20
