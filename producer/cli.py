"""The command `producer`: submit, check, status, list, resume, retry, cancel, fetch, purge.

Owns: the command line, exit codes, and what is printed where: results on stdout, everything for people on stderr.
On failure: one line per problem, never a traceback; see `contract` in the README for the exit codes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import redis

from common import broker, layout, tracing
from common.batch import CLOSED, FIRST_RUN, BatchStatus, dumps, first_run
from common.errors import (
    BrokerUnavailableError,
    FleetError,
    InputRefusedError,
    OutputFailedError,
    UsageError,
)
from common.failures import FailureKind
from common.ledger import Ledger
from common.routes import Routes
from common.runs import BatchState, newest_run, read_end, read_manifest, state_of
from common.settings import FleetSettings, ProducerSettings, WorkerSettings, load
from common.store import open_store
from producer import control, intake, sources
from producer.interrupts import Interrupted, ignore_for_good, raise_interrupted
from producer.local import made_state_folder, state_folder
from producer.local_batches import Seen, end_unattended, see, see_all
from producer.output import Destination, check_destinations, default_output
from producer.progress import Progress, counted
from producer.submission import (
    EXIT_ERROR,
    EXIT_OK,
    Again,
    Submission,
    exit_code,
    placed,
    print_result,
    shown_object,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from common.batch import Manifest, Run
    from common.store import ObjectStore


#: Commands that run a batch: the traced ones, which run an engine with --local.
_RUNS = frozenset({"submit", "resume", "retry"})

#: What `resume` runs of a batch that ended early.
_UNFINISHED = frozenset({FailureKind.CANCELLED.code, FailureKind.EXPIRED.code})

#: Options of `worker serve` that are the local fleet's business.
_OURS = frozenset({"--engine", "--queue", "--loglevel"})


def build_parser() -> argparse.ArgumentParser:
    """The parser. What follows `--` is taken off before it and belongs to the engine."""
    parser = argparse.ArgumentParser(
        prog="producer", allow_abbrev=False, description="Submit files of LLM requests to the fleet and get rows back."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_submit(commands)

    check = commands.add_parser("check", allow_abbrev=False, help="validate an input file, and do nothing else")
    _add_input(check)

    status = commands.add_parser("status", allow_abbrev=False, help="show a batch, or the fleet and its open batches")
    status.add_argument("batch", nargs="?", metavar="BATCH")
    status.add_argument("--json", action="store_true", help="print the batch object(s) on stdout")

    listing = commands.add_parser("list", allow_abbrev=False, help="list all batches, newest first")
    listing.add_argument("--json", action="store_true", help="print the batch objects on stdout, one a line")

    fetch = commands.add_parser("fetch", allow_abbrev=False, help="write a closed batch's rows to a file")
    fetch.add_argument("batch", metavar="BATCH")
    fetch.add_argument("-o", "--output", required=True, metavar="OUT", help="where the rows go; - for stdout")
    fetch.add_argument("--errors", metavar="PATH", help="failed rows also go here")
    _add_run(
        commands,
        "resume",
        summary="attach to an open batch and wait for its rows; take a cancelled or expired one up again",
        description="Attach to an open batch and wait for its rows. A batch that was cancelled or has expired is taken "
        "up again: exactly the requests that were not finished are run.",
    )
    _add_run(
        commands,
        "retry",
        summary="run the failed rows of a closed batch again",
        description="Run the failed rows of a closed batch again, all of them, and replace the output by a complete "
        "ordered one. Rows that succeeded are not touched.",
    )

    purge = commands.add_parser(
        "purge",
        allow_abbrev=False,
        help="remove batches that have been closed for a while; nothing is removed by itself",
        description="Remove the directories of batches that have been closed for a while, outputs included. Open "
        "batches stay, however old they are. Prints the ids.",
    )
    purge.add_argument("--older-than", type=_seconds, required=True, metavar="7d", help="closed for at least so long")
    purge.add_argument("--dry-run", action="store_true", help="only print what would be removed")

    cancel = commands.add_parser("cancel", allow_abbrev=False, help="end an open batch; finished rows are kept")
    cancel.add_argument("batch", metavar="BATCH")

    for command in (status, listing, fetch, cancel, purge):
        command.add_argument(
            "--local", action="store_true", help="look at the batches of --local; needs no FLEET_STORE"
        )
    for each in commands.choices.values():
        each.set_defaults(parser=each)  # it knows the command's own usage
    return parser


def _add_submit(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    submit = commands.add_parser(
        "submit",
        allow_abbrev=False,
        usage="producer submit INPUT [-o OUTPUT] [options] [-- ENGINE FLAGS]",
        help="run a file of requests and write its rows",
        description="Validate a file of requests, submit it as a batch, wait, and write one row per request in the "
        "input's order. Exit: 0 every row succeeded, 1 error, 2 refused, 3 some rows failed, 4 the batch did not "
        "complete, 5 the output failed and the rows are kept, 130 interrupted.",
    )
    _add_input(submit)
    submit.add_argument(
        "-o",
        "--output",
        metavar="OUTPUT",
        help="path, URL or s3://...; default: INPUT.out.jsonl",
    )
    submit.add_argument("--errors", metavar="PATH", help="failed rows also go here")
    submit.add_argument("--detach", action="store_true", help="return as soon as the batch is durable; print its id")
    _add_local(submit)
    submit.add_argument("--new", action="store_true", help="a fresh batch, even if one of the same file is open")
    submit.add_argument(
        "--expires", type=_seconds, metavar="24h", help="rows not finished by then fail; default: never"
    )
    submit.add_argument(
        "--fail-after",
        type=_limit,
        metavar="N|P%",
        help="end the batch once so many of its rows, or such a share of them, have failed; default: never",
    )
    submit.add_argument("--json", action="store_true", help="print the final batch object on stdout")


def _add_local(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--local", action="store_true", help="run everything on this machine, for this command only")
    parser.add_argument("--model", metavar="M", help="with --local: what the worker serves")
    parser.add_argument("--engine", choices=("vllm", "echo"), help="with --local; default: vllm")
    parser.add_argument("--workers", type=int, metavar="N", help="with --local: worker processes; default: 1")


def _add_run(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    *,
    summary: str,
    description: str,
) -> None:
    parser = commands.add_parser(
        name,
        allow_abbrev=False,
        usage=f"producer {name} BATCH [-o OUTPUT] [options] [-- ENGINE FLAGS]",
        help=summary,
        description=description,
    )
    parser.add_argument("batch", metavar="BATCH")
    parser.add_argument("-o", "--output", metavar="OUT", help="default: the input's name with .out.jsonl")
    parser.add_argument("--errors", metavar="PATH", help="failed rows also go here")
    parser.add_argument("--detach", action="store_true", help="only see to it that the batch goes on; do not wait")
    _add_local(parser)
    parser.add_argument("--json", action="store_true", help="print the final batch object on stdout")
    parser.set_defaults(new=False, expires=None, fail_after=None)


def _seconds(text: str) -> int:
    """`90s`, `30m`, `24h`, `7d` in seconds. Never without a unit: who means seven days must not purge seven seconds."""
    match = re.fullmatch(r"([1-9][0-9]*)([smhd]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: say 90s, 30m, 24h or 7d, at least 1s")
    number, unit = match.groups()
    if not unit:
        raise argparse.ArgumentTypeError(
            f"{text!r} has no unit: say {text}s, {text}m, {text}h or {text}d for seconds, minutes, hours or days"
        )
    return int(number) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[unit]


def _limit(text: str) -> tuple[int, bool]:
    """`100` rows, or `5%` of them: the number, and whether it is a share in per cent."""
    match = re.fullmatch(r"([1-9]\d*)(%?)", text)
    if match is None or (match.group(2) and int(match.group(1)) > 100):
        raise argparse.ArgumentTypeError(f"{text!r} is no limit: say 100 for rows, or 5% for a share of them")
    return int(match.group(1)), bool(match.group(2))


def _add_input(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input",
        nargs="?",
        metavar="INPUT",
        help="a path, -, http(s)://... or s3://...; also .gz, .zst",
    )
    parser.add_argument("-i", "--input-file", dest="input_option", metavar="INPUT", help="the same, as in run-batch")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the console script."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    flags: list[str] = []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, flags = arguments[:at], arguments[at + 1 :]
    options, rest = build_parser().parse_known_args(arguments)
    if rest:
        options.parser.error(_unrecognized(options.command, rest))
    if flags and options.command not in _RUNS:
        options.parser.error("only submit, resume and retry take engine flags after --")
    code: int | None = None
    try:
        raise_interrupted()
        if options.command in _RUNS:
            tracing.start()
        code = _run(options, flags)
        ignore_for_good()
    except Interrupted as exc:  # in the last moment
        ignore_for_good()
        code = exc.exit_code if code is None else code
    tracing.stop()
    sys.exit(code)


def _unrecognized(command: str, rest: Sequence[str]) -> str:
    """What is said of arguments that the command does not know, which may be the engine's."""
    said = f"unrecognized arguments: {' '.join(map(_without_secret, rest))}"
    first = next((each.partition("=")[0] for each in rest if each.startswith("-")), None)
    if first is None or command not in _RUNS:
        return said
    what = "INPUT" if command == "submit" else "BATCH"
    return (
        f"{said}\nThe engine's own flags go after --, with --local: "
        f"producer {command} {what} --local --model M -- {first} ..."
    )


def _without_secret(word: str) -> str:
    """An argument for people; a URL in it, also behind a `=`, without login and query."""
    name, equals, value = word.partition("=")
    return name + equals + sources.shown(value) if word.startswith("-") and equals else sources.shown(word)


def _run(options: argparse.Namespace, flags: list[str]) -> int:  # noqa: PLR0911 - one per kind of end
    """Run the command; its exit code. Whatever goes wrong is a sentence, never a traceback."""
    try:
        return _COMMANDS[options.command](options, flags)
    except InputRefusedError as exc:
        _say(str(exc))
        return exc.exit_code
    except FleetError as exc:
        _say(f"error: {exc}")
        if isinstance(exc, OutputFailedError):
            _give_stdout_up()
        return exc.exit_code
    except redis.RedisError as exc:
        _say(f"error: the broker failed ({type(exc).__name__})")
        return EXIT_ERROR
    except BrokenPipeError:
        _give_stdout_up()  # whoever read stdout left, as `| head` does
        return 128 + signal.SIGPIPE
    except OSError as exc:
        _say(f"error: {exc.strerror or exc}")
        _give_stdout_up()
        return EXIT_ERROR
    except Interrupted as exc:
        return exc.exit_code


def _give_stdout_up() -> None:
    """Point stdout to nowhere: the interpreter would try to flush it once more at its exit, and exit with 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def _input_name(options: argparse.Namespace) -> str:
    if (options.input is None) == (options.input_option is None):
        raise UsageError("name the input once: producer " + options.command + " INPUT")
    return str(options.input if options.input is not None else options.input_option)


# -- submit -----------------------------------------------------------------------------------------------------------


def _submit(options: argparse.Namespace, flags: list[str]) -> int:
    name = _input_name(options)
    settings = _settings(options, flags)
    if options.detach:
        if options.output or options.errors:
            raise UsageError("--detach writes no output: get it later with producer fetch BATCH -o OUT")
        output = ""
    else:
        output = options.output or default_output(name)
        check_destinations(name, output, options.errors, s3_endpoint=settings.s3_endpoint)
    limits = load(ProducerSettings)
    began = tracing.now()
    with Progress() as progress, _staged(name, limits, progress) as source:
        checked = intake.check(
            source.shown,
            source.path,
            on_lines=lambda lines: progress.note(f"validating ({lines} lines)"),
            limits=limits,
        )
        store = open_store(settings.store, s3_endpoint=settings.s3_endpoint)
        digest = intake.batch_digest(checked, _rows_depend_on(options, flags))
        found = None if options.new else control.find_open(store, digest)
        attached = None if found is None else first_run(found)
        # Only now is it known whether there is a batch, and a trace, to join.
        with tracing.command("submit", joins=None if found is None else found.traceparent, since=began) as span:
            tracing.child("intake", since=began, requests=checked.total).end()
            submission = Submission(options, flags, settings, store, checked, digest, attached, output, span=span)
            if checked.total == 0:
                return submission.empty(progress)
            return submission.local(progress) if options.local else submission.fleet(progress)


def _settings(options: argparse.Namespace, flags: list[str]) -> FleetSettings:
    settings = load(FleetSettings)
    if options.local:
        if options.detach:
            raise UsageError("--detach does not go with --local: a local fleet ends with the command")
        if not options.model:
            raise UsageError("--local needs --model")
        if options.workers is not None and options.workers < 1:
            raise UsageError("--workers must be at least 1")
        ours = _OURS.intersection(flag.partition("=")[0] for flag in flags)
        if ours:
            raise UsageError(f"{', '.join(sorted(ours))} after --: only the engine's own flags go there")
        # What the workers would refuse, a moment later and after the batch was written.
        load(WorkerSettings)
        if not settings.store:
            settings = settings.model_copy(update={"store": made_state_folder().as_uri()})
        return settings
    for given, option in (
        (options.model, "--model"),
        (options.engine, "--engine"),
        (options.workers, "--workers"),
        (flags, "flags after --"),
    ):
        if given:
            raise UsageError(f"{option} needs --local: in a fleet the workers decide")
    return settings.with_store()


@contextlib.contextmanager
def _staged(name: str, limits: ProducerSettings, progress: Progress) -> Iterator[sources.Source]:
    """The input as a file; what comes from afar may take its time."""
    if sources.is_remote(name):
        progress.note(f"reading {sources.shown(name)}")
    with sources.staged(name, limits) as source:
        yield source


def _rows_depend_on(options: argparse.Namespace, flags: list[str]) -> list[str]:
    return [options.engine or "vllm", options.model or "", *flags] if options.local else []


# -- the others -------------------------------------------------------------------------------------------------------


def _check(options: argparse.Namespace, _: list[str]) -> int:
    name = _input_name(options)
    limits = load(ProducerSettings)
    with sources.staged(name, limits) as source:
        checked = intake.check(source.shown, source.path, limits=limits)
    _say(f"{source.shown}: {counted(checked.total, 'request')}, all well-formed")
    return EXIT_OK


def _stored(options: argparse.Namespace) -> tuple[ObjectStore, Ledger | None]:
    """The store and the ledger of the commands that look. Without a broker the store says what it knows."""
    settings = load(FleetSettings)
    if options.local:
        # Each batch has a broker of its own, while its command runs: see `local_batches`.
        place = settings.store or state_folder().as_uri()
        return open_store(place, create=False, s3_endpoint=settings.s3_endpoint), None
    store = open_store(settings.with_store().store, create=False, s3_endpoint=settings.s3_endpoint)
    client = broker.redis_client(settings.broker_url, tries=0)
    try:
        broker.reachable(client, settings.broker_url)
    except FleetError as exc:
        _say(f"{exc}; workers and rows that are not stored yet are not shown")
        return store, None
    return store, Ledger(client)


def _stored_object(store: ObjectStore, state: BatchState) -> dict[str, object]:
    batch_id = state.manifest.batch_id
    closed = state.status in CLOSED
    return shown_object(
        state,
        output=f"{store.uri}/{layout.output(batch_id, state.run.number)}" if closed else None,
        errors=f"{store.uri}/{layout.errors(batch_id, state.run.number)}" if closed and state.counts.failed else None,
    )


def _line(seen: Seen) -> str:
    state, counts = seen.state, seen.state.counts
    created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.manifest.created_at))
    note = seen.note and f"  ({seen.note})"
    return (
        f"{state.manifest.batch_id}  {created}  {state.status.value:<12} "
        f"{counts.completed + counts.failed}/{counts.total} done, {counts.failed} failed  "
        f"{Path(state.manifest.input_name).name}{note}"
    )


def _status(options: argparse.Namespace, _: list[str]) -> int:
    store, ledger = _stored(options)
    if options.batch is not None:
        manifest = read_manifest(store, layout.checked_batch_id(options.batch))
        one = see(store, ledger, manifest, local=options.local)
        print_result(dumps(_stored_object(store, one.state)) if options.json else _line(one))
        return EXIT_OK
    seen = [each for each in see_all(store, ledger, local=options.local) if each.state.status not in CLOSED]
    if options.json:
        print_result(dumps({"object": "list", "data": [_stored_object(store, each.state) for each in seen]}))
        return EXIT_OK
    if not seen:
        _say(f"no open batch in {store.uri}")
    for each in seen:
        print_result(_line(each))
    if ledger is not None:
        for line in _queue_lines(ledger, Routes.parse(load(FleetSettings).routes), [each.state.run for each in seen]):
            print_result(line)
    for worker in ledger.workers() if ledger is not None else ():
        if not worker.engine:
            print_result(f"aggregator {worker.worker_id}")
            continue
        print_result(
            f"worker {worker.worker_id}  {worker.state}, {worker.engine}, queue {worker.queue}, "
            f"serves {', '.join(worker.models) or '-'}, {worker.inflight} in flight at most"
        )
    return EXIT_OK


def _queue_lines(ledger: Ledger, routes: Routes, runs: Sequence[Run]) -> Iterator[str]:
    """What waits in each queue, and for which models; nothing where there is but one queue."""
    if routes.single:
        return
    heads = [ledger.progress(run.batch_id, run.number) for run in runs]
    workers = ledger.workers()
    for queue in routes.queues:
        unfinished = sum(head.unfinished(queue) for head in heads if head is not None)
        ready = sum(worker.queue == queue and worker.state == "ready" for worker in workers)
        models = ", ".join(routes.models_of(queue)) or "every other model"
        yield (
            f"queue {queue}  for {models}: {ledger.queue_length(queue)} messages waiting, "
            f"{unfinished} requests published and not finished, {ready} workers ready"
        )


def _list(options: argparse.Namespace, _: list[str]) -> int:
    store, ledger = _stored(options)
    empty = True
    for each in see_all(store, ledger, local=options.local):
        print_result(dumps(_stored_object(store, each.state)) if options.json else _line(each))
        empty = False
    if empty and not options.json:
        _say(f"no batch in {store.uri}")
    return EXIT_OK


def _fetch(options: argparse.Namespace, _: list[str]) -> int:
    store, ledger = _stored(options)
    manifest = read_manifest(store, layout.checked_batch_id(options.batch))
    run = newest_run(store, manifest)
    endpoint = load(FleetSettings).s3_endpoint
    if not _put_down(store, run, options.output, options.errors, endpoint, streams=True):
        still = see(store, ledger, manifest, local=options.local)
        _say(_line(still), "error: the batch is still open; its rows are not complete")
        return EXIT_ERROR
    closed = see(store, ledger, manifest, local=options.local)
    _say(_line(closed))
    return exit_code(closed.state)


def _put_down(
    store: ObjectStore, run: Run, output: str, errors: str | None, s3_endpoint: str, *, streams: bool = False
) -> bool:
    """Copy a closed run's rows to where they are wanted; False, with nothing touched, while it is open."""
    stored = (layout.output(run.batch_id, run.number), layout.errors(run.batch_id, run.number))
    for place in (store.local_path(name) or f"{store.uri}/{name}" for name in stored):
        check_destinations(place, output, errors, streams=streams, s3_endpoint=s3_endpoint)
    if os.path.isfile(source := run.manifest.input_name):  # a name may be none of a file, as of what came from Python
        check_destinations(source, output, errors, streams=streams, s3_endpoint=s3_endpoint)
    # The file that is there may be the only other copy: it stays until the new one is whole.
    with contextlib.closing(Destination(output, errors, replace=True, s3_endpoint=s3_endpoint)) as destination:
        if control.fetch(store, run, destination) is None:
            return False
        destination.close(durable=True)
        destination.deliver(store, run)
    return True


def _run_batch(options: argparse.Namespace, flags: list[str]) -> int:
    """`resume` and `retry`: attach to the batch's open run, or start another one over rows that failed."""
    settings = _settings(options, flags)
    store = open_store(settings.store, create=False, s3_endpoint=settings.s3_endpoint)
    manifest = read_manifest(store, layout.checked_batch_id(options.batch))
    if manifest.local and not options.local:
        raise UsageError(f"{manifest.batch_id} is a batch of --local: say so, with its --model")
    if options.detach and (options.output or options.errors):
        raise UsageError("--detach writes no output: get it later with producer fetch BATCH -o OUT")
    run, again = newest_run(store, manifest), None
    end = read_end(store, run.batch_id, run.number)
    if end is None and options.command == "retry" and run.number == FIRST_RUN:
        raise UsageError(f"{run.batch_id} is still open: producer resume attaches to it")
    if end is not None and options.command == "retry":
        again = Again(run)
    elif end is not None and end.status in (BatchStatus.CANCELLED, BatchStatus.EXPIRED, BatchStatus.FAILED):
        again = Again(run, _UNFINISHED)
    if end is not None and (again is None or not end.counts.failed):
        return _closed_already(options, store, run, end.status, settings.s3_endpoint)
    output = "" if options.detach else options.output or default_output(manifest.input_name)
    if not options.detach:
        check_destinations(manifest.input_name, output, options.errors, s3_endpoint=settings.s3_endpoint)
    attached = run if again is None else None
    with Progress() as progress, tracing.command(options.command, joins=manifest.traceparent) as span:
        submission = Submission(options, flags, settings, store, None, "", attached, output, again=again, span=span)
        return submission.local(progress) if options.local else submission.fleet(progress)


def _closed_already(
    options: argparse.Namespace, store: ObjectStore, run: Run, status: BatchStatus, s3_endpoint: str
) -> int:
    """Nothing is to be run: it may have closed a moment ago, so whoever named an output gets it all the same."""
    state = state_of(store, None, run.manifest)
    found = _stored_object(store, state)
    what = "no row of it failed" if options.command == "retry" else "get its rows with producer fetch"
    if options.output or options.errors:
        output = options.output or default_output(run.manifest.input_name)
        _put_down(store, run, output, options.errors, s3_endpoint)
        what = f"its rows are in {sources.shown(output)}"
        found = shown_object(state, output=placed(output), errors=options.errors and placed(options.errors))
    _say(f"{run.batch_id} is {status.value} already; {what}")
    if options.json:
        print_result(dumps(found))
    return exit_code(state)


def _cancel(options: argparse.Namespace, _: list[str]) -> int:
    store, _ledger = _stored(options)
    manifest = read_manifest(store, layout.checked_batch_id(options.batch))
    fleet, local = None, options.local or manifest.local
    if not local:
        with contextlib.suppress(BrokerUnavailableError):
            fleet = control.Fleet.connect(load(FleetSettings), store)
    closed = state_of(store, None, manifest).closed_at is not None  # before: a fleet at hand ends it within moments
    status = control.cancel(store, fleet, manifest)
    if closed or status is not BatchStatus.CANCELLED:
        _say(f"{manifest.batch_id} is {status.value} already")
    elif manifest.local:
        _say(_end_local(store, manifest))
    else:
        _say(f"{manifest.batch_id} is being cancelled; finished rows are kept")
    return EXIT_OK


def _end_local(store: ObjectStore, manifest: Manifest) -> str:
    """See to it that a cancelled batch of local mode ends; what is said of that."""
    later = "ends as cancelled within seconds if its command runs, else when that runs again; finished rows are kept"
    try:
        if end_unattended(load(FleetSettings), store, manifest):
            return (
                f"{manifest.batch_id} was not running and is cancelled now; finished rows are kept, get them with\n"
                f"  producer fetch --local {manifest.batch_id} -o OUT"
            )
    except (FleetError, redis.RedisError, OSError) as exc:
        # The wish is stored all the same.
        reason = str(exc) if isinstance(exc, FleetError) else getattr(exc, "strerror", None) or type(exc).__name__
        return f"{manifest.batch_id} could not be ended here ({reason}); it {later}"
    except Interrupted:
        _say(f"{manifest.batch_id} {later}")
        raise
    return f"{manifest.batch_id} {later}"


def _purge(options: argparse.Namespace, _: list[str]) -> int:
    settings = load(FleetSettings)
    place = settings.store or state_folder().as_uri() if options.local else settings.with_store().store
    store = open_store(place, create=False, s3_endpoint=settings.s3_endpoint)
    removed = 0
    for batch_id in control.purge(store, options.older_than, dry_run=options.dry_run):
        print_result(batch_id)
        removed += 1
    _say(f"{counted(removed, 'batch')} {'would be ' if options.dry_run else ''}removed")
    return EXIT_OK


_COMMANDS = {
    "submit": _submit,
    "check": _check,
    "status": _status,
    "list": _list,
    "resume": _run_batch,
    "retry": _run_batch,
    "purge": _purge,
    "cancel": _cancel,
    "fetch": _fetch,
}

if __name__ == "__main__":
    main()
