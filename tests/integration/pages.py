"""Reading the pages of a worker or an exporter as its watchers do."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Mapping


def get(port: int, path: str) -> tuple[int, str]:
    """Status and body of a page; status 0 while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()
    except OSError:
        return 0, ""


def samples(port: int) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of a process by its name and labels."""
    status, text = get(port, "/metrics")
    assert status == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(seen: Mapping[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float | None:
    """One sample's value, or None where it is absent."""
    return seen.get((name, frozenset(labels.items())))
