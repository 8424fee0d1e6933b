"""What chat, completions and responses can do on a small model: tools, adapters, logprobs, reasoning, templates.

The rows of chat that succeed are held to vLLM's own batch runner in `test_vllm_fleet.py`.
"""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from common.errors import EngineAbortedError, EngineDeadError
from common.failures import FailureKind
from tests.engines import LoopThread, body_of, case_lines, expect_case, failure_of, line, served
from tests.rows import same_row
from tests.servers import wait_until
from tests.vllm_flags import FLAGS
from workers.engine import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from workers.engine import Reply
    from workers.engine.vllm import VllmEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    # vLLM, torch and transformers warn of each other's deprecations.
    pytest.mark.filterwarnings("default"),
]

CASES = Path(__file__).resolve().parents[1] / "cases"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string", "maxLength": 8}},
                "required": ["word"],
                "additionalProperties": False,
            },
        },
    }
]
#: A template that shows its arguments: what a request gives it can be read in the prompt's length.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking %}{{ 'think ' * 50 }}{% endif %}<|im_start|>assistant\n"
)


def write_adapter(folder: Path, model: str) -> None:
    """Write a LoRA adapter of random numbers, as PEFT writes one: large enough to be noticed in every answer."""
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    numbers, rank = np.random.default_rng(7), 4
    size, head = config["hidden_size"], config["head_dim"]
    outputs = {"q_proj": config["num_attention_heads"] * head, "v_proj": config["num_key_value_heads"] * head}
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, output in outputs.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = numbers.normal(0, 0.2, (rank, size)).astype(np.float32)
            weights[f"{place}.lora_B.weight"] = numbers.normal(0, 0.2, (output, rank)).astype(np.float32)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": rank,
        "lora_alpha": 8,
        "target_modules": list(outputs),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter), encoding="utf-8")


@pytest.fixture(scope="module")
def flags(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Flags with an adapter, a parser of tool calls and a template that takes arguments."""
    folder = tmp_path_factory.mktemp("chat")
    write_adapter(folder / "adapter", model_folder)
    (folder / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return (
        *FLAGS,
        *("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"odd={folder / 'adapter'}"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--chat-template", str(folder / "template.jinja")),
    )


@pytest.fixture(scope="module")
def engine(loop: LoopThread, model_folder: str, flags: tuple[str, ...]) -> Iterator[VllmEngine]:
    """The engine of this module."""
    yield from served(loop, model_folder, flags)


def chat(custom_id: str = "a", text: str = "Name one colour.", **body: Any) -> str:
    fields = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0} | body
    return line(CHAT, custom_id, **fields)


def message_of(reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = body_of(reply)["choices"][0]["message"]
    return message


# -- adapters ---------------------------------------------------------------------------------------------------------


def test_an_adapter_is_served_by_its_name(engine: VllmEngine, ask: Callable[[list[str]], list[Reply]]) -> None:
    """Beside the model and at the same time; both answer as they do alone."""
    assert engine.models == ("test-model", "odd")
    lines = [chat("plain"), chat("adapted", model="odd")]
    plain, adapted = ask(lines)
    assert body_of(plain)["model"] == "test-model"
    assert body_of(adapted)["model"] == "odd"
    assert message_of(plain)["content"] != message_of(adapted)["content"]
    for text, together in zip(lines, (plain, adapted), strict=True):
        assert same_row(ask([text])[0].row, together.row)


@pytest.mark.parametrize(
    "request_line",
    [
        line(COMPLETIONS, model="odd", prompt="The sky is", max_tokens=4, temperature=0),
        line(RESPONSES, model="odd", input="Name one colour.", max_output_tokens=4, temperature=0),
    ],
    ids=["completions", "responses"],
)
def test_an_adapter_answers_on_every_endpoint(ask: Callable[[list[str]], list[Reply]], request_line: str) -> None:
    adapted, plain = ask([request_line, request_line.replace('"odd"', '"test-model"')])
    assert (body_of(adapted)["model"], body_of(plain)["model"]) == ("odd", "test-model")
    key = "choices" if "choices" in body_of(plain) else "output"
    texts = [json.dumps(body_of(reply)[key]).replace("msg_", "") for reply in (adapted, plain)]
    assert texts[0] != texts[1]


def test_an_adapter_that_nobody_serves_is_a_404(ask: Callable[[list[str]], list[Reply]]) -> None:
    (reply,) = ask([chat(model="even")])
    assert reply.failure is FailureKind.MODEL_NOT_FOUND


# -- chat -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["I24", "I30"])
def test_a_replayed_report_has_the_right_outcome(ask: Callable[..., Any], engine: VllmEngine, case: str) -> None:
    """tests/cases/README.md says what each of them is about."""
    expect_case(CASES, case, ask(case_lines(CASES, case)))
    assert not engine.errored


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}])
def test_a_tool_is_called_when_it_must_be(ask: Callable[[list[str]], list[Reply]], choice: Any) -> None:
    (reply,) = ask([chat(tools=TOOLS, tool_choice=choice, max_tokens=80)])
    (call,) = message_of(reply)["tool_calls"]
    assert call["function"]["name"] == "look_up"
    assert list(json.loads(call["function"]["arguments"])) == ["word"]


def test_a_tool_may_stay_uncalled(ask: Callable[[list[str]], list[Reply]]) -> None:
    """This model was not trained to call one by itself."""
    for reply in ask([chat(tools=TOOLS), chat(tools=TOOLS, tool_choice="none")]):
        assert message_of(reply)["content"]
        assert not message_of(reply).get("tool_calls")


def test_template_arguments_reach_the_template(ask: Callable[[list[str]], list[Reply]]) -> None:
    plain, off, on = ask([chat(), *(chat(chat_template_kwargs={"enable_thinking": value}) for value in (False, True))])
    assert plain.prompt_tokens == off.prompt_tokens
    assert on.prompt_tokens >= plain.prompt_tokens + 50


def test_a_seed_fixes_what_is_sampled(ask: Callable[[list[str]], list[Reply]]) -> None:
    sampled = {"temperature": 1.5, "max_tokens": 16}
    first, again, other = ask([chat(seed=seed, **sampled) for seed in (1, 1, 2)])
    assert same_row(first.row, again.row)
    assert not same_row(first.row, other.row)


def test_log_probabilities_come_for_every_token(ask: Callable[[list[str]], list[Reply]]) -> None:
    (reply,) = ask([chat(logprobs=True, top_logprobs=3, max_tokens=4, ignore_eos=True)])
    content = body_of(reply)["choices"][0]["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in content] == [3] * 4


@pytest.mark.parametrize("form", [{"type": "json_object"}, {"type": "text"}])
def test_a_response_format_without_a_schema(ask: Callable[[list[str]], list[Reply]], form: dict[str, str]) -> None:
    (reply,) = ask([chat(response_format=form, max_tokens=60)])
    text = message_of(reply)["content"]
    assert text
    assert form["type"] == "text" or text.lstrip().startswith("{")


def test_structured_outputs_keep_to_their_choices(ask: Callable[[list[str]], list[Reply]]) -> None:
    by_choice, by_pattern = ask(
        [chat(structured_outputs={"choice": ["red", "blue"]}), chat(structured_outputs={"regex": "[a-f]{4}"})]
    )
    assert message_of(by_choice)["content"] in ("red", "blue")
    assert len(message_of(by_pattern)["content"]) == 4


def test_reasoning_is_told_from_the_answer(engine: VllmEngine, loop: LoopThread, model_folder: str) -> None:
    """By the endpoints that a worker with --reasoning-parser makes, on this engine.

    The model was not trained to reason, and has no marks for it: a parser of ours takes the first word for reasoning.
    """
    from vllm.reasoning import ReasoningParser, ReasoningParserManager

    from workers.engine.vllm import served_models
    from workers.engine.vllm_doors import Vllm
    from workers.engine.vllm_endpoints import build_endpoints
    from workers.engine.vllm_serving import Serving

    class FirstWord(ReasoningParser):
        def is_reasoning_end(self, input_ids: Any) -> bool:
            return True

        def extract_content_ids(self, input_ids: list[int]) -> list[int]:
            return input_ids

        def extract_reasoning(self, model_output: str, request: Any) -> tuple[str, str]:
            first, _, rest = model_output.partition(" ")
            return first, rest

        def extract_reasoning_streaming(self, *_: Any) -> None:
            return None

    ReasoningParserManager._register_module(FirstWord, "first_word")

    async def ask_with(parser: str) -> Reply:
        vllm = Vllm.load()
        args = vllm.parse(model_folder, FLAGS)
        # What --reasoning-parser becomes once the engine is built (vLLM 0.32, engine/arg_utils.py).
        args.structured_outputs_config.reasoning_parser = parser
        client = engine._serving._engine
        serving = Serving(vllm, client, await build_endpoints(vllm, client, args), served_models(args))
        return await serving.answer(Request(chat()))

    plain = message_of(loop.run(ask_with("")))["content"]

    message = message_of(loop.run(ask_with("first_word")))

    assert (message["reasoning"], message["content"]) == tuple(plain.split(" ", 1))


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}])
def test_an_image_on_a_text_model_is_a_400(ask: Callable[[list[str]], list[Reply]], part: dict[str, Any]) -> None:
    content = [{"type": "text", "text": "What is this?"}, part]
    bad, after = ask([chat(messages=[{"role": "user", "content": content}]), chat()])
    assert (bad.failure, after.failure) == (FailureKind.INVALID_REQUEST, None)
    assert "iVBORw0KGgo" not in failure_of(bad)


# -- completions ------------------------------------------------------------------------------------------------------


def test_completions_continue_their_prompts(ask: Callable[[list[str]], list[Reply]]) -> None:
    """One row for all prompts of a request; tokens count over all of them."""
    common = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    one, many, tokens, echoed = ask(
        [
            line(COMPLETIONS, prompt="The sky is", **common),
            line(COMPLETIONS, prompt=["The sky is", "Two and two"], logprobs=2, **common),
            line(COMPLETIONS, prompt=[504, 7149, 314], **common),
            line(COMPLETIONS, prompt="The sky is", echo=True, **common),
        ]
    )
    text = body_of(one)["choices"][0]["text"]
    assert body_of(one)["object"] == "text_completion"
    assert [choice["index"] for choice in body_of(many)["choices"]] == [0, 1]
    assert body_of(many)["choices"][0]["text"] == text
    assert len(body_of(many)["choices"][0]["logprobs"]["tokens"]) == 3
    assert many.completion_tokens == 6
    assert body_of(echoed)["choices"][0]["text"] == "The sky is" + text
    assert body_of(tokens)["usage"]["prompt_tokens"] == tokens.prompt_tokens == 3


def test_completions_of_one_row_may_be_many(ask: Callable[[list[str]], list[Reply]]) -> None:
    (reply,) = ask([line(COMPLETIONS, prompt="The", n=3, seed=1, temperature=1, max_tokens=2, ignore_eos=True)])
    assert [choice["index"] for choice in body_of(reply)["choices"]] == [0, 1, 2]
    assert reply.completion_tokens == 6


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": "x", "stream": True},
        {"prompt": "x", "max_tokens": -3},
        {"prompt": "word " * 3000},
        {"prompt": "x", "seed": 2**70},
        {"prompt": "x", "logit_bias": {"9999999": 5}},
        {"prompt": "x", "structured_outputs": {"json": {"type": "nonsense"}}},
        {"prompt": [99_999_999]},
        {"prompt": "x", "n": 0},
        {"prompt": {"SENTINEL": 1}},
    ],
    ids=["none", "stream", "max-tokens", "long", "seed", "bias", "schema", "token", "n", "object"],
)
def test_a_bad_completion_is_a_400(
    ask: Callable[[list[str]], list[Reply]], engine: VllmEngine, body: dict[str, Any]
) -> None:
    bad, after = ask([line(COMPLETIONS, "bad", **body), chat()])
    assert (bad.failure, after.failure) == (FailureKind.INVALID_REQUEST, None)
    assert "SENTINEL" not in failure_of(bad)
    assert not engine.errored


# -- responses --------------------------------------------------------------------------------------------------------


def test_responses_answer_and_count(ask: Callable[[list[str]], list[Reply]]) -> None:
    schema = {"type": "object", "properties": {"c": {"enum": ["red", "blue"]}}, "required": ["c"]}
    schema["additionalProperties"] = False
    text, listed, formed = ask(
        [
            line(RESPONSES, input="Name one colour.", max_output_tokens=6, temperature=0, store=True),
            line(
                RESPONSES,
                input=[{"role": "user", "content": "Name one colour."}],
                instructions="Be short.",
                max_output_tokens=6,
                temperature=0,
                include=["message.output_text.logprobs"],
                top_logprobs=2,
            ),
            line(
                RESPONSES,
                input="Name one colour.",
                max_output_tokens=60,
                temperature=0,
                text={"format": {"type": "json_schema", "name": "t", "schema": schema}},
            ),
        ]
    )
    usage = body_of(text)["usage"]
    assert body_of(text)["object"] == "response"
    assert (text.prompt_tokens, text.completion_tokens) == (usage["input_tokens"], usage["output_tokens"])
    assert text.prompt_tokens > 0
    assert text.completion_tokens > 0
    (said,) = body_of(listed)["output"][0]["content"]
    assert len(said["logprobs"][0]["top_logprobs"]) == 2
    (said,) = body_of(formed)["output"][0]["content"]
    assert json.loads(said["text"])["c"] in ("red", "blue")
    # Written by its alias, as the HTTP API writes it.
    assert body_of(formed)["text"]["format"]["schema"] == schema


def test_responses_agree_with_chat(ask: Callable[[list[str]], list[Reply]]) -> None:
    response, chatted = ask([line(RESPONSES, input="Name one colour.", max_output_tokens=8, temperature=0), chat()])
    assert body_of(response)["output"][0]["content"][0]["text"] == message_of(chatted)["content"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": "x", "stream": True},
        {"input": "x", "background": True},
        {"input": "x", "previous_response_id": "resp_1"},
        {"input": "x", "conversation": "conv_1"},
        {"input": "x", "prompt": {"id": "pmpt_1"}},
        {"input": "word " * 3000},
        {"input": "x", "seed": 2**70},
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "t", "schema": {"type": "nonsense"}}}},
        {"input": "x", "max_output_tokens": -1},
        {"input": {"SENTINEL": 1}},
        {"input": [{"role": "user", "content": {"SENTINEL": 1}}]},
    ],
    ids=[
        *("none", "stream", "background", "previous", "conversation", "prompt", "long", "seed", "schema"),
        *("max-tokens", "object", "content"),
    ],
)
def test_a_bad_response_is_a_400(
    ask: Callable[[list[str]], list[Reply]], engine: VllmEngine, body: dict[str, Any]
) -> None:
    bad, after = ask([line(RESPONSES, "bad", **body), chat()])
    assert (bad.failure, after.failure) == (FailureKind.INVALID_REQUEST, None)
    assert "SENTINEL" not in failure_of(bad)
    assert not engine.errored


def test_a_cancelled_answer_leaves_the_engine(engine: VllmEngine, loop: LoopThread) -> None:
    """Of both endpoints that vLLM's batch runner lacks: the engine is told, and no row comes."""
    long = {"max_tokens": 800, "max_output_tokens": 800, "ignore_eos": True, "temperature": 0}

    async def cancel() -> list[bool]:
        lines = [line(COMPLETIONS, prompt="x", **long), line(RESPONSES, input="x", **long)]
        tasks = [asyncio.create_task(engine.run(Request(text))) for text in lines]
        await engine.run(Request(chat()))  # by now the others run too
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return [task.cancelled() for task in tasks]

    assert loop.run(cancel()) == [True, True]
    in_engine = engine._serving._engine.output_processor.get_num_unfinished_requests
    wait_until(lambda: not in_engine(), 30, "the engine has stopped too")


def test_a_killed_engines_cut_answers_are_no_rows(engine: VllmEngine, loop: LoopThread) -> None:
    """The last test of the module: SIGTERM makes vLLM answer 200 with what it had so far, of responses "completed"."""
    (core,) = [child for child in psutil.Process().children(recursive=True) if "Engine" in child.name()]
    long = {"ignore_eos": True, "temperature": 0}

    async def outlive() -> list[Any]:
        lines = [
            *(line(RESPONSES, input=f"x{k}", max_output_tokens=800, **long) for k in range(4)),
            *(line(COMPLETIONS, prompt=f"x{k}", max_tokens=800, **long) for k in range(4)),
            *(line(COMPLETIONS, prompt=["x", f"y{k}"], max_tokens=800, **long) for k in range(2)),
        ]
        tasks = [asyncio.create_task(engine.run(Request(text))) for text in lines]
        await engine.run(Request(chat()))  # by now the others run too
        core.send_signal(signal.SIGTERM)
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = loop.run(outlive())
    assert {type(outcome) for outcome in outcomes} <= {EngineDeadError, EngineAbortedError}
