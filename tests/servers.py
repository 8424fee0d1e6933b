"""The servers and processes of tests: a real Redis or Valkey, real workers, real producers.

Owns: starting them in a folder of the test's own with an environment of their own, waiting for them, ending them by
pid, and finding what they leave behind. Never touches a server that it did not start.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil
import redis
from kombu import pools

from common import broker, layout
from common.errors import UsageError
from common.ledger import Ledger
from common.store import LocalStore
from producer.local import find_broker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from celery import Celery

    from common.ledger import WorkerBeat

MODEL = "test-model"

#: The machine may be busy: waits are generous, they end as soon as they can.
START_S = 60.0
STOP_S = 30.0


def wait_until(predicate: Callable[[], object], timeout_s: float, what: str) -> None:
    """Return as soon as `predicate` is true; fail with `what` after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:.0f} s in vain: {what}")
        time.sleep(0.02)


def server_binary() -> str | None:
    """A Redis or Valkey server, or None where there is none."""
    try:
        return find_broker()
    except UsageError:
        return None


#: Ports below those that kernels give to outgoing connections (32768 and up), each handed out once, and another range
#: for each of pytest-xdist's processes: nobody takes one between its choice and its server's start. The range begins
#: somewhere else in every process, for checkouts that are tested side by side.
_PORTS_PER_PROCESS = 2500
_FIRST_PORT = 10_000 + _PORTS_PER_PROCESS * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8)
_ports = (_FIRST_PORT + (os.getpid() * 97 + step) % _PORTS_PER_PROCESS for step in count())


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    for port in _ports:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no end of ports")


@dataclass(frozen=True)
class Result:
    """A process that ended: its exit code (negative: the signal) and what it wrote."""

    code: int
    stdout: bytes
    stderr: str


class Process:
    """A process with its output in files, in a session of its own."""

    def __init__(self, name: str, command: list[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self._out = folder / f"{name}.stdout"
        self._err = folder / f"{name}.stderr"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=dict(environment),
                cwd=folder,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._popen.poll() is None

    @property
    def stdout(self) -> bytes:
        """What it wrote to stdout so far."""
        return self._out.read_bytes()

    @property
    def stderr(self) -> str:
        """What it wrote to stderr so far."""
        return self._err.read_text("utf-8", "replace")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process alone, not to its group."""
        if self.running:
            self._popen.send_signal(number)

    def wait(self, timeout_s: float) -> Result:
        """The result, once it ended by itself. After `timeout_s` it is killed and the test fails."""
        try:
            code = self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"{self.name} did not end within {timeout_s:.0f} s; stderr: {self.stderr[-2000:]}"
            ) from None
        return Result(code, self.stdout, self.stderr)

    def stop(self, timeout_s: float = STOP_S) -> Result:
        """End it with SIGTERM and return its result."""
        self.send(signal.SIGTERM)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self.running:
            self._popen.kill()
        self._popen.wait()


class BrokerServer:
    """A Redis or Valkey server on a Unix socket in `folder` (or on TCP). Nothing of it outlives `stop`."""

    def __init__(self, folder: Path, environment: Mapping[str, str], *, port: int = 0, password: str = "") -> None:
        binary = server_binary()
        assert binary is not None, "no Redis or Valkey server"
        folder.mkdir(parents=True, exist_ok=True)
        self.socket = folder / "broker.sock"
        options = {
            "port": str(port),
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket),
            "dir": str(folder),
            "save": "",
            "appendonly": "no",
        }
        if password:
            options["requirepass"] = password
        command = [binary, *(word for name, value in options.items() for word in (f"--{name}", value))]
        self._process = Process("broker", command, folder, environment)
        login = f":{password}@" if password else ""
        self.url = f"redis://{login}127.0.0.1:{port}/0" if port else broker.socket_url(str(self.socket))
        self.client = redis.Redis(unix_socket_path=str(self.socket), password=password or None)
        wait_until(self._answers, START_S, "the broker answers")

    def _answers(self) -> bool:
        if not self._process.running:
            raise AssertionError(f"the broker ended: {self._process.stdout.decode('utf-8', 'replace')[-2000:]}")
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False

    def stop(self) -> None:
        """End the server and close the client."""
        self.client.close()
        self._process.kill()
        self.socket.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def close_app(app: Celery) -> None:
    """Close an app and its connections.

    Kombu keeps its pools by URL, not by app: one that is closed must not be found by a later app of this process whose
    broker listens on a port that has been used before.
    """
    app.backend.client.connection_pool.disconnect()
    app.pool.force_close_all()
    for group in (pools.producers, pools.connections):
        with suppress(KeyError):
            del group[app.connection_for_write()]
    app.close()


class Workplace:
    """A folder in which producers and workers run with a clean environment of their own.

    `close` ends what is left of them and then fails if anything had been left: a process, a socket.
    """

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder.resolve()
        self.temp = folder / "t"
        self.state = folder / "state"
        self._count = 0
        self.processes: list[Process] = []
        for each in (self.temp, folder / "home"):
            each.mkdir(parents=True)
        self.environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(folder / "home"),
            "TMPDIR": str(self.temp),
            "XDG_STATE_HOME": str(self.state),
            "LC_ALL": "C.UTF-8",
            # The code under test, where it is not the one that is installed.
            **{name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ},
            **environment,
        }

    # -- processes ----------------------------------------------------------------------------------------------------

    def start(self, name: str, *command: str, **environment: str) -> Process:
        """Start `python command…`; an environment variable that is set to "" is absent."""
        self._count += 1
        merged = {key: value for key, value in {**self.environment, **environment}.items() if value}
        process = Process(f"{self._count:03d}-{name}", [sys.executable, *command], self.folder, merged)
        self.processes.append(process)
        return process

    def start_producer(self, *arguments: str, **environment: str) -> Process:
        """Start `producer arguments…`."""
        return self.start(f"producer-{arguments[0].strip('-')}", "-m", "producer", *arguments, **environment)

    def producer(self, *arguments: str, timeout_s: float = 60.0, **environment: str) -> Result:
        """Run `producer arguments…` to its end."""
        return self.start_producer(*arguments, **environment).wait(timeout_s)

    def write(self, name: str, lines: list[str] | bytes) -> Path:
        """Write an input file: lines without their LF, or bytes as they are."""
        path = self.folder / name
        path.write_bytes(lines if isinstance(lines, bytes) else "".join(f"{line}\n" for line in lines).encode())
        return path

    # -- what is left -------------------------------------------------------------------------------------------------

    def alive(self, *names: str) -> list[psutil.Process]:
        """Living processes that were started here, or by those: their working directory lies in the folder.

        Not by name or environment: servers and workers write their title over both. With `names` only those whose
        title has one of them; asked here, where a process may end meanwhile.
        """
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if not Path(process.cwd()).is_relative_to(self.folder) or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                title = process.name()
                if not names or any(name in title for name in names):
                    found.append(process)
        return found

    def sockets(self) -> list[Path]:
        """Sockets of local brokers, and temporary folders that were made for them."""
        found = [*self.temp.rglob("*"), *self.state.rglob("*")]
        return [path for path in found if path.is_socket() or path.name.startswith("fleet-")]

    def assert_nothing_left(self) -> None:
        """No process and no socket of what ran here is left."""
        left = self.alive()
        assert not left, f"processes left: {left}"
        assert not self.sockets(), f"sockets left: {self.sockets()}"

    def end(self) -> None:
        """Kill what is left, by pid."""
        for own in self.processes:
            own.kill()
        for process in self.alive():
            with suppress(psutil.Error):
                process.kill()
        wait_until(lambda: not self.alive(), STOP_S, "killed processes are gone")

    def close(self) -> None:
        """Check that everything ended by itself, and end what did not."""
        try:
            self.assert_nothing_left()
        finally:
            self.end()
            shutil.rmtree(self.temp, ignore_errors=True)

    def logs(self) -> dict[str, bytes]:
        """Everything that processes wrote to stdout and stderr, by file name; logs of local mode included."""
        found = [*self.folder.glob("*.stdout"), *self.folder.glob("*.stderr"), *self.state.rglob("*.log")]
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in found}


class FleetServers(Workplace):
    """A fleet over one broker and one store: aggregators and workers that are started and stopped by the test."""

    def __init__(self, folder: Path, *, port: int = 0, password: str = "", **environment: str) -> None:
        self.store_root = folder / "store"
        super().__init__(folder, **{"FLEET_STORE": self.store_root.as_uri(), "FLEET_DRAIN_S": "5", **environment})
        self._stack = ExitStack()
        self.broker = self._stack.enter_context(
            BrokerServer(folder / "b", self.environment, port=port, password=password)
        )
        self.environment["FLEET_BROKER_URL"] = self.broker.url
        self.client = self.broker.client
        self.ledger = Ledger(self.client)
        self.store = LocalStore(self.store_root)

    def aggregator(self, loglevel: str = "INFO", **environment: str) -> Process:
        """Start an aggregator; returns when it takes messages."""
        process = self.start("aggregate", "-m", "workers", "aggregate", "--loglevel", loglevel, **environment)
        wait_until(lambda: " ready." in process.stderr or not process.running, START_S, "the aggregator is ready")
        assert process.running, process.stderr
        return process

    def start_worker(self, *flags: str, model: str = MODEL, **environment: str) -> Process:
        """Start a worker that serves echo."""
        return self.start("worker", "-m", "workers", "serve", model, "--engine", "echo", *flags, **environment)

    def worker(self, *flags: str, model: str = MODEL, **environment: str) -> Process:
        """Start a worker that serves echo; returns when its heartbeat says that it is ready."""
        process = self.start_worker(*flags, model=model, **environment)
        wait_until(lambda: self.is_ready(process) or not process.running, START_S, "the worker is ready")
        assert process.running, process.stderr
        return process

    def beats(self, process: Process) -> list[WorkerBeat]:
        """The heartbeats of a worker process."""
        return [beat for beat in self.ledger.workers() if f"-{process.pid}-" in beat.worker_id]

    def is_ready(self, process: Process) -> bool:
        """Whether the worker's heartbeat says that it is ready."""
        return any(beat.state == "ready" for beat in self.beats(process))

    def taken(self) -> int:
        """How many messages are in workers' hands."""
        return int(self.client.hlen("unacked"))

    def waiting(self, queue: str = "gpu") -> int:
        """How many messages wait in a queue."""
        return int(self.client.llen(queue))

    def finished(self, batch_id: str) -> int:
        """How many rows of the batch are recorded."""
        progress = self.ledger.progress(batch_id, 1)
        return progress.finished if progress is not None else 0

    def is_closed(self, batch_id: str) -> bool:
        """Whether the batch's run has an end."""
        return self.store.exists(layout.end(batch_id, 1))

    def batch_ids(self) -> set[str]:
        """The batches of the store."""
        return set(self.store.names(layout.BATCHES))

    def assert_keys_expire(self) -> None:
        """Every key of a closed batch has a TTL, and so have the keys of workers; open batches' keys have none."""
        for raw in self.client.scan_iter("fleet:*"):
            key = raw.decode()
            owner = key.split(":")[1]
            ttl_s = int(self.client.ttl(key))
            purged = not self.store.exists(layout.manifest(owner))
            if not owner.startswith("batch_") or self.is_closed(owner) or purged:
                assert ttl_s != -1, f"{key} never expires"
            else:
                assert ttl_s < 0, f"{key} of an open batch expires in {ttl_s} s"

    def stop_all(self) -> None:
        """End every process but the broker with SIGTERM, all at once."""
        running = [process for process in self.processes if process.running]
        for process in running:
            process.send(signal.SIGTERM)
        for process in running:
            process.wait(STOP_S)

    def close(self) -> None:
        """End the fleet and check what it left behind."""
        try:
            self.stop_all()
            self.assert_keys_expire()
        finally:
            self._stack.close()
            super().close()
