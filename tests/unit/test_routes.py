"""Where requests go, by the setting's words."""

from __future__ import annotations

import pytest

from common.errors import UsageError
from common.routes import Routes
from tests.invariants import chat_line


def test_without_routes_every_request_goes_to_the_default_queue() -> None:
    routes = Routes.parse("")

    assert routes.single
    assert routes.queues == ("gpu",)
    assert routes.queue_of_line("not looked into") == "gpu"


def test_a_named_model_goes_to_its_queue_and_every_other_one_to_the_default() -> None:
    routes = Routes.parse(" llama=gpu-llama, org/embed=x=emb ,also=emb")

    assert routes.queues == ("gpu", "gpu-llama", "emb")
    assert routes.queue_of_line(chat_line("a", "x", model="llama")) == "gpu-llama"
    assert routes.queue_of_line(chat_line("a", "x", model="org/embed=x")) == "emb"
    assert routes.queue_of_line(chat_line("a", "x", model="unknown")) == "gpu"
    assert routes.queue_of_line(chat_line("a", "x", model=None)) == "gpu"
    assert routes.models_of("emb") == ("also", "org/embed=x")


@pytest.mark.parametrize("text", ["llama", "=q", "llama=", "llama=a b", "llama=aggregate", "llama=fleet:x", "a=b,a=c"])
def test_what_is_no_route_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="FLEET_ROUTES"):
        Routes.parse(text)
