"""Settings: defaults, limits, and one sentence for a bad one that never holds its value."""

from __future__ import annotations

import os

import pytest

from common.errors import UsageError
from common.settings import GPU_QUEUE, MAX_SHARD_SIZE, ExporterSettings, FleetSettings, WorkerSettings, load


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("FLEET_"):
            monkeypatch.delenv(name)


def test_defaults_are_those_of_the_contract() -> None:
    settings = load(WorkerSettings)

    assert settings.broker_url == "redis://localhost:6379/0"
    assert settings.store == ""
    assert (settings.shard_size, settings.window) == (1000, 16_384)
    assert (settings.engine, settings.queue, settings.max_inflight, settings.drain_s) == ("vllm", GPU_QUEUE, 0, 30.0)


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_WINDOW", "32")
    monkeypatch.setenv("FLEET_STORE", "file:///srv")
    monkeypatch.setenv("FLEET_DRAIN_S", "0.5")

    settings = load(WorkerSettings)

    assert (settings.window, settings.store, settings.drain_s) == (32, "file:///srv", 0.5)


def test_an_option_wins_over_the_environment_and_none_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_WINDOW", "32")

    assert load(FleetSettings, window=64).window == 64
    assert load(FleetSettings, window=None).window == 32


def test_an_empty_variable_is_an_absent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_WINDOW", "")
    monkeypatch.setenv("FLEET_BROKER_URL", "")

    settings = load(FleetSettings)

    assert (settings.window, settings.broker_url) == (16_384, "redis://localhost:6379/0")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FLEET_WINDOW", "0"), ("FLEET_WINDOW", "secret"), ("FLEET_SHARD_SIZE", "0"), ("FLEET_SHARD_SIZE", "1001"),
        ("FLEET_ENGINE", "secret"), ("FLEET_MAX_INFLIGHT", "-1"), ("FLEET_DRAIN_S", "-0.5"), ("FLEET_DRAIN_S", "nan"),
        ("FLEET_LEASE_S", "9.9"), ("FLEET_LEASE_S", "nan"), ("FLEET_LEASE_S", "inf"), ("FLEET_ROUTES", "m"),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_the_variables_name(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)

    with pytest.raises(UsageError) as caught:
        load(WorkerSettings)

    assert str(caught.value).startswith(f"{name}: ")
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "Value error" not in str(caught.value)


def test_the_largest_shard_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_SHARD_SIZE", str(MAX_SHARD_SIZE))

    assert load(FleetSettings).shard_size == MAX_SHARD_SIZE == 1000


def test_variables_of_others_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_SOMETHING_ELSE", "x")

    assert load(FleetSettings).window == 16_384


def test_a_missing_store_is_one_sentence_that_names_the_variable() -> None:
    with pytest.raises(UsageError, match=r"^FLEET_STORE is not set"):
        load(FleetSettings).with_store()

    assert load(FleetSettings, store="file:///s").with_store().store == "file:///s"


@pytest.mark.parametrize("kind", [WorkerSettings, ExporterSettings])
@pytest.mark.parametrize(
    "name", ["a secret", " ", "secret\t", "secret\n", "secret\x1b", ".secret", "fleet:secret", "a,b"]
)
def test_what_cannot_be_a_queue_s_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: type[FleetSettings]
) -> None:
    """No route could lead there, and a worker would wait for ever."""
    monkeypatch.setenv("FLEET_QUEUE", name)

    with pytest.raises(UsageError, match=r"^FLEET_QUEUE: must be letters, digits") as caught:
        load(kind)
    assert "secret" not in str(caught.value)


def test_a_queue_has_the_name_that_a_route_may_give_it() -> None:
    assert load(WorkerSettings, queue="gpu-Llama_3.1").queue == "gpu-Llama_3.1"
