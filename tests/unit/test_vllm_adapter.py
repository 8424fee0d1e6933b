"""The adapter over versions of vLLM, and what becomes of vLLM's answers, with fakes of vLLM's own interfaces.

The fakes have the signatures of vLLM 0.30 to 0.33 as read in its sources; the real one is driven in tests/vllm.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from pydantic import BaseModel, field_validator

from common.batch import SUCCESS_END
from common.errors import EngineAbortedError, EngineDeadError, EngineStartError
from common.failures import MAX_MESSAGE_BYTES, FailureKind
from workers.engine import Request
from workers.engine.vllm import VllmEngine, prepare_environment, served_models
from workers.engine.vllm_cpu import GIB, KV_MAX_BYTES, KV_MIN_BYTES, available_bytes, fit_cpu, kv_cache_bytes
from workers.engine.vllm_doors import CONFIG_DOOR, TRACKER_DOOR, Vllm, check_functions, door_of
from workers.engine.vllm_reasons import start_sentence
from workers.engine.vllm_serving import Serving, default_inflight

if TYPE_CHECKING:
    from collections.abc import Callable

SENTINEL = "a-secret-of-the-prompt"

# -- vLLM, as far as it is used ---------------------------------------------------------------------------------------


class ClientError(Exception):
    """As vllm.exceptions.VLLMValidationError: no ValueError, and its str() adds the refused value."""

    def __init__(self, message: str, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter

    def __str__(self) -> str:
        return f"{self.args[0]} (parameter={self.parameter}, value={SENTINEL})"


class Body(BaseModel):
    messages: list[dict[str, str]]


class BatchRequestInput(BaseModel):
    custom_id: str
    url: str
    body: Any

    @field_validator("body", mode="plain")
    @classmethod
    def check(cls, value: dict[str, Any]) -> Any:
        if "client_error" in value:
            raise ClientError("`n` must be positive", "n")
        if "attribute_error" in value:
            value["attribute_error"].get("x")
        return Body.model_validate(value)


class Output(BaseModel):
    id: str = "vllm-1"
    custom_id: str = "a"
    response: Any = None
    error: Any = None


def answer(body: Any) -> Output:
    return Output(response=SimpleNamespaceModel(status_code=200, request_id="vllm-batch-1", body=body))


class SimpleNamespaceModel(BaseModel):
    status_code: int
    request_id: str
    body: Any = None


class Choice(BaseModel):
    finish_reason: str
    logprob: float = 0.0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int | None


class Chat(BaseModel):
    choices: list[Choice]
    usage: Usage


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(BaseModel):
    error: ErrorInfo


def failed(status: int, error: Any) -> Output:
    return Output(response=SimpleNamespaceModel(status_code=status, request_id="vllm-batch-1"), error=error)


class RunBatch:
    """The module vllm.entrypoints.launchers.run_batch of vLLM 0.30 to 0.32."""

    BatchRequestInput = BatchRequestInput
    BaseFrontendArgs = object

    @staticmethod
    async def build_endpoint_registry(engine_client: Any, args: Any) -> Any: ...

    @staticmethod
    def handle_endpoint_request(
        request: Any, tracker: Any, url_matcher: Any, handler_getter: Any, wrapper_fn: Any = None
    ) -> Any:
        if not url_matcher(request.url):
            return None
        tracker.submitted()
        tracker.completed()
        return handler_getter()(request)


class RunBatch33:
    """The same module of vLLM 0.33."""

    BatchRequestInput = BatchRequestInput
    BaseFrontendArgs = object

    @staticmethod
    async def build_endpoint_registry(engine_client: Any, args: Any) -> Any: ...

    @staticmethod
    def handle_endpoint_request(request: Any, config: Any) -> Any:
        if request.url != config["url"]:
            return None
        return config["handler_getter"]()(request)


def build_client(args: Any, *, usage_context: Any = None, client_config: Any = None) -> None: ...


class Engine:
    errored = False
    vllm_config: ClassVar = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=512), parallel_config=SimpleNamespace(data_parallel_size=2)
    )


@pytest.fixture(params=["0.30.0", "0.31.2", "0.32.0", "0.33.0"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def serve(
    handler: Callable[[Any], Any] | None, version: str = "0.32.0", engine: Engine | None = None
) -> tuple[Serving, Engine]:
    """A served model that can only chat, by `handler`."""
    door = door_of(version)
    entry: dict[str, Any] = {"handler_getter": lambda: handler, "wrapper_fn": None}
    if door is TRACKER_DOOR:
        entry["url_matcher"] = lambda url: url == "/v1/chat/completions"
        run_batch: Any = RunBatch
    else:
        entry["url"] = "/v1/chat/completions"
        run_batch = RunBatch33
    check_functions(version, door, run_batch, build_client)
    engine = engine or Engine()
    vllm = Vllm(version, door, run_batch, build_client, ClientError)
    return Serving(vllm, engine, {"completions": entry}, ("m",)), engine


def chat(body: dict[str, Any] | None = None, url: str = "/v1/chat/completions") -> Request:
    return Request(json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body or {"messages": []}}))


def ask(serving: Serving, request: Request) -> tuple[dict[str, Any], FailureKind | None]:
    reply = asyncio.run(serving.answer(request))
    assert reply.row.endswith(SUCCESS_END) == (reply.failure is None)
    return json.loads(reply.row), reply.failure


# -- versions ---------------------------------------------------------------------------------------------------------


def test_known_versions_have_a_door() -> None:
    assert {door_of(f"0.{minor}.1") for minor in (30, 31, 32)} == {TRACKER_DOOR}
    assert door_of("0.33.0") is CONFIG_DOOR
    assert door_of("0.32.0+cpu") is TRACKER_DOOR


@pytest.mark.parametrize("version", ["0.29.1", "0.34.0", "1.0.0", "0.3", "0.1.dev1+g0"])
def test_an_unknown_version_is_refused_by_name(version: str) -> None:
    with pytest.raises(EngineStartError, match=rf"vLLM {version.replace('+', '.')} is not supported.*0\.30 to 0\.33"):
        door_of(version)


@pytest.mark.parametrize(("version", "run_batch"), [("0.32.0", RunBatch33), ("0.33.0", RunBatch)])
def test_functions_of_another_version_are_refused(version: str, run_batch: Any) -> None:
    with pytest.raises(EngineStartError, match=rf"vLLM {version}.*handle_endpoint_request should take.*0\.30 to 0\.33"):
        check_functions(version, door_of(version), run_batch, build_client)


@pytest.mark.parametrize("missing", ["handle_endpoint_request", "build_endpoint_registry", "BatchRequestInput"])
def test_a_missing_function_is_refused(missing: str) -> None:
    names = ("handle_endpoint_request", "build_endpoint_registry", "BatchRequestInput", "BaseFrontendArgs")
    part = SimpleNamespace(**{name: getattr(RunBatch, name) for name in names if name != missing})
    with pytest.raises(EngineStartError, match=missing):
        check_functions("0.32.0", TRACKER_DOOR, part, build_client)


def test_a_changed_engine_builder_is_refused() -> None:
    with pytest.raises(EngineStartError, match="build_async_engine_client"):
        check_functions("0.32.0", TRACKER_DOOR, RunBatch, lambda config: None)


def test_an_unknown_registry_is_refused() -> None:
    vllm = Vllm("0.33.0", CONFIG_DOOR, RunBatch33, build_client, ClientError)
    with pytest.raises(EngineStartError, match=r"0\.33\.0.*completions"):
        Serving(vllm, Engine(), {"completions": {"handler_getter": None}}, ())


def test_importing_the_module_imports_no_vllm() -> None:
    """The rest of the product runs where vLLM is not installed."""
    import subprocess

    code = "import sys, workers.engine.vllm; print([m for m in ('vllm', 'torch') if m in sys.modules])"
    root = Path(__file__).resolve().parents[2]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# -- answers ----------------------------------------------------------------------------------------------------------


def test_a_good_answer_is_vllms_own_row(version: str) -> None:
    async def handler(request: Any) -> Output:
        return answer(Chat(choices=[Choice(finish_reason="stop")], usage=Usage(prompt_tokens=3, completion_tokens=5)))

    serving, _ = serve(handler, version)
    reply = asyncio.run(serving.answer(chat()))
    assert reply.row == asyncio.run(handler(None)).model_dump_json().encode()
    assert (reply.failure, reply.prompt_tokens, reply.completion_tokens) == (None, 3, 5)


def test_a_row_is_strict_json_whatever_the_numbers() -> None:
    async def handler(request: Any) -> Output:
        choices = [Choice(finish_reason="stop", logprob=number) for number in (float("nan"), float("-inf"))]
        return answer(Chat(choices=choices, usage=Usage(prompt_tokens=1, completion_tokens=None)))

    reply = asyncio.run(serve(handler)[0].answer(chat()))

    def refuse(name: str) -> None:
        raise AssertionError(name)

    row = json.loads(reply.row, parse_constant=refuse)
    assert [choice["logprob"] for choice in row["response"]["body"]["choices"]] == [None, None]
    assert reply.completion_tokens == 0


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, FailureKind.INVALID_REQUEST),
        (404, FailureKind.MODEL_NOT_FOUND),
        (422, FailureKind.INVALID_REQUEST),
        (500, FailureKind.ENGINE_ERROR),
        (503, FailureKind.ENGINE_OVERLOADED),
    ],
)
@pytest.mark.parametrize("as_dict", [False, True])
def test_an_error_answer_keeps_ids_status_and_error(status: int, kind: FailureKind, as_dict: bool) -> None:
    info = {"message": "no", "type": "SomeError", "param": "model", "code": status}

    async def handler(request: Any) -> Output:
        return failed(status, {"error": info} if as_dict else ErrorResponse(error=ErrorInfo(**info)))

    row, failure = ask(serve(handler)[0], chat())
    assert failure is kind
    assert row == {
        "id": "vllm-1",
        "custom_id": "a",
        "response": {"status_code": status, "request_id": "vllm-batch-1", "body": {"error": info}},
        "error": {"code": kind.code, "message": "no"},
    }


def test_stream_mode_is_a_400_that_says_stream() -> None:
    async def handler(request: Any) -> Output:
        return failed(400, "Request must not be sent in stream mode")

    row, failure = ask(serve(handler)[0], chat())
    assert failure is FailureKind.INVALID_REQUEST
    assert "stream" in row["error"]["message"]
    assert row["response"]["body"]["error"]["code"] == 400


@pytest.mark.parametrize("url", ["/v1/completions", "/chat/completions", "/v1/chat/completions/", "", "/v1/responses"])
def test_a_url_that_is_not_served_lists_those_that_are(version: str, url: str) -> None:
    async def handler(request: Any) -> Output:
        raise AssertionError

    row, failure = ask(serve(handler, version)[0], chat(url=url))
    assert failure is FailureKind.UNSUPPORTED_ENDPOINT
    assert "supported: /v1/chat/completions." in row["error"]["message"]
    assert row["response"]["status_code"] == 400


def test_a_long_url_is_cut() -> None:
    row, _ = ask(serve(None)[0], chat(url="/" + "x" * 10_000))
    assert len(row["error"]["message"]) < 400


def test_a_number_that_is_not_finite_never_reaches_the_engine() -> None:
    line = chat().line.replace('"messages"', '"temperature": 1e400, "messages"')
    row, failure = ask(serve(None)[0], Request(line))
    assert failure is FailureKind.INVALID_REQUEST
    assert "finite" in row["error"]["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"x": SENTINEL}, "body.messages: Field required"),
        ({"messages": SENTINEL}, "body.messages: Input should be a valid array"),
        ({"messages": [SENTINEL] * 1000}, "and 995 more"),
        ({"client_error": 1}, "body.n: `n` must be positive"),
        ({"attribute_error": SENTINEL}, "not a request of this endpoint"),
    ],
)
def test_a_line_that_vllm_cannot_read_is_explained_without_its_values(body: dict[str, Any], said: str) -> None:
    row, failure = ask(serve(None)[0], chat(body))
    assert failure is FailureKind.INVALID_REQUEST
    message = row["error"]["message"]
    assert said in message
    assert SENTINEL not in message
    assert len(message.encode()) < MAX_MESSAGE_BYTES
    assert (row["custom_id"], row["response"]["body"]["error"]["message"]) == ("a", message)


# -- what is no answer ------------------------------------------------------------------------------------------------


def test_a_dead_engine_is_never_a_row() -> None:
    engine = Engine()

    async def handler(request: Any) -> Output:
        engine.errored = True
        return failed(500, {"error": {"message": "EngineCore", "type": "x", "param": None, "code": 500}})

    serving, _ = serve(handler, engine=engine)
    with pytest.raises(EngineDeadError):
        asyncio.run(serving.answer(chat()))
    with pytest.raises(EngineDeadError):  # and from now on
        asyncio.run(serving.answer(chat()))


def test_an_exception_of_a_dead_engine_is_its_death() -> None:
    engine = Engine()

    async def handler(request: Any) -> Output:
        engine.errored = True
        raise RuntimeError

    with pytest.raises(EngineDeadError):
        asyncio.run(serve(handler, engine=engine)[0].answer(chat()))


@pytest.mark.parametrize(("dies", "error"), [(False, EngineAbortedError), (True, EngineDeadError)])
def test_an_aborted_choice_is_never_a_row(dies: bool, error: type[Exception]) -> None:
    engine = Engine()

    async def handler(request: Any) -> Output:
        engine.errored = dies
        choices = [Choice(finish_reason="stop"), Choice(finish_reason="abort")]
        return answer(Chat(choices=choices, usage=Usage(prompt_tokens=1, completion_tokens=1)))

    with pytest.raises(error):
        asyncio.run(serve(handler, engine=engine)[0].answer(chat()))


def test_without_the_look_at_aborts_an_answer_cut_short_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The safeguard off: vLLM itself calls it a success."""
    monkeypatch.setattr("workers.engine.vllm._was_aborted", lambda _: False)

    async def handler(request: Any) -> Output:
        return answer(Chat(choices=[Choice(finish_reason="abort")], usage=Usage(prompt_tokens=1, completion_tokens=1)))

    reply = asyncio.run(serve(handler)[0].answer(chat()))

    assert reply.failure is None
    assert b'"finish_reason":"abort"' in reply.row


def test_a_cancelled_request_is_never_a_row() -> None:
    """vLLM answers a cancellation with a row; the cancellation is what counts."""
    entered = asyncio.Event()

    async def handler(request: Any) -> Output:
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return failed(400, "Client disconnected")
        raise AssertionError

    async def cancel() -> asyncio.Task[Any]:
        task = asyncio.create_task(serve(handler)[0].answer(chat()))
        await entered.wait()
        task.cancel()
        await asyncio.wait({task})
        return task

    assert asyncio.run(cancel()).cancelled()


def test_a_time_limit_ends_as_a_timeout() -> None:
    """asyncio.timeout cancels too, and must see its cancellation come back."""

    async def handler(request: Any) -> Output:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return failed(400, "Client disconnected")
        raise AssertionError

    async def limited() -> None:
        async with asyncio.timeout(0.01):
            await serve(handler)[0].answer(chat())

    with pytest.raises(TimeoutError):
        asyncio.run(limited())


# -- starting ---------------------------------------------------------------------------------------------------------


def test_an_engine_that_never_started_answers_nothing_and_stops() -> None:
    async def use() -> None:
        engine = VllmEngine("m", [])
        assert not engine.errored
        with pytest.raises(EngineDeadError):
            await engine.run(chat())
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        await engine.stop()
        await engine.stop()

    asyncio.run(use())


def test_a_missing_model_folder_is_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "none"

    async def use() -> None:
        engine = VllmEngine(str(folder), [])
        with pytest.raises(EngineStartError, match=f"There is no model folder {folder}"):
            await engine.start()
        await engine.stop()

    asyncio.run(use())


def test_a_machine_without_vllm_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_nothing(name: str) -> Any:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr("workers.engine.vllm_doors.import_module", import_nothing)
    with pytest.raises(EngineStartError, match=r"not installed.*--engine echo"):
        Vllm.load()


def test_an_engine_that_is_stopped_while_it_starts_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A start that hangs ends by `stop`, and never leaves its caller waiting."""

    @contextlib.asynccontextmanager
    async def hang(*_: Any) -> Any:
        await asyncio.Event().wait()
        yield

    monkeypatch.setattr("workers.engine.vllm.open_engine", hang)
    monkeypatch.setattr(Vllm, "load", lambda: None)
    monkeypatch.setattr("os.environ", dict(os.environ))

    async def use(turns: int) -> None:
        engine = VllmEngine(str(tmp_path), [])
        start = asyncio.create_task(engine.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        await engine.stop()
        with pytest.raises(EngineStartError, match="stopped while it started"):
            await asyncio.wait_for(start, 5)
        with pytest.raises(EngineStartError, match="started before"):
            await engine.start()

    for turns in (1, 2, 3, 4):
        asyncio.run(use(turns))


def test_the_engine_processes_own_reason_is_the_sentence(tmp_path: Path) -> None:
    path = tmp_path / "reason"
    generic = RuntimeError("Engine core initialization failed.\nSee root cause above.")
    assert start_sentence(generic, path) == "vLLM did not start: Engine core initialization failed."
    path.write_text("No memory is left.")
    assert start_sentence(generic, path) == "vLLM did not start: No memory is left."


def test_inflight_is_twice_what_the_engine_runs_at_once() -> None:
    assert default_inflight(Engine.vllm_config) == 2048
    small = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4), parallel_config=SimpleNamespace(data_parallel_size=1)
    )
    assert default_inflight(small) == 256


@pytest.mark.parametrize(
    ("served", "loras", "models"),
    [
        (None, None, ("m",)),
        ("one", None, ("one",)),
        (["one", "two"], [SimpleNamespace(name="lora")], ("one", "two", "lora")),
    ],
)
def test_requests_may_name_what_is_served(served: Any, loras: Any, models: tuple[str, ...]) -> None:
    args = argparse.Namespace(model="m", served_model_name=served, lora_modules=loras)
    assert served_models(args) == models


def test_the_environment_stays_what_a_user_said(tmp_path: Path) -> None:
    environ = {"VLLM_NO_USAGE_STATS": "0", "FLEET_WORKER": "0", "VLLM_PLUGINS": "mine", "HF_HUB_OFFLINE": "0"}
    prepare_environment(str(tmp_path), environ)
    assert environ == {
        "VLLM_NO_USAGE_STATS": "0",
        "FLEET_WORKER": "0",
        "VLLM_PLUGINS": "mine,fleet",
        "HF_HUB_OFFLINE": "0",
    }


def test_only_a_local_model_is_loaded_offline(tmp_path: Path) -> None:
    local: dict[str, str] = {}
    hub: dict[str, str] = {}
    prepare_environment(str(tmp_path), local)
    prepare_environment("org/model", hub)
    assert local["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in hub
    assert local["VLLM_NO_USAGE_STATS"] == hub["VLLM_NO_USAGE_STATS"] == "1"


# -- the CPU ----------------------------------------------------------------------------------------------------------


def cpu_args(**given: Any) -> argparse.Namespace:
    values = {
        "kv_cache_memory_bytes": None,
        "fleet_sized": False,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
    }
    return argparse.Namespace(**values | given)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 8 cores with 8 GiB free."""
    monkeypatch.setattr("workers.engine.vllm_cpu.available_bytes", lambda: 8 * GIB)
    monkeypatch.setattr("workers.engine.vllm_cpu.cores", lambda: 8)


@pytest.mark.usefixtures("machine")
def test_engines_on_one_host_share_its_memory_and_cores() -> None:
    alone: dict[str, str] = {}
    shared = {"FLEET_WORKERS_ON_HOST": "2"}
    one, half = cpu_args(), cpu_args()
    fit_cpu(one, alone)
    fit_cpu(half, shared)
    assert (one.kv_cache_memory_bytes, half.kv_cache_memory_bytes) == (GIB, GIB // 2)
    assert (alone["OMP_NUM_THREADS"], shared["OMP_NUM_THREADS"]) == ("8", "4")
    assert alone["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("given", "environ"),
    [
        ({"kv_cache_memory_bytes": 7}, {}),
        ({"fleet_sized": True}, {}),
        ({}, {"VLLM_CPU_KVCACHE_SPACE": "1"}),
    ],
)
def test_a_users_memory_stays(given: dict[str, Any], environ: dict[str, str]) -> None:
    args = cpu_args(**given)
    fit_cpu(args, environ)
    assert args.kv_cache_memory_bytes == given.get("kv_cache_memory_bytes")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("given", "environ"),
    [
        ({"tensor_parallel_size": 2}, {}),
        ({"pipeline_parallel_size": 2}, {}),
        ({"data_parallel_size": 2}, {}),
        ({}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}),
        ({}, {"VLLM_CPU_OMP_THREADS_BIND": "0,1"}),
    ],
)
def test_a_users_processes_and_threads_stay(given: dict[str, Any], environ: dict[str, str]) -> None:
    before = dict(environ)
    fit_cpu(cpu_args(**given), environ)
    assert environ == before


def test_a_kv_cache_has_bounds() -> None:
    assert kv_cache_bytes(1000 * GIB, 1) == KV_MAX_BYTES
    assert kv_cache_bytes(0, 1) == KV_MIN_BYTES


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_senseless_number_of_workers_is_refused(text: str) -> None:
    with pytest.raises(EngineStartError, match="FLEET_WORKERS_ON_HOST"):
        fit_cpu(cpu_args(), {"FLEET_WORKERS_ON_HOST": text})


def test_memory_is_counted_as_vllm_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "vllm.utils.cpu_resource_utils": SimpleNamespace(
            get_memory_node_info=lambda node: SimpleNamespace(available_memory=3 * GIB)
        ),
        "psutil": SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=8 * GIB)),
    }
    monkeypatch.setattr("workers.engine.vllm_cpu.import_module", modules.__getitem__)
    assert available_bytes() == 3 * GIB
    modules["vllm.utils.cpu_resource_utils"] = SimpleNamespace()
    assert available_bytes() == 8 * GIB
