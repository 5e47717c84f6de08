"""The emulated network: what it counts, what it limits, and that nothing is left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from _harness import is_alive, wait_until
from common import network
from common.network import Links, Network, NetworkError

pytestmark = pytest.mark.xdist_group("processes")  # one test of them at a time

BENCHMARKS = Path(network.__file__).parents[1]
SECONDS = 120  # for what takes a few seconds on an idle machine


@pytest.fixture
def net_of():
    """Makes networks, where they can be made."""
    if reason := Network.unavailable():
        pytest.skip(reason)
    return Network


@pytest.fixture
def script(tmp_path):
    """Writes a Python file that can import `common`."""

    def write(text, name="script.py"):
        path = tmp_path / name
        path.write_text(f"import sys\nsys.path.insert(0, {str(BENCHMARKS)!r})\n{text}")
        return str(path)

    return write


def machine():
    """What an abandoned network could leave behind on the machine itself."""
    links = subprocess.check_output(["ip", "-j", "link"], text=True)
    names = [(x["ifindex"], x["ifname"], x["operstate"]) for x in json.loads(links)]
    return names, Path("/proc/mounts").read_text(), Path("/etc/hosts").read_text()


def users(namespaces):
    """The processes in any of these network namespaces."""
    found = []
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found += [link.parts[2]] * (os.readlink(link) in namespaces)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def namespaces_of(links):
    return {os.readlink(f"/proc/{pid}/ns/net") for pid in (*links.hosts, links.switch)}


def queues(links):
    """The queueing disciplines at both ends of all links."""
    ends = [(pid, "eth0") for pid in links.hosts]
    ends += [(links.switch, f"port{i}") for i in range(len(links.hosts))]
    show = "nsenter -t {} -n tc -j qdisc show dev {}"
    shown = (subprocess.check_output(show.format(*end).split()) for end in ends)
    return [json.loads(x)[0] for x in shown]


@pytest.mark.parametrize("bandwidth_mbit", [0, -1.0, float("nan")])
def test_a_bandwidth_that_is_none_is_refused(bandwidth_mbit):
    links = Links("a network", hosts=(1,), switch=2)
    with pytest.raises(ValueError, match="bandwidth_mbit must be positive"):
        links.set_bandwidth(bandwidth_mbit)


def test_who_is_not_root_is_told_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NetworkError, match="needs root"), Network(hosts=2):
        pass


@pytest.mark.slow
def test_bandwidth_is_changed_from_outside_and_from_within(net_of, script):
    job = "from common import network\nnetwork.attach().set_bandwidth(20.5)"
    with net_of(hosts=2, bandwidth_mbit=100) as net:
        bytes_per_second = lambda: [x["options"]["rate"] for x in queues(net.links)]
        assert bytes_per_second() == [12_500_000] * 4
        # Two milliseconds' bytes may leave at once.
        bursts = [x["options"]["burst"] for x in queues(net.links)]
        assert bursts == pytest.approx([25_000] * 4, rel=0.001)
        net.links.set_bandwidth(300)
        assert bytes_per_second() == [37_500_000] * 4
        net.run([[sys.executable, script(job)]]).wait(SECONDS)
        assert bytes_per_second() == [2_562_500] * 4
        net.links.set_bandwidth(None)
        assert [x["kind"] for x in queues(net.links)] == ["noqueue"] * 4


@pytest.mark.slow
def test_nothing_is_left_of_a_network_that_cannot_be_finished(net_of, monkeypatch):
    before, pids = machine(), []
    real = network._keeper
    monkeypatch.setattr(network, "_keeper", lambda x: pids.append(real(x)) or pids[-1])
    with pytest.raises(NetworkError, match=r"tc qdisc replace .* failed"):
        net_of(hosts=2, bandwidth_mbit=1e30).__enter__()
    assert len(pids) == 3
    assert not any(is_alive(keeper.pid) for keeper in pids)
    assert machine() == before


# A job whose processes wait for each other for ever.
ENDLESS = """
import pathlib, os, time, jax
from jax.experimental import multihost_utils
for step in range(10**9):
    multihost_utils.sync_global_devices(str(step))
    pathlib.Path(sys.argv[1], f"{jax.process_index()}.{step}").touch()
    time.sleep(0.1)
"""
CREATOR = """
import json
from common.network import Network
with Network(hosts=2, bandwidth_mbit=100) as net:
    job = net.launch(sys.argv[1:])
    print(json.dumps([net.links.hosts, net.links.switch, job.pids]), flush=True)
    job.wait()
"""


def is_training(folder):
    """Whether both processes of `ENDLESS` take steps."""
    return all((folder / f"{i}.3").exists() for i in range(2))


@pytest.mark.slow
def test_nothing_is_left_when_who_made_the_network_is_killed(net_of, script, tmp_path):
    before = machine()
    command = [script(CREATOR), script(ENDLESS, "endless.py"), str(tmp_path)]
    creator = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, text=True
    )
    try:
        hosts, switch, job = json.loads(creator.stdout.readline())
        namespaces = namespaces_of(Links("", tuple(hosts), switch))
        wait_until(lambda: is_training(tmp_path))
        assert all(map(is_alive, [*hosts, switch, *job]))
    finally:
        creator.kill()
        creator.wait()
    wait_until(lambda: not any(map(is_alive, [*hosts, switch, *job])))
    wait_until(lambda: users(namespaces) == [])
    assert machine() == before


WIRE = """
import json, pathlib, time
import jax, jax.numpy as jnp, numpy as np, optax
from jax.experimental import multihost_utils
import gravac_jax as gravac
from common import network
STEPS = 10
told = lambda state: float(optax.tree.get(state, "StepInfo").wire_bytes)
links, process = network.attach(), jax.process_index()
mesh, rng = gravac.make_mesh(), np.random.default_rng(process)
sent = lambda: links.sent_bytes()[process]
def measure(tx, entries):
    def train_step(params, state, grads):
        updates, state = tx.update(grads[0], state, params)
        return optax.apply_updates(params, updates), state
    params = jnp.zeros(entries)
    params, state = gravac.place((params, tx.init(params)), mesh)
    step = gravac.data_parallel(train_step, mesh)
    grads = rng.standard_normal((1, entries), dtype=np.float32)
    before = expected = 0
    for i in range(2 + STEPS):
        if i == 2:  # compiled, connected
            multihost_utils.sync_global_devices("before")
            before = sent()
        params, state = jax.block_until_ready(step(params, state, grads))
        expected += told(state) if i >= 2 else 0
    multihost_utils.sync_global_devices("after")
    return expected, sent() - before
def local_steps():
    tx = gravac.sgd(0.1, send=gravac.Bits(2), every=100)
    loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
    step = gravac.train_step(loss, tx, mesh)
    state, found = step.init({"w": jnp.ones((256, 256))}), {}
    batch = rng.standard_normal((4, 256), dtype=np.float32)
    for name, steps in (("to the exchange", 100), ("local", 60), ("exchange", 40)):
        multihost_utils.sync_global_devices(name)
        time.sleep(0.5)  # for what acknowledges this
        before = sent()
        for _ in range(steps):
            *state, _ = jax.block_until_ready(step(*state, batch))
        found[name] = sent() - before
    return found["local"], found["exchange"]
def transform(send, **options):
    return gravac.transform(send=send, compress=True, **options)
dense, bits = gravac.Dense(), gravac.Bits(2)
cases = {
    "dense, 1 MB": (transform(dense), 250_000),
    "a hundredth, 100 kB": (transform(gravac.TopK(100)), 2_500_000),
    "rounds": (transform(dense, every=5), 250_000),
    "adaptive": (transform(gravac.Fastest((dense, gravac.Bits(8), bits))), 1_250_000),
    "dense, 16 bits, 1 MB": (transform(gravac.Dense("bfloat16")), 500_000),
}
found = {name: measure(*case) for name, case in cases.items()}
text = json.dumps([found, local_steps()])
pathlib.Path(sys.argv[1], f"{process}.json").write_text(text)
"""


@pytest.mark.slow
def test_interfaces_count_wire_bytes_and_no_local_steps(net_of, script, tmp_path):
    with net_of(hosts=3) as net:
        net.launch([script(WIRE), str(tmp_path)]).wait(3 * SECONDS)
    told = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(3)]
    for name in told[0][0]:
        expected, counted = np.array([found[name] for found, _ in told]).T
        assert (expected > 0).all()
        assert (abs(counted / expected - 1) < 0.1).all(), (name, counted / expected)
    for _, (local, exchange) in told:
        # The smallest message in each of 60 steps would be 8 kB; heartbeats are less.
        assert local < 2_000
        assert exchange > 10_000
