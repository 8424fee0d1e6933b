"""The rows that vLLM's answers become.

Owns: the bytes of every row of the vLLM engine. Must not know: which endpoint answered, and how it was asked.
On failure: there is none but vLLM's own: an answer of another shape than every version's raises.

A row that succeeded is vLLM's own, byte for byte; one that failed has vLLM's ids and the shape of the contract.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from common.batch import SUCCESS_END, counted_tokens, custom_id_of, failed_row, http_error
from common.failures import Failure, kind_of_status
from workers.engine import Reply

if TYPE_CHECKING:
    from workers.engine import Request


def refused(request: Request, failure: Failure) -> Reply:
    """Write the row of a request that no handler of vLLM's saw."""
    type_ = "BadRequestError" if failure.kind.status < HTTPStatus.INTERNAL_SERVER_ERROR else "InternalServerError"
    answered = http_error(failure, type_=type_)
    return Reply(failed_row(custom_id_of(request.line), failure, answered=answered), failure.kind)


def failed(output: Any) -> Reply:
    """Write the row of a request that vLLM answered with an error: vLLM's ids, our shape."""
    response, error = output.response, output.error
    status = int(response.status_code) if response is not None else 500
    if isinstance(error, str):
        # Of stream mode (vLLM 0.30–0.33, run_batch.run_request).
        failure = Failure(kind_of_status(status), error)
        answered = http_error(failure, type_="BadRequestError", code=status)
    else:
        info = error["error"] if isinstance(error, dict) else error.error
        told = info if isinstance(info, dict) else info.model_dump()
        failure = Failure(kind_of_status(status), str(told["message"]))
        answered = http_error(failure, type_=str(told["type"]), param=told.get("param"), code=status)
    row = {
        "id": output.id,
        "custom_id": output.custom_id,
        "response": {
            "status_code": status,
            "request_id": response.request_id if response is not None else output.id,
            "body": {"error": answered},
        },
        "error": {"code": failure.kind.code, "message": failure.message},
    }
    return Reply(to_json(row, inf_nan_mode="null"), failure.kind)


def succeeded(output: Any) -> Reply:
    """Pass on vLLM's own row, byte for byte.

    pydantic writes null for NaN and infinity (its `ser_json_inf_nan`), so the row is strict JSON.
    """
    row: bytes = output.model_dump_json().encode("utf-8")
    if not row.endswith(SUCCESS_END):
        raise ValueError("a row of vLLM's does not end as rows that succeeded do")
    usage = getattr(output.response.body, "usage", None)
    prompt_tokens, completion_tokens = counted_tokens(usage.model_dump() if usage is not None else {})
    return Reply(row, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)


def was_aborted(output: Any) -> bool:
    """Whether an answer was cut short by an abort, which reads as one that succeeded."""
    choices = getattr(output.response.body, "choices", None) or ()
    return any(getattr(choice, "finish_reason", None) == "abort" for choice in choices)
