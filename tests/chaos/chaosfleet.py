"""The fleet of chaos tests: short leases, a broker that can be killed and restarted, and one oracle for every batch.

Owns: `ChaosFleet`, `Batch`, and `EngineCalls`, which counts what was really executed.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import redis

from common import layout
from common.packs import pack_sizes
from tests.conftest import CASES
from tests.invariants import assert_complete, embedding_line, input_lines
from tests.servers import START_S, FleetServers, Process, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.invariants import Wanted

LEASE_S = 3.0
#: Requests in a message of a fleet that is warm: a quarter of the slots of a worker with 16.
PACK = 4
#: A lease, two sweeps, and what a busy machine takes: by then a dead worker's requests run elsewhere.
TAKEN_OVER_S = 30.0
#: A batch that was hurt is complete by then.
HEALED_S = 60.0

#: `python -c` in place of `-m workers`: the safeguard that a test switches off, then the worker's own command line.
WITHOUT_WATCHDOG = (
    "import sys; import workers.app as app; app.signals.worker_ready.disconnect(app.start_watchdog); "
    "from workers.cli import main; main(sys.argv[1:])"
)


class EngineCalls:
    """Counts engine calls by batch and index as they are begun, by listening to what the ledger's script does.

    The ledger's own counters go when a shard is sealed. A `MONITOR` connection that is cut is opened again at once.
    `counts` holds engine calls; `begins` is what the ledger counts as such. A begin that is taken back at once, to wait
    for a turn in the quarantine, is none: engine calls of chaos tests take longer than `TURN_S`.
    """

    TURN_S = 0.2

    def __init__(self, client: Any) -> None:
        self._client = client
        self.counts: Counter[tuple[str, int]] = Counter()
        self.begins: Counter[tuple[str, int]] = Counter()
        #: Deaths while a request ran, as the ledger counts them.
        self.strikes: Counter[tuple[str, int]] = Counter()
        self._last: dict[tuple[str, int], float] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._listen, name="engine-calls")
        self._thread.start()

    def total(self, batch_id: str) -> int:
        return sum(number for (batch, _), number in self.counts.copy().items() if batch == batch_id)

    def repeated(self, batch_id: str) -> dict[int, int]:
        """Indexes that were executed more than once."""
        return {
            index: number for (batch, index), number in self.counts.copy().items() if batch == batch_id and number > 1
        }

    def _listen(self) -> None:
        while not self._stopping:
            try:
                with self._client.monitor() as monitor:
                    for command in monitor.listen():
                        if self._stopping:
                            return
                        self._count(str(command["command"]).split(), float(command["time"]))
            except (redis.RedisError, OSError, ValueError):
                time.sleep(0.01)

    def _count(self, words: list[str], at: float) -> None:
        if words[:1] != ["HINCRBY"]:
            return
        if ":strikes:" in words[1]:
            self.strikes[words[1].split(":")[1], int(words[2])] += 1
        if ":calls:" not in words[1]:
            return
        request = words[1].split(":")[1], int(words[2])
        self.begins[request] += 1
        if at - self._last.get(request, 0.0) > self.TURN_S:
            self.counts[request] += 1
        self._last[request] = at

    def stop(self, wake: redis.Redis) -> None:
        self._stopping = True
        with contextlib.suppress(redis.RedisError):
            wake.ping()  # a command for it to see
        self._thread.join(10)
        assert not self._thread.is_alive()


@dataclass
class Batch:
    """A batch that a waiting producer submitted."""

    batch_id: str
    lines: list[str]
    producer: Process
    output: Path


class ChaosFleet(FleetServers):
    """A fleet with leases of 3 s and a broker with an append-only file."""

    def __init__(self, folder: Path, **environment: str) -> None:
        short = {"FLEET_LEASE_S": f"{LEASE_S:g}", "FLEET_TEST_SHORT_LEASES": "1", "FLEET_WINDOW": "64"}
        super().__init__(folder, port=0, password="", **{**short, **environment})
        self.client.config_set("appendonly", "yes")
        self.calls = EngineCalls(self.client)
        self._frozen: list[Process] = []
        self._submitted = 0

    # -- work ---------------------------------------------------------------------------------------------------------

    def submit(self, lines: list[str], *options: str) -> Batch:
        """Submit lines with a producer that waits; returns when it published what the window allows."""
        self._submitted += 1
        before = self.batch_ids()
        path = self.write(f"in{self._submitted}.jsonl", lines)
        output = self.folder / f"out{self._submitted}.jsonl"
        producer = self.start_producer("submit", str(path), "-o", str(output), *options)

        def known() -> set[str]:
            running = producer.running  # a short batch may be over before it is looked for
            found = {each for each in self.batch_ids() - before if self.ledger.progress(each, 1) is not None}
            assert found or running, producer.stderr
            return found

        wait_until(known, START_S, "the batch is submitted")
        (batch_id,) = known()
        # The last shard that the window allows was claimed, and its last message was sent.
        published = min(len(lines), int(self.environment["FLEET_WINDOW"]))
        wait_until(
            lambda: self.carried() + self.finished(batch_id) >= published or self.is_closed(batch_id),
            START_S,
            "the first shards are published",
        )
        return Batch(batch_id, lines, producer, output)

    def packed(self) -> list[int]:
        """How many requests each message carries that waits or is in workers' hands."""
        waiting: Any = self.client.lrange("gpu", 0, -1)
        taken: Any = self.client.hvals("unacked")
        messages = [*(json.loads(raw) for raw in waiting), *(json.loads(entry)[0] for entry in taken)]
        return [int(message["headers"].get("requests", 1)) for message in messages]

    def carried(self) -> int:
        """How many requests all messages carry together."""
        return sum(self.packed())

    def warm_up(self, *workers: Process) -> None:
        """Let workers measure how short a request can be, and say so: from then on requests that do not generate are
        packed, as many as a test counts on. On a busy machine that takes more than one batch.
        """

        def short() -> bool:
            self.wait_closed(self.submit([embedding_line(f"warm{n}", f"text {n}") for n in range(64)]))
            beats = [beat for worker in workers for beat in self.beats(worker)]
            return len(beats) == len(workers) and all(pack_sizes([beat], PACK)[beat.queue] == PACK for beat in beats)

        wait_until(short, START_S, "requests are measured as short")

    def two_workers(self, inflight: int = 16, **environment: str) -> tuple[Process, Process]:
        """Two workers, started together."""
        flags = ("--max-inflight", str(inflight))
        one, two = self.start_worker(*flags, **environment), self.start_worker(*flags, **environment)
        wait_until(lambda: self.is_ready(one) and self.is_ready(two), START_S, "two workers are ready")
        return one, two

    def worker_id(self, worker: Process) -> str:
        """The id of a live worker."""
        (beat,) = self.beats(worker)
        return beat.worker_id

    def marks(self, batch: Batch, worker_id: str = "") -> dict[int, str]:
        """Requests that are marked as running, by this worker or by anyone: index -> mark."""
        found: dict[int, str] = {}
        for key in self.client.scan_iter(f"fleet:{batch.batch_id}:1:marks:*", count=1000):
            table: Any = self.client.hgetall(key)
            found |= {int(index): mark.decode() for index, mark in table.items()}
        return {index: mark for index, mark in found.items() if mark.startswith(worker_id)}

    def wait_running(self, batch: Batch, worker: Process, at_least: int) -> str:
        """Wait until a worker runs so many requests; returns its id."""
        worker_id = self.worker_id(worker)
        wait_until(lambda: len(self.marks(batch, worker_id)) >= at_least, START_S, f"{at_least} requests run there")
        return worker_id

    def wait_finished(self, batch: Batch, at_least: int) -> None:
        """Wait until so many rows are recorded."""
        wait_until(lambda: self.finished(batch.batch_id) >= at_least, START_S, f"{at_least} rows are recorded")

    def wait_closed(self, batch: Batch, timeout_s: float = HEALED_S) -> None:
        """Wait until the batch has its end."""
        wait_until(lambda: self.is_closed(batch.batch_id), timeout_s, "the batch is closed")

    def aggregator_without_watchdog(self) -> Process:
        """An aggregator whose watchdog is switched off."""
        process = self.start("aggregate", "-c", WITHOUT_WATCHDOG, "aggregate", "--loglevel", "INFO")
        wait_until(lambda: " ready." in process.stderr or not process.running, START_S, "the aggregator is ready")
        return process

    def supervise(self, batch: Batch, workers: list[Process], start: Callable[[], Process], timeout_s: float) -> int:
        """Start a new worker for each that dies until the producer ends; returns how many died."""
        deaths, deadline = 0, time.monotonic() + timeout_s
        while batch.producer.running and time.monotonic() < deadline:
            for number, worker in enumerate(workers):
                if not worker.running:
                    deaths += 1
                    workers[number] = start()
            time.sleep(0.05)
        return deaths

    # -- harm ---------------------------------------------------------------------------------------------------------

    def kill_broker(self) -> None:
        """`kill -9`: what the operating system has of the append-only file stays."""
        self.broker._process.kill()

    def start_broker(self, *, empty: bool = False) -> None:
        """Start the broker again at its address, from its append-only file or without one."""
        old = self.broker._process
        assert isinstance(old._popen.args, list)
        command = [str(word) for word in old._popen.args]
        command[command.index("--appendonly") + 1] = "no" if empty else "yes"
        self.broker.socket.unlink(missing_ok=True)
        self._count += 1
        self.broker._process = Process(f"{self._count:03d}-broker", command, self.folder / "b", self.environment)
        wait_until(self.broker._answers, START_S, "the broker answers again")
        if empty:
            self.client.config_set("appendonly", "yes")

    def freeze(self, process: Process) -> None:
        """SIGSTOP; `thaw` or the end of the test wakes it up."""
        process.send(signal.SIGSTOP)
        self._frozen.append(process)

    def thaw(self) -> None:
        """SIGCONT to all that were frozen."""
        for process in self._frozen:
            process.send(signal.SIGCONT)
        self._frozen.clear()

    def drop_connections(self, *, paused_s: float = 0.0) -> None:
        """Cut every connection but our own, and but the one that counts engine calls: what it missed looks undone.

        With `paused_s` the broker answers nobody for so long before, and cuts them before it answers anything then.
        """
        with redis.Redis(unix_socket_path=str(self.broker.socket), socket_timeout=paused_s + 30.0) as client:
            cutter: Any = client
            spared = {str(cutter.client_id()), str(self.client.client_id())}
            others = [each for each in cutter.client_list() if "O" not in each["flags"]]  # O: it runs MONITOR
            with cutter.pipeline(transaction=False) as pipe:
                if paused_s:
                    pipe.execute_command("CLIENT", "PAUSE", int(1000 * paused_s), "ALL")
                for each in others:
                    if each["id"] not in spared:
                        pipe.execute_command("CLIENT", "KILL", "ID", each["id"])
                pipe.execute(raise_on_error=False)  # some may have gone by themselves

    def pause_broker(self, seconds: float) -> None:
        """Let the broker answer nobody for so long."""
        client: Any = self.client
        client.execute_command("CLIENT", "PAUSE", int(1000 * seconds), "ALL")

    def duplicate(self, queue: str = "gpu", copies: int = 1) -> int:
        """Deliver every message of a queue again; returns how many there were."""
        messages: Any = self.client.lrange(queue, 0, -1)
        for _ in range(copies):
            for message in messages:
                self.client.lpush(queue, message)
        return len(messages)

    # -- the oracle ---------------------------------------------------------------------------------------------------

    def assert_right(
        self,
        batch: Batch,
        code: int = 0,
        wanted: Mapping[str, Wanted] | None = None,
        timeout_s: float = HEALED_S,
    ) -> list[dict[str, Any]]:
        """The producer ends with this code, every row is there and right, and nothing of the batch is left behind."""
        try:
            result = batch.producer.wait(timeout_s)
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.situation(batch)}") from None
        assert result.code == code, result.stderr
        rows = assert_complete(batch.lines, batch.output.read_bytes(), wanted)
        with self.store.open(layout.output(batch.batch_id, 1)) as stored:
            assert stored.read() == batch.output.read_bytes()
        wait_until(self.is_drained, TAKEN_OVER_S, f"no message is left: {self.messages()}")
        self.assert_keys_expire()
        return rows

    def messages(self) -> dict[str, int]:
        """How many messages are where."""
        lists = {queue: int(self.client.llen(queue)) for queue in ("gpu", "aggregate")}
        return {**lists, "unacked": self.taken(), "unacked_index": int(self.client.zcard("unacked_index"))}

    def is_drained(self) -> bool:
        """Whether no message is queued or in anybody's hand."""
        return not any(self.messages().values())

    def situation(self, batch: Batch) -> str:
        """What stands still, for a failure's message."""
        try:
            progress = self.ledger.progress(batch.batch_id, 1)
            tail = "\n".join(f"--- {each.name}\n{each.stderr[-1500:]}" for each in self.processes[-6:])
            return f"{progress}\n{self.messages()}\nmarks {self.marks(batch)}\n{self.ledger.workers()}\n{tail}"
        except redis.RedisError as exc:
            return f"the broker does not answer: {exc!r}"

    def close(self) -> None:
        """End the fleet and check what it left behind."""
        self.thaw()
        self.calls.stop(self.client)
        super().close()


def base40(latency_s: float, **slower: float) -> list[str]:
    """The forty plain requests of the replay cases, each of which takes a while; `slower` names some by id."""
    lines = []
    for line in input_lines(CASES / "base40.jsonl"):
        request = json.loads(line)
        request["body"]["echo"] = {"latency_s": slower.get(request["custom_id"], latency_s)}
        lines.append(json.dumps(request))
    return lines


def figures(test: str, **values: object) -> None:
    """What a closing note wants to know, as one JSON line."""
    print(json.dumps({"chaos": test, **values}))
