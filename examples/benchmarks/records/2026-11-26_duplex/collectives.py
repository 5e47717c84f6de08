"""Time collectives of JAX's CPU backend, and plain sockets, on emulated networks.

As root, with `examples/benchmarks` in `PYTHONPATH`. It prints a line of JSON for each
number of hosts, bandwidth and collective: how long it takes the last host, which begins
with the others, or late.
"""

import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SENT_BYTES, TIMES = 66_000, 9
HOSTS, MBIT, PORT = (2, 4), (5.5, 18.0), 5999
LATE_SECONDS = (0.0, 0.005)
Times = dict[float, list[float]]  # milliseconds in order, by how late the last host is


def timed(run: Callable[[], Any]) -> Times:
    """Return how long runs take."""
    import jax
    from jax.experimental import multihost_utils

    is_last = jax.process_index() == jax.process_count() - 1
    times = {}
    for late in LATE_SECONDS:
        found = []
        for i in range(TIMES + 1):
            multihost_utils.sync_global_devices(str(i))
            time.sleep(0.05 + late * is_last)
            start = time.perf_counter()
            run()
            found.append(round(1e3 * (time.perf_counter() - start), 1))
        times[late] = sorted(found[1:])
    return times


def collectives() -> dict[str, Times]:
    """Time each collective of which a host sends `SENT_BYTES`."""
    import jax

    n, axis = jax.device_count(), "data"
    mesh = jax.make_mesh((n,), (axis,))
    words = SENT_BYTES // 4
    swap = lambda x: jax.lax.all_to_all(x.reshape(n, -1), axis, 0, 0)
    ring = [(i, (i + 1) % n) for i in range(n)]
    # What a host holds, so that it sends as many bytes in each.
    kinds = {
        "all-to-all": (swap, words * n // (n - 1) // n * n),
        "permute": (lambda x: jax.lax.ppermute(x, axis, ring), words),
        "all-gather": (lambda x: jax.lax.all_gather(x, axis), words // (n - 1)),
        "all-reduce": (lambda x: jax.lax.psum(x, axis), words * n // (n - 1) // 2),
    }
    found = {}
    for name, (f, held) in kinds.items():
        mapped = jax.shard_map(
            lambda x, f=f: f(x).reshape(-1),
            mesh=mesh,
            in_specs=jax.P(axis),
            out_specs=jax.P(axis),
            check_vma=False,
        )
        sharding = jax.NamedSharding(mesh, jax.P(axis))
        own = np.ones(held, np.float32)
        x = jax.make_array_from_process_local_data(sharding, own)
        step = jax.jit(mapped)
        found[name] = timed(lambda step=step, x=x: step(x).block_until_ready())
    return found


def sockets(address: str) -> Times:
    """Time two hosts that send `SENT_BYTES` to each other at once, over one socket."""
    import jax
    from jax.experimental import multihost_utils

    if jax.process_index() == 0:
        server = socket.create_server((address, PORT))
        multihost_utils.sync_global_devices("listening")
        peer, _ = server.accept()
    else:
        multihost_utils.sync_global_devices("listening")
        peer = socket.create_connection((address, PORT))
    data = bytes(SENT_BYTES)

    def both_ways() -> None:
        sender = threading.Thread(target=peer.sendall, args=(data,))
        sender.start()
        left = SENT_BYTES
        while left:
            got = len(peer.recv(left))
            if not got:
                raise ConnectionError("the other host has closed the connection")
            left -= got
        sender.join()

    return timed(both_ways)


def job(mbit: float, address: str) -> None:
    """Time all of them on this host; the first one is at `address`, the last prints."""
    import jax

    found = collectives()
    if jax.process_count() == 2:
        found["sockets"] = sockets(address)
    if jax.process_index() < jax.process_count() - 1:
        return
    about = {"hosts": jax.process_count(), "mbit": mbit}
    about["of_the_bytes"] = round(SENT_BYTES * 8 / mbit / 1e3, 1)
    for name, times in found.items():
        for late, each in times.items():
            line = {"collective": name, "late_ms": 1e3 * late}
            line |= {"ms": statistics.median(each), "from_to": [each[0], each[-1]]}
            print(json.dumps(line | about), flush=True)


def main() -> None:
    """Make the networks one after the other, and run the job on each."""
    from common.network import Network

    for hosts in HOSTS:
        for mbit in MBIT:
            with Network(hosts=hosts, bandwidth_mbit=mbit) as net:
                address, _ = net.coordinator().split(":")
                net.launch([__file__, str(mbit), address]).wait(300)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        job(float(sys.argv[1]), sys.argv[2])
    else:
        main()
