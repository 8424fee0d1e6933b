"""The command `worker`: `serve`, `aggregate`, `exporter`, `flower`.

Owns: the command line. Options win over the environment: they are written into it, since Celery's own command and the
engine's child processes read it too.
On failure: a bad set-up is one sentence on stderr and exit 2; a dead engine is exit 70; a drain is exit 0.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from typing import TYPE_CHECKING, NoReturn

from common.errors import BrokerUnavailableError, FleetError, UsageError
from common.settings import AGGREGATE_QUEUE, ExporterSettings, WorkerSettings, checked_queue, load

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: The aggregator's tasks wait for disk and Redis.
AGGREGATE_THREADS = 4

#: Where `vllm run-batch --enable-metrics` shows its metrics.
RUN_BATCH_PORT = 8000


def build_parser() -> argparse.ArgumentParser:
    """The parser; unknown options of `serve` belong to the engine."""
    parser = argparse.ArgumentParser(prog="worker", allow_abbrev=False, description="A worker of the fleet.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        allow_abbrev=False,
        help="hold one engine and run requests on it",
        description="Hold one engine and run requests on it. All other options are the engine's own, "
        "for vLLM those of `vllm serve`.",
    )
    serve.add_argument("model", metavar="MODEL", help="what the engine serves")
    serve.add_argument("--engine", choices=("vllm", "echo"), help="default: vllm")
    serve.add_argument("--max-inflight", type=int, metavar="N", help="requests in flight; default: the engine's rule")
    serve.add_argument("--queue", type=_queue, metavar="NAME", help="the queue to consume; default: gpu")
    serve.add_argument("--loglevel", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    # As `vllm run-batch` has them; its --url is what --host was called once.
    serve.add_argument("--enable-metrics", action="store_true", help="the same as --metrics-port 8000, or --port")
    serve.add_argument("--host", help="with --enable-metrics: the same as --metrics-host")
    serve.add_argument("--port", type=int, help="with --enable-metrics: the port of the metrics; default: 8000")
    _add_pages(serve)
    aggregate = commands.add_parser(
        "aggregate", allow_abbrev=False, help="seal shards, assemble outputs, feed the window"
    )
    aggregate.add_argument("--loglevel", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    _add_pages(aggregate)
    exporter = commands.add_parser(
        "exporter",
        allow_abbrev=False,
        help="show backlog, leases, batches and the broker to Prometheus and autoscalers",
    )
    exporter.add_argument("--port", type=int, metavar="N", help="default: 9465")
    exporter.add_argument("--host", help="address; default: 127.0.0.1")
    exporter.add_argument(
        "--queue", type=_queue, action="append", default=[], metavar="NAME", help="a further queue to show"
    )
    exporter.add_argument("--loglevel", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    flower = commands.add_parser(
        "flower",
        allow_abbrev=False,
        add_help=False,
        help="show workers and tasks in Flower, closed to strangers",
    )
    flower.set_defaults(loglevel="INFO")
    return parser


def _queue(name: str) -> str:
    """The name of a queue. Refused here and not by the settings alone, to which an empty variable is none at all."""
    try:
        return checked_queue(name)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"a queue's name {exc}") from None


def _add_pages(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--metrics-port", type=int, metavar="N", help="serve /metrics, /healthz and /readyz there")
    parser.add_argument("--metrics-host", metavar="HOST", help="on this address; default: 127.0.0.1")


def _choose_pages(options: argparse.Namespace) -> dict[str, object]:
    """The settings that the options of the metrics stand for."""
    port, host = options.metrics_port, options.metrics_host
    if getattr(options, "enable_metrics", False):
        port = next((each for each in (port, options.port) if each is not None), RUN_BATCH_PORT)
        host = host or options.host
    elif getattr(options, "host", None) is not None or getattr(options, "port", None) is not None:
        raise UsageError("--host and --port are for metrics: say --enable-metrics too, or --metrics-port")
    return {"FLEET_METRICS_PORT": port, "FLEET_METRICS_HOST": host}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the console script."""
    parser = build_parser()
    options, rest = parser.parse_known_args(argv)
    if rest and options.command not in TAKES_MORE:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        command = TAKES_MORE.get(options.command)
        code = command(options, rest) if command else _COMMANDS[options.command](options)
    except FleetError as exc:
        print(f"error: {exc}", file=sys.stderr, flush=True)
        code = exc.exit_code
    sys.exit(code)


def serve(options: argparse.Namespace, engine_args: Sequence[str]) -> int:
    """Run a worker that serves an engine until it is stopped; returns its exit code."""
    from workers.engine.tie import allow_plugin  # noqa: PLC0415 - only a serving worker

    chosen = {
        "FLEET_MODEL": options.model,
        "FLEET_ENGINE": options.engine,
        "FLEET_MAX_INFLIGHT": options.max_inflight,
        "FLEET_QUEUE": options.queue,
        "FLEET_ENGINE_ARGS": shlex.join(engine_args) if engine_args else None,
        **_choose_pages(options),
    }
    _set_environment(chosen)
    settings = load(WorkerSettings)
    _refuse_wrong_password(settings.broker_url)
    # The engine's processes find out by this that they belong to a worker: see `workers.engine.tie`.
    os.environ["FLEET_WORKER"] = "1"
    allow_plugin(os.environ)
    return _run(pool="workers.pool:TaskPool", queue=settings.queue, name="serve", loglevel=options.loglevel)


def aggregate(options: argparse.Namespace) -> int:
    """Run the aggregator until it is stopped; returns its exit code."""
    from common.store import open_store  # noqa: PLC0415 - keeps --help fast

    _set_environment(_choose_pages(options))
    settings = load(WorkerSettings).with_store()
    # Say now, not in the first task, that it cannot be used.
    open_store(settings.store, s3_endpoint=settings.s3_endpoint)
    return _run(
        pool="threads",
        queue=AGGREGATE_QUEUE,
        name="aggregate",
        loglevel=options.loglevel,
        concurrency=AGGREGATE_THREADS,
    )


def export(options: argparse.Namespace) -> int:
    """Run the exporter until it is stopped; returns its exit code."""
    from workers import exporter, logs  # noqa: PLC0415 - keeps --help fast

    logs.configure_logging(options.loglevel)
    settings = load(ExporterSettings, exporter_port=options.port, exporter_host=options.host)
    return exporter.run(settings, options.queue)


def flower(_: argparse.Namespace, flower_args: Sequence[str]) -> int:
    """Run Flower until it is stopped; returns its exit code."""
    from workers.flower import run_flower  # noqa: PLC0415 - keeps --help fast

    return run_flower(flower_args, os.environ)


#: Commands that pass on what they do not know: to the engine, to Flower.
TAKES_MORE: dict[str, Callable[[argparse.Namespace, Sequence[str]], int]] = {"serve": serve, "flower": flower}

#: Commands that do not.
_COMMANDS = {"aggregate": aggregate, "exporter": export}


def _set_environment(chosen: Mapping[str, object]) -> None:
    os.environ.update({name: str(value) for name, value in chosen.items() if value is not None})


def _refuse_wrong_password(broker_url: str) -> None:
    """A broker that is away is waited for; one that refuses us will go on doing so."""
    from common import broker  # noqa: PLC0415 - keeps --help fast

    with contextlib.suppress(BrokerUnavailableError):
        broker.reachable(broker.redis_client(broker_url, tries=0), broker_url)


def _run(*, pool: str, queue: str, name: str, loglevel: str, concurrency: int = 1) -> int:
    from celery import signals  # noqa: PLC0415 - keeps --help fast
    from celery.platforms import EX_FAILURE  # noqa: PLC0415

    from workers.app import app  # noqa: PLC0415 - reads the environment that was just written

    worker = app.Worker(
        pool_cls=pool,
        concurrency=concurrency,
        queues=[queue],
        hostname=f"{name}-{os.getpid()}@{os.uname().nodename}",
        loglevel=loglevel,
        quiet=True,
        # Neither is of use here, and both talk to every other worker.
        without_gossip=True,
        without_mingle=True,
    )
    interrupted: list[str] = []
    signals.worker_shutting_down.connect(lambda sig="", **_: interrupted.append(sig), weak=False)
    worker.start()
    # Celery drains on Ctrl-C as on SIGTERM, but calls that a failure.
    return 0 if interrupted == ["SIGINT"] and worker.exitcode == EX_FAILURE else int(worker.exitcode or 0)


if __name__ == "__main__":
    main()
