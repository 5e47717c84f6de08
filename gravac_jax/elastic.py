"""Go on training when a process dies, inside the processes that are left. EXPERIMENTAL.

It was tried with JAX 0.10.2 and 0.12.0.1 on Linux, with processes of one machine over
Gloo on CPUs. Other versions of JAX, other systems and sharded models are refused. GPUs
(NCCL) and several hosts are untried. If the launcher dies, the job ends. The position
in the data is yours: rows are asked for by the number of the step. What a script
exchanges between steps, or does after the last one, is not protected::

    from gravac_jax import elastic

    def begin():  # in each generation
        step = gravac.train_step(loss_fn, tx, gravac.make_mesh())
        return step, step.init(new_params()), 0

    run = elastic.Elastic(begin)
    for i, loss in run.train(lambda i: rows(i, run.process), steps=1000):
        print(i, loss)
    params, opt_state = run.state

Started by `python -m gravac_jax.launch -n 4 --elastic --restarts 20 train.py`, the
processes train in *generations*. For each set of members the launcher hosts a
coordination service of JAX. If a member dies or freezes, the launcher ends the
generation. The others break their connections, so that every exchange raises, and go on
in the next generation from copies of their own last states on the host. When they have
taken a step, a process is started in its place, which joins one generation later.

A generation begins after the last step that all survivors have finished. So one step at
most is taken again; in rounds (`every=`) at most the local steps since the last
exchange. A joiner gets the state of a survivor with an empty residual. Lost is the
residual of a dead replica alone, and each generation's record counts it, by energy.

Every step waits until the state is copied to the host. Two copies of it are kept there;
in rounds one for each step of a round, and one more.

This file alone uses private names of JAX: the module `jax._src.distributed`, its
`global_state`, and the two functions of its `_jax` that make a coordination service and
the client of one. It knows by which keys JAX and Gloo tell each other where they are,
so that a death while they connect holds nobody up. It also breaks every TCP connection
between this process and its own machine when members change, since those of Gloo have
no names.
"""

import ctypes
import functools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.extend import backend

from gravac_jax import _arrays
from gravac_jax._job import FOLDER, Job, local_coordinator, poll, say
from gravac_jax._step import states

__all__ = ["Elastic", "own_rows", "put_rows", "supervise"]

# Versions of JAX, and systems, with which runs with faults end as they should.
TRIED = ("0.10.2", "linux"), ("0.12.0.1", "linux")

_TIMES = {"heartbeat_timeout": 10**6, "shutdown_timeout": 2}  # the launcher judges

# Host copies. -----------------------------------------------------------------------


def own_rows(tree: Any) -> Any:
    """Copy to the host what this process has of a training state.

    Args:
      tree: a state as `gravac.place` lays it, of a model that is not sharded.

    Returns:
      A pytree of NumPy arrays: what all replicas share as it is, and of
      `[replicas, ...]` the rows of this process; of random keys their bits, uint32.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> from gravac_jax import elastic
      >>> tx = optax.chain(gravac.transform(), optax.sgd(0.1))
      >>> opt_state = tx.init({"w": jnp.ones((256, 256))})
      >>> first = gravac.place(opt_state, gravac.make_mesh(devices=jax.devices()[:2]))
      >>> other = gravac.place(opt_state, gravac.make_mesh(devices=jax.devices()[2:4]))
      >>> moved = elastic.put_rows(elastic.own_rows(first), other)
      >>> moved[0].local.memory[0].residual.shape
      (2, 65536)
    """
    return jax.tree.map(_own_rows, tree)


def _own_rows(x: jax.Array) -> np.ndarray:
    # One device of each replica, in their order.
    bits = jax.random.key_data if _arrays.is_key(x) else np.asarray
    owned = {str(y.index): np.array(bits(y.data)) for y in x.addressable_shards}
    parts = [*owned.values()]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def put_rows(rows: Any, like: Any) -> Any:
    """Put the rows of all processes onto a mesh; no residuals are averaged.

    Args:
      rows: from `own_rows`, of as many replicas as this process has in `like`. All
        processes together may have more replicas, or fewer, than they had.
      like: a state on the mesh, as `step.init(params)` returns it, for its shapes.

    Returns:
      The state, in memory of its own, as `like` lies.

    Raises:
      ValueError: if shapes or structures do not fit.

    Example:
      See `own_rows`.
    """
    # JAX may keep NumPy's memory, and a step that donates its state would write to it.
    make = jax.make_array_from_process_local_data

    def put(x: np.ndarray, like: jax.Array) -> jax.Array:
        if _arrays.is_key(like):
            return _arrays.by_bits(functools.partial(put, x), like)
        return make(like.sharding, np.array(x), like.shape)

    return jax.tree.map(put, rows, like)


def _residuals(rows: Any) -> list[np.ndarray]:
    """Return what this process holds back, by the name that memories give it."""
    named = jax.tree.leaves_with_path(states.locals_of(rows))
    return [x for keys, x in named if ".residual" in jax.tree_util.keystr(keys)]


def _with_empty_residual(theirs: Any, fresh: Any) -> Any:
    """Return the rows of a joiner: those of a survivor, but for what is its own.

    Counts, moments and what encodings keep are the survivor's. Some of it must be the
    same on all replicas, and moments of zero would not fit the counts. A memory without
    a `.residual` begins anew.
    """
    owned = ".told", ".residual" if _residuals(fresh) else ".memory"
    own_path = lambda keys: jax.tree_util.keystr(keys).partition(".local")[2]
    is_own = lambda keys: any(name in own_path(keys) for name in owned)
    pick = lambda keys, x, own: own if is_own(keys) else x
    return jax.tree.map_with_path(pick, theirs, fresh)


def _broadcast(rows: Any, is_source: bool) -> Any:
    """Return the rows of the process that is the source; all processes call it."""
    # As bytes: a sum of floats would not keep -0.0.
    sent = jax.tree.map(lambda x: np.frombuffer(x.tobytes(), np.uint8), rows)
    of = lambda x, like: np.frombuffer(x.tobytes(), like.dtype).reshape(like.shape)
    return jax.tree.map(of, multihost_utils.broadcast_one_to_all(sent, is_source), rows)


# A member. --------------------------------------------------------------------------


class Elastic:
    """A run whose processes may die. Make one in each process of the job.

    The devices of JAX are those of all members, and others in each generation. Arrays
    from before a generation lie on devices that are gone: make all that lies on devices
    in `begin`, or keep it in NumPy.

    Args:
      begin: `() -> (step, state, steps)`, called at the start of each generation: the
        train step, `(*state, batch) -> (*state, *metrics)`, such as `gravac.train_step`
        returns; the state with which the run begins, a tuple, placed; and the steps
        that it has taken: 0, or those of a checkpoint, which is read before this class
        is made (`put_rows`). The same in all processes.

    Raises:
      RuntimeError: if this process was not started by `gravac_jax.launch --elastic`;
        for another version of JAX, or system, than this was tried with.

    Attributes:
      process: the index of this process. One that takes its place has it, too.
      state: the training state, on the devices of this generation.
      steps: the steps that it has taken.
      generation: the record of this generation, a dict, the same in all members:
        `number`, from 1; `members`, the index of each by its pid, in the order of the
        replicas; `start`, the steps before it, -1 if it began anew; `joined`, the
        indices that began with an empty residual; and for each residual that the run
        has lost so far, in `lost`: the index, the steps, and its energy after them.

    Example:
      >>> import jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> from gravac_jax import elastic
      >>> def begin():
      ...     loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
      ...     step = gravac.train_step(loss_fn, gravac.adamw(1e-3), gravac.make_mesh())
      ...     return step, step.init({"w": jnp.ones((256, 128))}), 0
      >>> def main():  # of a script
      ...     run = elastic.Elastic(begin)
      ...     for i, loss in run.train(lambda i: jnp.ones((64, 256)), steps=1000):
      ...         print(i, loss, run.generation["members"])
    """

    def __init__(self, begin: Callable[[], tuple[Any, Any, int]]) -> None:
        self._shared, _ = _private_names()
        if not os.environ.get(FOLDER):
            raise RuntimeError("start it by gravac_jax.launch -n 4 --elastic train.py")
        self._begin, self._folder = begin, Path(os.environ[FOLDER])
        self.state: Any = ()  # until it has entered a generation
        self._copies: dict[int, Any] = {}  # own rows after so many steps
        # Left: the newest generation that this process is not in any more; the port is
        # that of the service of the one that it is in.
        self._left, self._port, self._energy, self._has_ended = -1, 0, 0.0, False
        os.environ["GLOO_DISABLE_CONNECTION_RETRIES"] = "1"  # to one that died
        backend.clear_backends()

    def train(self, batches: Callable[[int], Any], steps: int) -> Iterator[Any]:
        """Take steps, and yield the number of each and its metrics.

        After a fault the number of the last step may come again. Call it once: what
        follows is not protected.

        Args:
          batches: returns this process's own rows of the step with this number.
          steps: at how many steps the run ends; the same in all processes.

        Yields:
          `(number, *metrics)`, the metrics in NumPy; of those that are each replica's
          own the rows of this process.

        Raises:
          JaxRuntimeError: if a step fails, and no process has died within 10 seconds.
          ValueError: if the model is sharded.
        """
        threading.Thread(target=self._watch, daemon=True).start()
        while True:
            try:
                if not self._port:
                    self._enter()
                if self.steps >= steps:  # a last fault must find all members here
                    multihost_utils.sync_global_devices("the end")
                    self._has_ended = True
                    return
                taken = self._take(batches(self.steps))
            except (RuntimeError, ValueError) as error:
                self._leave(error)
            else:
                yield taken

    def _take(self, batch: Any) -> tuple[Any, ...]:
        result, n = self._step(*self.state, batch), len(self.state)
        # Random keys have no `is_ready`.
        arrays = [x for x in jax.tree.leaves(result) if not _arrays.is_key(x)]
        while not all(x.is_ready() for x in arrays):
            time.sleep(0.0005)
            # Gloo may forget one of its own errors.
            if time.monotonic() - self._over_since > 3:
                # Who frees the result waits for it.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(result))
                raise jax.errors.JaxRuntimeError("a step does not end")
        rows, metrics = own_rows((result[:n], result[n:]))
        self.state, self.steps = result[:n], self.steps + 1
        energy = sum(float(np.vdot(x, x)) for x in _residuals(rows))
        self._copies[self.steps], self._energy = rows, energy
        # No exchange ends before all members have begun it, so that each has at least
        # the step before the last exchange. Within a round some may be ahead.
        if not any(x.info.local_steps for x in states.transform_states(rows)):
            self._copies = {i: x for i, x in self._copies.items() if i > self.steps - 2}
        return self.steps - 1, *metrics

    def _enter(self) -> None:
        """Wait for a generation with this process in it, join it, and begin there."""
        own, shared = str(os.getpid()), self._shared
        is_ours = lambda record: own in record["members"] and not record["is_over"]
        while not is_ours(record := self._newest()):
            self._left = record["number"]
            time.sleep(0.02)
        self.generation, pids = record, [*record["members"]]
        shared.process_id, shared.num_processes = pids.index(own), len(pids)
        shared.client = _client(record["port"], shared.process_id)
        shared.client.connect()
        # The port last: `_watch` acts once it is set.
        self._over_since, self._port = float("inf"), record["port"]
        multihost_utils.sync_global_devices("connect")  # Gloo connects now
        self.process, joined = record["members"][own], record["joined"]
        self._step, fresh, self.steps = self._begin()
        whole = lambda x: x.is_fully_replicated
        if not all(jax.tree.leaves(states.map_local(fresh, lambda _: True, whole))):
            raise ValueError("elastic training has no models that are sharded")
        rows = own_rows(fresh)
        if record["start"] >= 0:
            self.steps, joins = record["start"], self.process in joined
            mine = rows if joins else self._copies[self.steps]
            is_source = self.process == record["source"]
            theirs = _broadcast(mine, is_source) if joined else mine  # all take part
            kept = _with_empty_residual(theirs, rows) if joins else mine
            rows = states.moved(kept, rows)
        self.state, self._copies = put_rows(rows, fresh), {self.steps: rows}

    def _leave(self, error: Exception) -> None:
        """Leave the generation when the launcher has ended it.

        Raises:
          JaxRuntimeError: the `error`, if the launcher does not end it in time.
        """
        # In this thread Gloo raises ValueError. Who connects when one dies may get any
        # error, as of devices that are fewer than processes.
        is_fault = not self.state or "Gloo" in str(error)
        is_fault |= isinstance(error, jax.errors.JaxRuntimeError)
        if not (is_fault and poll(lambda: self._newest()["is_over"], 10)):
            raise error
        self.state = ()
        backend.clear_backends()
        with suppress(jax.errors.JaxRuntimeError):  # some do not answer
            self._shared.client.shutdown()
        self._port, self._left, self._shared.client = 0, self.generation["number"], None

    def _newest(self) -> dict[str, Any]:
        return json.loads((self._folder / "generation").read_text())

    def _watch(self) -> None:
        """Show that this process lives; break its connections when it must leave."""
        while True:
            steps, now = max(self._copies, default=-1), time.monotonic()
            sign = _Sign(self._left, steps, self._energy, self._has_ended, now)
            _write(self._folder / str(os.getpid()), json.dumps(sign))
            # Again and again, since an exchange may only begin.
            if self._port and not self._has_ended and self._newest()["is_over"]:
                self._over_since = min(self._over_since, time.monotonic())
                _break_connections(self._port)
                if client := self._shared.client:
                    with suppress(jax.errors.JaxRuntimeError):  # it leaves just now
                        _answer_for_the_dead(client, self._shared.num_processes)
            time.sleep(0.1)


def _client(port: int, process: int) -> Any:
    make = _private_names()[1].get_distributed_runtime_client
    place, how = f"127.0.0.1:{port}", {"shutdown_on_destruction": False, **_TIMES}
    return make(place, process, init_timeout=10, **how)


def _private_names() -> tuple[Any, Any]:
    """Return JAX's global state, and the module that makes services and clients.

    Raises:
      RuntimeError: for another version of JAX, or system, than this was tried with.
    """
    if (here := (jax.__version__, sys.platform)) not in TRIED:
        raise RuntimeError(f"elastic training needs one of {TRIED}, and this is {here}")
    from jax._src import distributed  # noqa: TID251

    return distributed.global_state, vars(distributed)["_jax"]


def _break_connections(port: int) -> None:
    """Break all connections inside this machine but those to the service at a port.

    Those of Gloo would wait for a dead or frozen process for ever.
    """
    for path in filter(Path.is_socket, Path("/proc/self/fd").iterdir()):
        # Some are not connected, or have just been closed.
        with suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as found:
            own, other = found.getsockname(), found.getpeername()
            # The host's own name may lead to 127.0.1.1. Other sockets have no tuples.
            is_here = own[:1] == other[:1] or str(*other[:1]).startswith("127.")
            if isinstance(own, tuple) and is_here and port not in (own[1], other[1]):
                found.shutdown(socket.SHUT_RDWR)


def _answer_for_the_dead(client: Any, n: int) -> None:
    """Fail all that wait for what a dead member should have said on connecting.

    JAX would wait for minutes, and Gloo for 30 seconds.
    """
    told = dict(client.key_value_dir_get_bytes("cpu:gloo"))
    folders = {"cpu:local_topology/cpu", *(x.rpartition("/")[0] for x in told)}
    wanted = {f"{x}/{i}" for x in folders for i in range(n)}
    for x in told.values():
        # Gloo's: the length and the name of a host, the length and an address, as C has
        # it, and last the numbers by which those who connect there say whom they want.
        start = 16 + int.from_bytes(x[:8], sys.byteorder)
        for at in range(len(x) - 8 * n, len(x), 8):
            with suppress(OSError):  # it is dead, or has no address
                port = int.from_bytes(x[start + 2 : start + 4])
                place = socket.inet_ntoa(x[start + 4 : start + 8]), port
                with socket.create_connection(place, 1) as connected:
                    connected.sendall(x[at : at + 8])
    for name in {*wanted, "cpu:global_topology/cpu"} - told.keys():
        with suppress(jax.errors.JaxRuntimeError):  # somebody has told it
            client.key_value_set_bytes(name, bytes(17))  # which Gloo cannot read


def _write(path: Path, text: str) -> None:
    (new := path.with_name(f"{path.name}.new")).write_text(text)
    new.replace(path)  # at once: somebody may read it now


# The launcher. ------------------------------------------------------------------------


def supervise(job: Job, folder: Path, restarts: int, least: int, silence: int) -> None:
    """Begin a generation whenever the members of a job change, until it ends.

    Args:
      job: the `gravac_jax.launch.Job`, each of whose processes makes an `Elastic`.
      folder: an empty folder; its path is `GRAVAC_JAX_ELASTIC` in their environment.
      restarts: how many processes may be started again.
      least: how many processes a generation must have.
      silence: after how many seconds without a sign of life a process is killed; 1
        second after it was stopped, as by SIGSTOP.

    Raises:
      ProcessDiedError: of `gravac_jax.launch`, if too few processes are left, or one
        dies when another has reached the end; all have been ended.
      RuntimeError: for another version of JAX, or system, than this was tried with.

    Example:
      See `gravac_jax.launch`.
    """
    supervisor = _Supervisor(job, folder, restarts, least, silence)
    with job:
        while supervisor.goes_on():
            time.sleep(0.02)


class _Sign(NamedTuple):
    """What a process says of itself, as a sign of life.

    Attributes:
      left: the number of the newest generation that it is not in any more.
      steps: the steps of its last copy; -1 if it has none.
      energy: that of its residual after them.
      has_ended: whether it has taken all steps.
      at: when it said so, in seconds of a clock that nobody sets.
    """

    left: int
    steps: int
    energy: float
    has_ended: bool
    at: float


class _Supervisor:
    """The launcher's part of an elastic job: who lives, and who trains with whom."""

    def __init__(self, job: Job, folder: Path, restarts: int, least: int, silence: int):
        self._make_service = _private_names()[1].get_distributed_runtime_service
        self._job, self._folder, self._restarts = job, folder, restarts
        self._least, self._silence = least, silence
        self._signs: dict[str, _Sign] = {}  # by pid, as all that follow
        self._ready: dict[str, int] = {}  # the index of each that may be a member
        self._dead: set[str] = set()
        self._missing: list[int] = []  # indices of the dead that will be replaced
        self._record: Any = {"number": 0, "members": {}, "is_over": True, "lost": []}
        self._written, self._services = "", []

    def goes_on(self) -> bool:
        """Do what is due; return whether the job goes on."""
        statuses, signs, record = self._job.statuses, self._signs, self._record
        has_ended = 0 in statuses or any(x.has_ended for x in signs.values())
        self._look(statuses, has_ended)
        ready, members = self._ready.keys(), record["members"].keys()
        if has_ended:  # who joins now, or has left, is not waited for
            here = [signs[x] for x in ready & members]
            return any(x.has_ended or not record["is_over"] for x in here)
        has_stepped = False
        if not record["is_over"]:
            is_whole, start = members <= ready, max(record["start"], 0)
            has_stepped = is_whole and all(signs[x].steps > start for x in members)
            # Who joins waits for a step, or joiners could keep a run from getting on.
            record["is_over"] = not is_whole or (has_stepped and ready > members)
        elif self._may_begin():
            self._begin()
        # While the others compile, one that starts would take their processors.
        while self._missing and (has_stepped or len(ready) < self._least):
            self._job.start(self._missing.pop())
        if (text := json.dumps(record)) != self._written:
            _write(self._folder / "generation", text)
            self._written = text
        return True

    def _look(self, statuses: Sequence[int | None], has_ended: bool) -> None:
        """Read all signs of life, kill what is frozen, and note what died."""
        self._ready = {}
        for i, number in enumerate(self._job.pids):
            path, status = self._folder / (pid := str(number)), statuses[i]
            if status is None and path.exists():
                self._signs[pid] = sign = _Sign(*json.loads(path.read_text()))
                # A busy machine may keep a process silent for seconds, but not stop it.
                patience = 1 if self._job.is_stopped(i) else self._silence
                if sign.has_ended or time.monotonic() - sign.at <= patience:
                    self._ready[pid] = i
                else:
                    say(f"process {i} (pid {pid}) is frozen")
                    os.kill(number, signal.SIGKILL)
                    path.unlink()
            elif status and pid not in self._dead:
                self._dead.add(pid)
                self._count_death(i, has_ended)

    def _count_death(self, index: int, has_ended: bool) -> None:
        died, restarts = self._job.death(index), self._restarts
        left = self._job.statuses.count(None) + len(self._missing)
        if has_ended or left + restarts < self._least:
            raise died
        say(f"{died}; {restarts} restarts were left")
        if restarts:
            self._restarts -= 1
            self._missing.append(index)

    def _may_begin(self) -> bool:
        """Return whether enough are ready, all of which have left the last one."""
        survive = self._ready.keys() & self._record["members"].keys()
        least = self._least if survive else self._job.statuses.count(None)
        have_left = [self._signs[x].left >= self._record["number"] for x in self._ready]
        return len(self._ready) >= max(least, 1) and all(have_left)

    def _begin(self) -> None:
        """Count what was lost, and begin a generation with a service of its own."""
        record, signs, ready = self._record, self._signs, self._ready
        gone = {pid: i for pid, i in record["members"].items() if pid not in ready}
        lost = [[i, signs[x].steps, signs[x].energy] for x, i in gone.items()]
        lost, indices = record["lost"] + lost, [*ready.values()]
        steps = {i: n for pid, i in ready.items() if (n := signs[pid].steps) >= 0}
        known, port = steps or {-1: -1}, int(local_coordinator().rpartition(":")[2])
        record |= {"number": record["number"] + 1, "is_over": False, "port": port}
        record |= {"members": ready, "joined": sorted({*ready.values()} - known.keys())}
        record |= {"source": min(known), "start": min(known.values()), "lost": lost}
        say(f"generation {record['number']}: {indices}, lost {lost}")
        how = {"recoverable": True, **_TIMES}
        service = self._make_service(f"127.0.0.1:{port}", len(ready), **how)
        # A client would end its process with its service, and so all must have left
        # before it goes.
        self._services = [*self._services[-1:], service]
        # Who connects first waits for all others, and ends when one does not come. So
        # each place has been taken once before its member comes.
        clients = [_client(port, i) for i in range(len(ready))]
        with ThreadPoolExecutor(len(ready)) as pool:
            list(pool.map(lambda client: client.connect(), clients))
            list(pool.map(lambda client: client.shutdown(), clients))
