"""The producer from Python: `submit` and `Batch`, over the same functions as the command line.

Owns: the objects that a program holds. Must not know: argparse, terminals, exit codes.
On failure: raises `FleetError`s, `InputRefusedError` with its `problems` among them; nothing was queued then. Once
`submit` has returned the batch is durable, and goes on in the fleet whatever becomes of the program; a local batch
stops with its fleet, and the same `submit` goes on with it.

    submit ──▶ Batch ──results()──▶ rows, in the input's order, as they are sealed
                 │ wait(), status(), cancel()
                 ▼ close(), or leaving the `with` block: a local fleet ends
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, get_args

import redis
from pydantic_core import from_json

from common import layout, tracing
from common.batch import CLOSED, FIRST_RUN, first_run
from common.errors import FleetError, ObjectMissingError, UsageError
from common.runs import newest_run, now, read_manifest, refuse_removed, state_of_run
from common.settings import FleetSettings, ProducerSettings, WorkerSettings, load
from common.store import open_store
from producer import control, intake, sources
from producer.local import LocalFleet, made_state_folder
from producer.submission import shown_object

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from common.batch import Manifest, Run
    from common.runs import BatchState
    from common.store import ObjectStore

#: The engines that a local fleet may run.
ENGINES: tuple[str, ...] = get_args(WorkerSettings.model_fields["engine"].annotation)

#: A request line: as text, as bytes, or as the object that it is.
Line = str | bytes | dict[str, Any]


def submit(
    source: str | os.PathLike[str] | Iterable[Line],
    *,
    local: bool = False,
    model: str | None = None,
    engine: str = "vllm",
    engine_args: Sequence[str] = (),
    workers: int = 1,
    new: bool = False,
    expires_s: int | None = None,
    fail_after: int | str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Batch:
    """Submit a file, a URL, or lines; returns once the batch is durable and its first requests are published.

    A line is a request as a dict, or its JSON as text or bytes. Without `new`, requests whose batch is open attach to
    that batch. `local` runs everything on this machine, with `workers` processes that serve `model` on `engine` with
    the engine's own `engine_args`, a list of words like `["--max-model-len", "8192"]`; close the batch, or use it as a
    context manager, to end them. `expires_s` is in seconds; `fail_after` is a number of failed rows, or a share of
    all rows like "5%". `settings` win over the environment, by the names of `FLEET_*` in lower case: `{"store": "file:///srv/fleet"}`.

    Raises `InputRefusedError`, `UsageError`, `BrokerUnavailableError`, `StoreUnavailableError`.
    """
    _refuse_source(source)
    words = _words(engine_args)
    chosen = _settings({} if settings is None else settings, local=local, model=model, workers=workers)
    if expires_s is not None and (not isinstance(expires_s, int) or expires_s < 1):
        raise UsageError(f"expires_s={expires_s!r} must be a positive number of seconds")
    _limit(fail_after, 1)
    if engine not in ENGINES:
        raise UsageError(f"engine={engine!r} is none: there are {' and '.join(ENGINES)}")
    store = open_store(chosen.store, s3_endpoint=chosen.s3_endpoint)
    limits = load(ProducerSettings)
    depends_on = [engine, model or "", *words] if local else []
    began = tracing.now()
    with _source(source, limits) as staged, contextlib.ExitStack() as traced:
        checked = intake.check(staged.shown, staged.path, limits=limits)
        digest = intake.batch_digest(checked, depends_on)
        attached = None if new else control.find_open(store, digest)
        joins = None if attached is None else attached.traceparent
        span = traced.enter_context(tracing.command("submit", joins=joins, since=began))
        tracing.child("intake", since=began, requests=checked.total).end()

        def durable(batch_id: str | None) -> Manifest:
            manifest = attached or write(batch_id)
            span.set(batch_id=manifest.batch_id, run=FIRST_RUN, requests=manifest.total, shards=len(manifest.counts))
            return manifest

        def write(batch_id: str | None) -> Manifest:
            return control.write_batch(
                store,
                checked,
                digest=digest,
                max_shard_size=chosen.shard_size,
                batch_id=batch_id,
                new=new,
                expires_at=None if expires_s is None else now() + expires_s,
                fail_after=_limit(fail_after, checked.total),
                local=local,
            )

        if checked.total == 0:
            return Batch(store, None, first_run(durable(None)))
        if not local:
            fleet = control.Fleet.connect(chosen, store)
            fleet.refuse_other_store()
            run = first_run(durable(None))
            control.start(fleet, run)
            return Batch(store, fleet, run)
        batch_id = attached.batch_id if attached is not None else layout.new_batch_id()
        processes = LocalFleet(
            batch_id,
            store_uri=chosen.store,
            model=model or "",
            engine=engine,
            workers=workers,
            engine_args=words,
            taken_up=attached is not None,
        )
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(processes)
                here = chosen.model_copy(update={"broker_url": processes.broker_url, "routes": ""})
                fleet = control.Fleet.connect(here, store)
                run = first_run(durable(batch_id))
                processes.stored = True
                if run.batch_id != batch_id:
                    raise UsageError(f"another producer is running these requests as {run.batch_id} on this machine")
                if attached is not None:
                    control.take_up(fleet, run)
                control.start(fleet, run)
                batch = Batch(store, fleet, run, processes)
                stack.pop_all()  # the batch ends them now
        except BaseException as exc:
            processes.clear_up(store, exc)
            raise
        return batch


class Batch:
    """A batch in a fleet, or in a local one. Made by `submit` and `Batch.find`."""

    def __init__(
        self, store: ObjectStore, fleet: control.Fleet | None, run: Run, local: LocalFleet | None = None
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._run = run
        self._local = local
        # Also when nobody closes it: a local fleet must not outlive the program that started it.
        self._ended = weakref.finalize(self, local.stop) if local is not None else None

    @classmethod
    def find(cls, batch_id: str, *, settings: Mapping[str, Any] | None = None) -> Self:
        """A batch of the fleet by its id, with its newest run. Raises `NoSuchBatchError`, `UsageError`."""
        chosen = _load(settings or {}).with_store()
        store = open_store(chosen.store, create=False, s3_endpoint=chosen.s3_endpoint)
        run = newest_run(store, read_manifest(store, layout.checked_batch_id(batch_id)))
        return cls(store, control.Fleet.connect(chosen, store), run)

    @property
    def id(self) -> str:
        """The batch's id."""
        return self._run.batch_id

    def status(self) -> dict[str, Any]:
        """The batch in the shape of the OpenAI Batch object; `output_file_id` names the rows once it is closed.

        Raises `NoSuchBatchError` when it was purged, as `wait` and `results` do.
        """
        state = self._state()
        closed = state.status in CLOSED
        if not closed:
            refuse_removed(self._store, self.id)
        where = f"{self._store.uri}/{layout.output(self.id, self._run.number)}"
        return shown_object(state, output=where if closed else None)

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait until the batch is closed; returns its final object. Raises `TimeoutError`: the batch goes on then."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        def look() -> None:
            self._look_after()
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.id} is not closed after {timeout_s:g} s")

        if self._fleet is not None and self._state().status not in CLOSED:
            control.wait(self._fleet, self._run, None, _Silent(), on_poll=look)
        self._end_local()
        return self.status()

    def results(self) -> Iterator[dict[str, Any]]:
        """The rows in the input's order, each as soon as those before it are there. Waits for what is missing.

        Rows of run 1 come shard by shard; those of a later run when it is closed.
        """
        presence = control.Presence(self._store, self.id)
        for name in self._parts():
            while not self._is_there(name):
                self._look_after()
                presence.look()
                time.sleep(control.POLL_S)
            try:
                rows = self._store.open(name)
            except ObjectMissingError:
                refuse_removed(self._store, self.id)
                raise
            with rows:
                for row in rows:
                    yield from_json(row)
        self.wait()

    def cancel(self) -> None:
        """End the batch within seconds: finished rows are kept, the others fail as `cancelled`."""
        control.cancel(self._store, self._fleet if self._is_running() else None, self._run.manifest)

    def close(self) -> None:
        """End a local fleet; the same `submit` goes on where it stopped. Nothing happens to a batch of a fleet."""
        self._end_local()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _parts(self) -> list[str]:
        if self._run.number != FIRST_RUN:
            return [layout.output(self.id, self._run.number)]
        return [layout.part(self.id, FIRST_RUN, shard.number) for shard in self._run.shards]

    def _is_there(self, name: str) -> bool:
        if self._run.number != FIRST_RUN and self._state().status not in CLOSED:
            return False  # its output is written, and perhaps written again, until then
        with contextlib.suppress(ObjectMissingError):
            return self._store.exists(name)
        return False

    def _state(self) -> BatchState:
        ledger = self._fleet.ledger if self._fleet is not None and self._is_running() else None
        try:
            return state_of_run(self._store, ledger, self._run)
        except redis.RedisError:
            return state_of_run(self._store, None, self._run)  # what the store knows

    def _is_running(self) -> bool:
        return self._ended is None or self._ended.alive

    def _look_after(self) -> None:
        """Replace a local worker that died.

        Raises what `LocalFleet.check` raises, with the local fleet ended then, and `UsageError` once it was ended.
        """
        if self._local is None or self._fleet is None:
            return
        if not self._is_running():
            raise UsageError(f"the local fleet of {self.id} was closed; submit again to go on")
        try:
            self._local.look(self._fleet.ledger)
        except FleetError as exc:
            self._end_local(exc)
            raise

    def _end_local(self, reason: FleetError | None = None) -> None:
        if self._local is None or self._ended is None or not self._ended.alive:
            return
        refused = reason or self._refusal()
        self._ended()
        self._local.clear_up(self._store, refused)

    def _refusal(self) -> FleetError | None:
        """Why the local fleet's set-up cannot work, where it has said so and nobody has asked yet."""
        assert self._local is not None
        assert self._fleet is not None
        try:
            counts = self._state().counts
            if not counts.completed + counts.failed:  # where rows are there, the same submit goes on with them
                self._local.look(self._fleet.ledger)
        except UsageError as exc:
            return exc
        except (FleetError, redis.RedisError):
            pass  # a death, or an outage: neither may keep the fleet from ending
        return None


class _Silent:
    """A program that waits sees the batch's status when it asks for it."""

    def say(self, text: str) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def update(self, *, done: int, total: int, failed: int, tokens: int) -> None:
        """Nothing."""


def _settings(given: Mapping[str, Any], *, local: bool, model: str | None, workers: int) -> FleetSettings:
    chosen = _load(given)
    if not local:
        if model is not None:
            raise UsageError("model needs local=True: in a fleet the workers decide")
        return chosen.with_store()
    if not model:
        raise UsageError("local=True needs a model")
    if not isinstance(workers, int) or workers < 1:
        raise UsageError("workers must be a number, at least 1")
    load(WorkerSettings)  # what the workers would refuse, a moment later and after the batch was written
    if chosen.store:
        return chosen
    return chosen.model_copy(update={"store": made_state_folder().as_uri()})


def _load(given: Mapping[str, Any]) -> FleetSettings:
    if not isinstance(given, Mapping):
        raise UsageError(
            f'settings must be a mapping like {{"store": "file:///srv/fleet"}}, not {type(given).__name__}'
        )
    unknown = sorted(set(given) - set(FleetSettings.model_fields))
    if unknown:
        raise UsageError(
            f"there are no settings {', '.join(unknown)}; there are {', '.join(FleetSettings.model_fields)}"
        )
    return load(FleetSettings, **dict(given))


def _limit(given: int | str | None, total: int) -> int | None:
    """After how many failed rows the batch ends."""
    if given is None:
        return None
    share = isinstance(given, str) and given.endswith("%")
    try:
        number = int(str(given).removesuffix("%"))
    except ValueError:
        number = 0
    if number < 1 or (share and number > 100):
        raise UsageError(f"fail_after={given!r} is no limit: say 100 for rows, or '5%' for a share of them")
    return control.fail_after(number, total, is_share=share)


def _words(engine_args: Sequence[str]) -> list[str]:
    """The engine's own flags. A text is refused: as a sequence it is its letters."""
    if isinstance(engine_args, (str, bytes, Mapping)) or not isinstance(engine_args, Iterable):
        raise UsageError(
            f'engine_args must be a list of words like ["--max-model-len", "8192"], not {type(engine_args).__name__}'
        )
    words = list(engine_args)
    for word in words:
        if not isinstance(word, str):
            raise UsageError(f'engine_args must hold words as text, like "8192", not {type(word).__name__}')
    return words


def _refuse_source(source: object) -> None:
    """Raise `UsageError` for what is no source: iterated over, it would be something else than what is meant."""
    if isinstance(source, (bytes, bytearray, Mapping)) or not isinstance(source, (str, os.PathLike, Iterable)):
        raise UsageError(f"the source must be a path, a URL, or a list of requests, not {type(source).__name__}")


def _raw_line(number: int, line: object) -> bytes:
    """A line of the file that intake reads. Raises `UsageError` for what cannot be one."""
    if not isinstance(line, (str, bytes, dict)):
        raise UsageError(
            f"request {number} of the source must be a dict, or its JSON as text or bytes, not {type(line).__name__}"
        )
    try:
        text = json.dumps(line, ensure_ascii=False) if isinstance(line, dict) else line
        return text.encode() if isinstance(text, str) else text
    except UnicodeEncodeError:
        raise UsageError(f"request {number} of the source holds text that is no Unicode (a lone surrogate)") from None
    except (TypeError, ValueError, RecursionError) as exc:  # it names types, and quotes nothing
        raise UsageError(f"request {number} of the source cannot be written as JSON: {exc}") from None


@contextlib.contextmanager
def _source(source: str | os.PathLike[str] | Iterable[Line], limits: ProducerSettings) -> Iterator[sources.Source]:
    """A source that can be read twice: a name as the command line takes it, or lines, written to a temporary file."""
    if isinstance(source, (str, os.PathLike)):
        with sources.staged(os.fspath(source), limits) as staged:
            yield staged
        return
    with tempfile.TemporaryDirectory(prefix="fleet-input-") as folder:
        path = Path(folder) / "lines.jsonl"
        with path.open("wb") as file:
            for number, line in enumerate(source, start=1):
                file.write(_raw_line(number, line).rstrip(b"\n") + b"\n")
        with sources.staged(str(path), limits) as staged:
            yield sources.Source(staged.path, "lines")
