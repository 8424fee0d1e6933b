"""Users of Redis, each with what it needs and no more; passwords; TLS. Everything against a real server."""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import urllib.request
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from common import broker, keys
from tests.deploy.conftest import TOOLS, TOP
from tests.deploy.secureredis import PASSWORDS, SecureRedis
from tests.invariants import assert_complete, chat_lines
from tests.servers import START_S, Process, Workplace, free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: What KEDA's `redis` trigger sends (2.20, pkg/scalers/redis_scaler.go): the length of whatever the key is.
KEDA_LENGTH = """
local kind = redis.call('type', KEYS[1]).ok
local command = { hash = 'hlen', list = 'llen', none = 'llen' }
return redis.call(command[kind], KEYS[1])
"""

NEVER = Retry(NoBackoff(), 0)

ADMIN = "user admin on nopass ~* &* +@all"


@pytest.fixture(scope="module")
def secure(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureRedis]:
    """A Redis as we ship it, and a user more that may read what the server refused to others."""
    folder = tmp_path_factory.mktemp("redis")
    files = shutil.copytree(TOP / "deploy/redis", folder / "files")
    with (files / "users.acl").open("a") as users:
        users.write(f"{ADMIN}\n")
    with SecureRedis(folder, environment={"REDIS_FILES": str(files)}) as started:
        started.wait_until_ready()
        yield started


def admin(secure: SecureRedis) -> Any:
    return redis.Redis(host="127.0.0.1", port=secure.port, username="admin", password="any", socket_timeout=10)


@pytest.fixture
def place(secure: SecureRedis, tmp_path: Path) -> Iterator[Workplace]:
    """A fleet's folder; what an earlier test left in Redis is gone."""
    with admin(secure) as client:
        client.flushdb()
        client.acl_log_reset()
    with closing(
        Workplace(
            tmp_path / "place",
            FLEET_BROKER_URL=secure.url("fleet"),
            FLEET_STORE=(tmp_path / "store").as_uri(),
            PYTHONPATH=str(TOP),
            FLEET_DRAIN_S="5",
        )
    ) as made:
        yield made


def start_fleet(place: Workplace, **environment: str) -> list[Process]:
    fleet = [
        place.start("aggregate", "-m", "workers", "aggregate", **environment),
        place.start("worker", "-m", "workers", "serve", "test-model", "--engine", "echo", **environment),
    ]
    wait_until(lambda: all(" ready." in each.stderr or not each.running for each in fleet), START_S, "the fleet is up")
    assert [each.stderr for each in fleet if not each.running] == []
    return fleet


def scale(port: int) -> dict[str, Any]:
    """The exporter's numbers; empty while there are none."""
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/scale", timeout=5) as answer:
        return dict(json.loads(answer.read()))
    return {}


def refused(secure: SecureRedis) -> list[tuple[str, str, str]]:
    """What the server refused, to whom."""
    with admin(secure) as client:
        return [(entry["username"], entry["reason"], entry["object"]) for entry in client.acl_log(64)]


def test_a_fleet_with_flower_lives_under_its_users(secure: SecureRedis, place: Workplace) -> None:
    """Not one command of it is refused: batches, a cancel, remote control, events."""
    fleet = start_fleet(place)
    port = free_port()
    flower = place.start(
        "flower", "-m", "workers", "flower", f"--port={port}",
        FLEET_BROKER_URL=secure.url("flower"), FLOWER_BASIC_AUTH="u:p",
    )  # fmt: skip
    pages = free_port()
    exporter = place.start(
        "exporter", "-m", "workers", "exporter", "--port", str(pages), FLEET_BROKER_URL=secure.url("exporter")
    )
    wait_until(lambda: "Events of group" in fleet[1].stderr, START_S, "Flower asked the worker for events")
    wait_until(lambda: scale(pages).get("workers_ready") == 1, START_S, "the exporter saw the worker")

    lines = chat_lines(60)
    path = place.write("in.jsonl", lines)
    run = place.producer("submit", str(path), "-o", str(place.folder / "out.jsonl"))
    slow = place.write("slow.jsonl", chat_lines(8, echo={"hang": True}))
    batch_id = place.producer("submit", str(slow), "--detach").stdout.decode().strip()
    cancelled = place.producer("cancel", batch_id)
    listed = place.producer("status")
    for each in (*fleet, flower, exporter):
        each.stop()

    assert run.code == 0, run.stderr
    assert_complete(lines, (place.folder / "out.jsonl").read_bytes())
    assert cancelled.code == 0, cancelled.stderr
    assert listed.code == 0, listed.stderr
    assert "permission" not in flower.stderr.lower(), flower.stderr
    assert refused(secure) == []


def test_nobody_comes_in_without_a_user(secure: SecureRedis) -> None:
    for url in (f"redis://127.0.0.1:{secure.port}/0", f"redis://:{PASSWORDS['fleet']}@127.0.0.1:{secure.port}/0"):
        with redis.Redis.from_url(url) as client, pytest.raises(redis.RedisError):
            client.ping()


def test_passwords_stand_neither_in_files_nor_in_arguments_nor_in_the_servers_environment(tmp_path: Path) -> None:
    """Seen by a server that writes down what it was given."""
    server = tmp_path / "server"
    server.write_text('#!/bin/sh\nenv\necho "$@"\ncat "$3"\n')
    server.chmod(0o755)
    with SecureRedis(tmp_path, environment={"REDIS_SERVER": str(server)}) as bare:
        given = bare.process.wait(10)

    assert given.code == 0, given.stderr
    assert b"REDIS_SERVER=" in given.stdout
    assert b"redis.conf --aclfile" in given.stdout
    assert b"user fleet on #" in given.stdout
    assert b"_PASSWORD" not in given.stdout
    for word in PASSWORDS.values():
        assert word.encode() not in given.stdout
    assert (tmp_path / "run/users.acl").stat().st_mode & 0o077 == 0


def test_whoever_has_a_user_may_come_from_another_address(secure: SecureRedis) -> None:
    """`protected-mode` lets only the machine itself in while the default user needs no password."""
    with socket.create_connection(("127.0.0.1", secure.port), timeout=5, source_address=("127.0.0.2", 0)) as far:
        far.sendall(f"AUTH fleet {PASSWORDS['fleet']}\r\n".encode())
        answer = far.recv(100)

    assert answer == b"+OK\r\n"


def fill(secure: SecureRedis) -> None:
    """What a fleet at work has in Redis."""
    with secure.client("fleet") as client:
        client.rpush("gpu", "a message")
        client.hset("unacked", "tag", "a message")
        client.zadd("unacked_index", {"tag": 1.0})
        client.hset(keys.rows("batch_x", 1, 0), "0", "a row")
        client.hset(keys.head("batch_x", 1), "total", "1")


SECRETS = [
    ("lrange", "gpu", "0", "-1"),
    ("lindex", "gpu", "0"),
    ("hgetall", "unacked"),
    ("hvals", "unacked"),
    ("hget", "unacked", "tag"),
    ("hmget", "unacked", "tag"),
    ("hmget", keys.rows("batch_x", 1, 0), "0"),
    ("getrange", "gpu", "0", "-1"),
    ("hgetall", keys.rows("batch_x", 1, 0)),
    ("hget", keys.rows("batch_x", 1, 0), "0"),
    ("eval", "return redis.call('lindex', KEYS[1], 0)", "1", "gpu"),
    ("eval", "return redis.call('hvals', KEYS[1])", "1", "unacked"),
    ("dump", "gpu"),
]
HARM = [
    ("lpush", "gpu", "forged"),
    ("rpop", "gpu"),
    ("del", "gpu"),
    ("hset", "unacked", "tag", "forged"),
    ("del", "unacked"),
    ("hset", keys.rows("batch_x", 1, 0), "1", "forged"),
    ("eval", "return redis.call('rpop', KEYS[1])", "1", "gpu"),
    ("rename", "gpu", "celeryev.gpu"),
]
RULE = [
    ("flushall",),
    ("config", "get", "*"),
    ("acl", "list"),
    ("acl", "setuser", "fleet", "nopass"),
    ("keys", "*"),
    ("shutdown",),
    ("replicaof", "no", "one"),
    ("module", "list"),
    ("monitor",),
    # In the category `connection`, like what every client needs: they stop or spy on all others.
    ("client", "pause", "1000", "all"),
    ("client", "unpause"),
    ("client", "kill", "user", "fleet"),
    ("client", "list"),
    ("client", "no-evict", "on"),
    ("client", "unblock", "1"),
    ("client", "tracking", "on", "bcast"),
]


#: The last one is how Redis 7.0 refuses a command inside of a script.
REFUSALS = ("no permissions", "acl failure", "can't run this command")


@pytest.mark.parametrize("user", ["fleet", "scaler", "exporter", "flower"])
def test_every_user_may_do_what_connections_need(secure: SecureRedis, user: str) -> None:
    with secure.client(user) as client:
        assert client.ping()
        for command in (("client", "setname", "x"), ("client", "getname"), ("client", "id"), ("echo", "x")):
            client.execute_command(*command)
        client.execute_command("hello", "3", "auth", user, PASSWORDS[user])


@pytest.mark.parametrize("user", ["scaler", "exporter", "flower"])
def test_watchers_can_neither_read_prompts_nor_change_work(secure: SecureRedis, user: str) -> None:
    fill(secure)
    with secure.client(user) as client:
        for command in (*SECRETS, *HARM, *RULE):
            with pytest.raises(redis.ResponseError) as caught:
                client.execute_command(*command)
            assert any(words in str(caught.value).lower() for words in REFUSALS), (command, caught.value)


def test_the_fleet_itself_does_not_rule_the_server(secure: SecureRedis) -> None:
    with secure.client("fleet") as client:
        for command in RULE:
            with pytest.raises(redis.ResponseError) as caught:
                client.execute_command(*command)
            assert any(words in str(caught.value).lower() for words in REFUSALS), (command, caught.value)


def test_the_runbooks_commands_are_ones_that_their_users_may_send(secure: SecureRedis) -> None:
    page = (TOP / "docs/runbook.md").read_text()
    commands = re.findall(r"redis-cli --user (\w+) (?:--askpass )?([a-z]+(?: [a-z]+)*)", page)

    assert ("exporter", "info memory") in commands
    assert "config set" not in page
    for user, words in commands:
        with secure.client(user) as client:
            names = ["fleet:batch_0:1:head"] if words == "unlink" else []
            assert client.execute_command(*words.split(), *names) is not None
    with secure.client("fleet") as client:
        assert list(client.scan_iter(match="fleet:batch_0:*")) == []  # what --scan sends


def test_a_full_redis_that_starts_again_with_a_larger_limit_has_lost_nothing(server: str, tmp_path: Path) -> None:
    """As the runbook says; no user may change the limit of a running one."""
    names: list[str] = []
    with SecureRedis(tmp_path, environment={"REDIS_MAXMEMORY": "16mb"}) as small:
        small.wait_until_ready()
        with small.client("fleet") as client:
            with pytest.raises(redis.OutOfMemoryError):
                for number in range(64):
                    client.set(f"fleet:{number}", "x" * 1024**2)
                    names.append(f"fleet:{number}")
            assert len(names) > 1
        small.process.send(15)
        assert small.process.wait(START_S).code == 0
    with SecureRedis(tmp_path, environment={"REDIS_MAXMEMORY": "64mb"}) as large:
        large.wait_until_ready()
        with large.client("fleet") as client:
            assert client.exists(*names) == len(names)
            assert client.set("fleet:more", "x" * 1024**2)


def test_the_scaler_sees_what_is_queued_and_what_is_leased(secure: SecureRedis) -> None:
    fill(secure)
    with secure.client("fleet") as client:
        truth = [client.llen("gpu"), client.hlen("unacked"), 0]
    with secure.client("scaler") as client:
        seen = [client.eval(KEDA_LENGTH, 1, name) for name in ("gpu", "unacked", "gpu-of-nobody")]

    assert truth[0] > 0
    assert seen == truth


def test_without_a_password_there_is_no_scaler(server: str, tmp_path: Path) -> None:
    with SecureRedis(tmp_path, environment={"REDIS_SCALER_PASSWORD": ""}) as bare:
        bare.wait_until_ready()
        for password in (PASSWORDS["scaler"], ""):
            with (
                redis.Redis(
                    host="127.0.0.1", port=bare.port, username="scaler", password=password, retry=NEVER
                ) as client,
                pytest.raises(redis.AuthenticationError),
            ):
                client.ping()


@pytest.mark.parametrize("missing", ["REDIS_FLEET_PASSWORD", "REDIS_EXPORTER_PASSWORD", "REDIS_FLOWER_PASSWORD"])
def test_redis_does_not_start_without_its_passwords(server: str, tmp_path: Path, missing: str) -> None:
    with SecureRedis(tmp_path, environment={missing: ""}) as bare:
        ended = bare.process.wait(10)

    assert ended.code != 0
    assert missing in ended.stderr


# -- messages ----------------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.path,))


def pickled(task: str, queue: str, body: bytes) -> str:
    """A message as Celery sends it with `task_serializer="pickle"`."""
    return json.dumps(
        {
            "body": base64.b64encode(body).decode(),
            "content-encoding": "binary",
            "content-type": "application/x-python-serialize",
            "headers": {"lang": "py", "task": task, "id": "evil", "root_id": "evil", "argsrepr": "", "kwargsrepr": ""},
            "properties": {
                "correlation_id": "evil",
                "delivery_mode": 2,
                "delivery_info": {"exchange": "", "routing_key": queue},
                "priority": 0,
                "body_encoding": "base64",
                "delivery_tag": "evil",
            },
        }
    )


def test_a_pickled_message_is_refused_and_not_executed(secure: SecureRedis, place: Workplace, tmp_path: Path) -> None:
    """By a worker and by an aggregator, which go on."""
    fleet = start_fleet(place)
    boom = tmp_path / "boom"
    body = pickle.dumps(((), {"x": Bomb(str(boom))}, {}))
    with secure.client("fleet") as client:
        client.lpush("gpu", pickled(broker.RUN_REQUEST, "gpu", body))
        client.lpush("aggregate", pickled(broker.SEAL_SHARD, "aggregate", body))
    wait_until(lambda: all("ContentDisallowed" in each.stderr for each in fleet), START_S, "the messages are refused")
    lines = chat_lines(4)
    run = place.producer("submit", str(place.write("in.jsonl", lines)), "-o", str(place.folder / "out.jsonl"))
    for each in fleet:
        each.stop()

    assert not boom.exists()
    assert run.code == 0, run.stderr
    pickle.loads(body)  # the message would have worked
    assert boom.exists()


# -- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    folder = tmp_path_factory.mktemp("tls")
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    own, key = folder / "redis.crt", folder / "redis.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(own)],
        check=True, capture_output=True,
    )  # fmt: skip
    return own, key


@pytest.fixture(scope="module")
def encrypted(
    server: str, certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[SecureRedis, str]]:
    """A Redis that speaks TLS only, and what a URL needs to trust it."""
    own, key = certificate
    options = ("--tls-cert-file", str(own), "--tls-key-file", str(key), "--tls-auth-clients", "no")
    trust = f"?ssl_cert_reqs=required&ssl_ca_certs={own}"
    # The other one is for these tests alone: nothing else is to run on another server than the fleet would take.
    for binary in filter(None, (server, shutil.which("redis-server", path=TOOLS))):
        folder, port = tmp_path_factory.mktemp("encrypted"), free_port()
        with SecureRedis(folder, "--tls-port", str(port), *options, tls_port=port, binary=binary) as started:
            try:
                started.wait_until_ready(options=trust)
            except AssertionError as exc:
                if "Failed finding TLS support" in str(exc) or "Bad directive" in str(exc):
                    continue
                raise
            yield started, trust
            return
    pytest.skip(f"{server} was built without TLS; Debian's redis-server has it: make tools, or install that")


def test_a_batch_runs_over_tls(encrypted: tuple[SecureRedis, str], tmp_path: Path) -> None:
    secure, trust = encrypted
    lines = chat_lines(20)
    with closing(
        Workplace(
            tmp_path / "place",
            FLEET_BROKER_URL=secure.url("fleet", options=trust),
            FLEET_STORE=(tmp_path / "store").as_uri(),
            PYTHONPATH=str(TOP),
        )
    ) as place:
        fleet = start_fleet(place)
        run = place.producer("submit", str(place.write("in.jsonl", lines)), "-o", str(place.folder / "out.jsonl"))
        for each in fleet:
            each.stop()

    assert run.code == 0, run.stderr
    assert_complete(lines, (tmp_path / "place/out.jsonl").read_bytes())


@pytest.mark.parametrize("options", ["", "?ssl_cert_reqs=required"])
def test_a_certificate_that_nobody_vouches_for_is_refused(
    encrypted: tuple[SecureRedis, str], tmp_path: Path, options: str
) -> None:
    """Also without a word about certificates in the URL."""
    secure, _ = encrypted
    with closing(
        Workplace(
            tmp_path / "place",
            FLEET_BROKER_URL=secure.url("fleet", options=options),
            FLEET_STORE=tmp_path.as_uri(),
            PYTHONPATH=str(TOP),
        )
    ) as place:
        run = place.producer("submit", str(place.write("in.jsonl", chat_lines(1))))

    assert run.code == 1
    assert PASSWORDS["fleet"] not in run.stderr
    assert "no broker at" in run.stderr


def test_a_client_without_tls_gets_nothing(encrypted: tuple[SecureRedis, str]) -> None:
    secure, _ = encrypted
    with redis.Redis(host="127.0.0.1", port=secure.port, socket_timeout=3) as client, pytest.raises(redis.RedisError):
        client.ping()
