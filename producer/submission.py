"""One submit, from a validated file to its rows: in a fleet, or on this machine.

Owns: `Submission`, the exit codes, and what is said on the way. Must not know: argparse's parsers.
On failure: raises `FleetError`s and `Interrupted`; where rows or a batch are left, it has said how to get on with them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common import layout, tracing
from common.batch import CLOSED, FIRST_RUN, BatchStatus, Run, batch_object, dumps, first_run
from common.errors import NoSuchBatchError, OutputFailedError, StoreUnavailableError, UsageError
from common.runs import BatchState, newest_run, now, read_manifest, state_of, state_of_run
from producer import control
from producer.interrupts import Interrupted, raise_lost
from producer.local import LocalFleet
from producer.output import Destination
from producer.progress import Progress, counted, duration
from producer.sources import is_remote, shown

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Collection, Iterator

    from common.ledger import Ledger
    from common.settings import FleetSettings
    from common.store import ObjectStore
    from producer import intake

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_ROWS_FAILED = 3
EXIT_NOT_COMPLETED = 4


def print_result(text: str) -> None:
    """Print a result on stdout: UTF-8, whatever the locale says.

    Raises `OutputFailedError`: a full disk is no outage, after which a supervisor would submit the file again, and
    `BrokenPipeError` where its reader left.
    """
    try:
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape") + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as exc:
        raise OutputFailedError(f"standard output cannot be written: {exc.strerror}") from None


def shown_object(state: BatchState, output: str | None = None, errors: str | None = None) -> dict[str, object]:
    """The batch object of a state; `output` and `errors` are paths or URIs."""
    return batch_object(
        state.manifest, state.status, state.counts, state.usage,
        closed_at=state.closed_at, output=output, errors=errors,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Again:
    """A later run that is to be started: over the failed rows of a closed one, with `codes` only over those."""

    closed: Run
    codes: Collection[str] | None = None


class Submission:
    """One submit, once its file is validated, or the run of a batch that is there.

    `attached` is the open run to attach to, `again` what is to be run again; with neither a batch is made.
    `span` is the command's: it ends once the run is published, since a wait may take days.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        flags: list[str],
        settings: FleetSettings,
        store: ObjectStore,
        checked: intake.Checked | None,
        digest: str,
        attached: Run | None,
        output: str,
        *,
        again: Again | None = None,
        span: tracing.Span = tracing.NOTHING,
    ) -> None:
        self._options = options
        self._flags = flags
        self._settings = settings
        self._store = store
        self._checked = checked
        self._digest = digest
        self._attached = attached
        self._again = again
        self._span = span
        self._output = output
        self._started = time.monotonic()
        self._waited_s = 0.0
        self._done_before = 0

    def empty(self, progress: Progress) -> int:
        """Complete a file without requests, which needs no fleet."""
        run = self._durable(progress, None, None)
        if self._options.detach:
            print_result(run.batch_id)
            return EXIT_OK
        with self._destination() as destination:
            destination.begin()
            state = state_of_run(self._store, None, run)
            self._put_down(destination, state, progress)
        return self._finish(progress, state)

    def fleet(self, progress: Progress) -> int:
        """Submit to a running fleet."""
        fleet = control.Fleet.connect(self._settings, self._store)
        fleet.refuse_other_store()
        if self._options.detach:
            run = self._durable(progress, None, fleet.ledger)
            print_result(run.batch_id)
            self._start(fleet, run)
            return EXIT_OK
        with self._destination() as destination:
            run = self._durable(progress, None, fleet.ledger)
            try:
                destination.begin()
                self._start(fleet, run, progress)
                state = self._wait(fleet, run, destination, progress)
            except (Interrupted, OutputFailedError):
                progress.say(self._how_to_go_on(run))
                raise
            self._put_down(destination, state, progress)
        return self._finish(progress, state)

    def _start(self, fleet: control.Fleet, run: Run, waiting: Progress | None = None) -> None:
        self._span.set(batch_id=run.batch_id, run=run.number, requests=run.total, shards=len(run.shards))
        control.start(fleet, run, waiting)
        self._span.end()

    def _wait(
        self,
        fleet: control.Fleet,
        run: Run,
        destination: Destination,
        progress: Progress,
        on_poll: Callable[[], None] | None = None,
    ) -> BatchState:
        started = time.monotonic()
        state = control.wait(fleet, run, destination, progress, on_poll=on_poll)
        self._waited_s = time.monotonic() - started
        return state

    def _put_down(self, destination: Destination, state: BatchState, progress: Progress) -> None:
        """Close the output, or send it; where that fails the rows are still in the batch."""
        try:
            self._refuse_outdated(state.run)
            with tracing.child("deliver", batch_id=state.run.batch_id, run=state.run.number):
                destination.close(durable=True)
                destination.deliver(self._store, state.run)
        except (OutputFailedError, Interrupted):
            local = "--local " if self._options.local else ""
            progress.say(
                f"{state.manifest.batch_id} is {state.status.value}; get its rows with\n"
                f"  producer fetch {local}{state.manifest.batch_id} -o {shown(self._output)}"
            )
            raise

    def _refuse_outdated(self, run: Run) -> None:
        """Keep a later run's rows from taking the place of a newer run's, which may lie in the output already."""
        if run.number == FIRST_RUN:
            return
        # Of a batch that is away or gone these may be the only rows: they go where they belong.
        with contextlib.suppress(NoSuchBatchError, StoreUnavailableError):
            newest = newest_run(self._store, run.manifest).number
            if newest > run.number:
                raise OutputFailedError(
                    f"{shown(self._output)} is left as it is: run {newest} is newer than {run.number}"
                )

    def _same_command(self) -> str:
        return "the same command without --new" if self._options.new else "the same command"

    def _left(self, batch_id: str) -> BatchState | None:
        """What an interrupted local fleet left, or None when its batch had not become durable."""
        with contextlib.suppress(NoSuchBatchError):
            return state_of(self._store, None, read_manifest(self._store, batch_id))
        return None

    def _how_to_go_on(self, run: Run) -> str:
        return (
            f"{run.batch_id} goes on in the fleet. Attach to it again with {self._same_command()}, or see\n"
            f"  producer status {run.batch_id}\n"
            f"  producer fetch {run.batch_id} -o {shown(self._output)}"
        )

    def local(self, progress: Progress) -> int:
        """Run everything on this machine. Processes start first: the engine loads while the batch is written.

        A later run is started only once the engine is ready: its batch is closed, and must stay so if that fails.
        """
        options = self._options
        taken_up = self._attached or (self._again.closed if self._again is not None else None)
        batch_id = taken_up.batch_id if taken_up is not None else layout.new_batch_id()
        local = LocalFleet(
            batch_id,
            store_uri=self._settings.store,
            model=options.model,
            engine=options.engine or "vllm",
            workers=options.workers or 1,
            engine_args=self._flags,
            taken_up=taken_up is not None,
        )
        with self._destination() as destination:
            try:
                with local:
                    state = self._in_local_fleet(local, batch_id, destination, progress)
            except Interrupted as exc:
                local.clear_up(self._store, exc)
                left = self._left(batch_id)
                if left is None:
                    progress.say("interrupted; nothing was queued")
                if left is None or not self._is_complete(left, progress):
                    raise
                # It was complete before everything had ended: nobody would run it, or look for its rows, again.
                control.fetch(self._store, left.run, destination)
                state = left
            except Exception as exc:
                local.clear_up(self._store, exc)
                if isinstance(exc, OutputFailedError):
                    progress.say(
                        f"the rows are kept: {self._same_command()}, or producer fetch --local {batch_id} -o OUT"
                    )
                raise
            else:
                local.clear_up(self._store)
            self._put_down(destination, state, progress)
        return self._finish(progress, state)

    def _in_local_fleet(
        self, local: LocalFleet, batch_id: str, destination: Destination, progress: Progress
    ) -> BatchState:
        """What is done while the local fleet's processes are up."""
        settings = self._settings.model_copy(update={"broker_url": local.broker_url, "routes": ""})
        fleet = control.Fleet.connect(settings, self._store)
        if self._again is not None:
            self._wait_for_engine(fleet, local, progress)
        run = self._durable(progress, batch_id, fleet.ledger)
        local.stored = True
        if self._attached is not None:
            control.take_up(fleet, run)
        self._start(fleet, run)
        self._wait_for_engine(fleet, local, progress)
        destination.begin()
        state = self._wait(fleet, run, destination, progress, lambda: _replace(local, progress))
        progress.note("ending the local fleet")
        return state

    def _is_complete(self, left: BatchState, progress: Progress) -> bool:
        """Whether what was interrupted is complete all the same; says what it is if not."""
        if self._again is not None and left.run.number <= self._again.closed.number:
            progress.say(f"interrupted; {left.run.batch_id} is {left.status.value} as it was, nothing was run again")
            return False
        if left.status not in CLOSED:
            progress.say(f"interrupted; {self._same_command()} goes on with {left.run.batch_id} where it stopped")
            return False
        return True

    def _durable(self, progress: Progress, batch_id: str | None, ledger: Ledger | None) -> Run:
        if self._again is not None:
            return self._run_again(progress, self._again)
        if self._attached is not None:
            counts = state_of_run(self._store, ledger, self._attached).counts
            self._done_before = counts.completed + counts.failed
            what = "the open batch of this file" if self._attached.number == FIRST_RUN else "its open run"
            total = counted(counts.total, "request")
            progress.say(f"{self._attached.batch_id}: attached to {what}, {self._done_before} of {total} done")
            self._say_what_stays(progress, self._attached)
            return self._attached
        assert self._checked is not None
        manifest = control.write_batch(
            self._store,
            self._checked,
            digest=self._digest,
            max_shard_size=self._settings.shard_size,
            batch_id=batch_id,
            new=self._options.new,
            fail_after=self._fail_after(self._checked.total),
            local=self._options.local,
            expires_at=None if self._options.expires is None else now() + self._options.expires,
            on_lines=lambda lines: progress.note(f"writing the batch ({lines} lines)"),
        )
        if batch_id is not None and manifest.batch_id != batch_id:
            raise UsageError(f"another producer is running this file as {manifest.batch_id} on this machine")
        requests, shards = counted(manifest.total, "request"), counted(len(manifest.counts), "shard")
        progress.say(f"{manifest.batch_id}: {requests} in {shards}")
        return first_run(manifest)

    def _say_what_stays(self, progress: Progress, attached: Run) -> None:
        """An open batch keeps the limits that it was submitted with; who asks for others must not think it has them."""
        manifest = attached.manifest
        if self._options.expires is not None and manifest.expires_at is None:
            progress.say("--expires is not applied: the batch was submitted without it")
        wanted = self._fail_after(manifest.total)
        if wanted is not None and wanted != manifest.fail_after:
            kept = "without it" if manifest.fail_after is None else f"with {counted(manifest.fail_after, 'row')}"
            progress.say(f"--fail-after is not applied: the batch was submitted {kept}")

    def _fail_after(self, total: int) -> int | None:
        """After how many failed rows the batch ends, of so many rows."""
        if self._options.fail_after is None:
            return None
        number, is_share = self._options.fail_after
        return control.fail_after(number, total, is_share=is_share)

    def _run_again(self, progress: Progress, again: Again) -> Run:
        run = control.run_again(self._store, again.closed, again.codes)
        if run is None:
            raise UsageError(f"{again.closed.batch_id} has no row to run again")
        self._done_before = run.manifest.total - run.total
        total = counted(run.manifest.total, "request")
        progress.say(f"{run.batch_id}: run {run.number} over {run.total} of {total}")
        return run

    @staticmethod
    def _wait_for_engine(fleet: control.Fleet, local: LocalFleet, progress: Progress) -> None:
        """Until a worker is ready: a set-up that cannot work ends here, with the output untouched."""
        started = time.monotonic()
        while not local.serving:
            raise_lost()
            local.look(fleet.ledger)
            waited_s = time.monotonic() - started
            if waited_s > 1:
                progress.note(f"waiting for the engine to load ({waited_s:.0f} s)")
            time.sleep(0.1)
        progress.note("")

    @contextlib.contextmanager
    def _destination(self) -> Iterator[Destination]:
        later = self._again is not None or (self._attached is not None and self._attached.number != FIRST_RUN)
        endpoint = self._settings.s3_endpoint
        destination = Destination(self._output, self._options.errors, replace=later, s3_endpoint=endpoint)
        try:
            yield destination
        finally:
            destination.close()

    def _finish(self, progress: Progress, state: BatchState) -> int:
        counts, took_s = state.counts, time.monotonic() - self._started
        done = counts.completed + counts.failed
        rate = ""
        if state.status is BatchStatus.COMPLETED and self._waited_s >= 1.0:  # else rows that nobody ran, or no time
            # Of the time in which somebody worked: loading an engine says nothing about its speed.
            rate = f", {(done - self._done_before) / self._waited_s:.1f} requests/s"
        progress.update(done=done, total=counts.total, failed=counts.failed, tokens=state.usage.completion_tokens)
        progress.note("")
        progress.say(
            f"{state.manifest.batch_id} {state.status.value}: {counts.completed} ok, {counts.failed} failed, "
            f"{_tokens(state)}{duration(took_s)} in all{rate} -> {shown(self._output)}"
        )
        if state.status is not BatchStatus.COMPLETED:
            why = {BatchStatus.FAILED: "too many rows failed (--fail-after); "}.get(state.status, "")
            local = "--local … " if self._options.local else ""
            progress.say(f"{why}producer resume {local}{state.manifest.batch_id} runs what was not finished")
        if self._options.json:
            output, errors = (name and placed(name) for name in (self._output, self._options.errors))
            print_result(dumps(shown_object(state, output=output, errors=errors)))
        return exit_code(state)


def _tokens(state: BatchState) -> str:
    """The tokens of a batch for people, and of each model where there are several; nothing where none were counted."""
    usage = state.usage
    if not usage.prompt_tokens and not usage.completion_tokens:
        return ""
    models = "".join(
        f"; {model or 'no model named'}: {prompt} + {completion}"
        for model, (prompt, completion) in sorted(usage.by_model.items())
        if len(usage.by_model) > 1
    )
    return f"{usage.prompt_tokens} + {usage.completion_tokens} tokens{models}, "


def placed(name: str) -> str:
    """A destination for the batch object."""
    return shown(name) if is_remote(name) else os.path.abspath(name)


def _replace(local: LocalFleet, progress: Progress) -> None:
    """Look after the local fleet's processes, and say what became of them."""
    for notice in local.check():
        progress.say(notice)


def exit_code(state: BatchState) -> int:
    """The exit code that a closed batch stands for."""
    if state.status is not BatchStatus.COMPLETED:
        return EXIT_NOT_COMPLETED
    return EXIT_ROWS_FAILED if state.counts.failed else EXIT_OK
