"""Downloads of media, from real servers on loopback addresses: which hosts are reached, and that every download ends.

One loopback address stands for the Internet here (`MediaRules.public`); all others are private, as everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import ipaddress
import os
import shutil
import socket
import ssl
import subprocess
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver

from common.failures import Failure, FailureKind
from workers.engine import download as download_module
from workers.engine.download import MAX_DOWNLOADS, MAX_REDIRECTS, Downloader
from workers.engine.media import Budget, MediaRules, domains_of, is_public

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from aiohttp.abc import ResolveResult

INTERNET, PRIVATE = "127.0.0.1", "127.0.0.2"

RULES = MediaRules(timeout_s=20.0, public=lambda address: str(address) == INTERNET or is_public(address))


class Names(AbstractResolver):
    """A name server: for each name, the answers to give one after the other. The last is given for ever."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self._answers = answers
        self.asked: list[str] = []

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked.append(host)
        answers = self._answers[host.split(".", maxsplit=1)[0]]
        addresses = answers[min(self.asked.count(host), len(answers)) - 1]
        if not addresses:
            raise OSError(None, "no such name")
        return [
            {
                "hostname": host,
                "host": address,
                "port": port,
                "family": socket.AF_INET6 if ":" in address else socket.AF_INET,
                "proto": 0,
                "flags": socket.AI_NUMERICHOST,
            }
            for address in addresses
        ]

    async def close(self) -> None:
        pass


@dataclass
class Site:
    """A web server and what it was asked. Each connection is counted, also one that asks nothing."""

    port: int
    asked: list[web.Request] = field(default_factory=list)
    connections: int = 0

    def url(self, path: str = "", host: str = INTERNET) -> str:
        return f"http://{host}:{self.port}/{path}"


@contextlib.asynccontextmanager
async def serve(handler: Any = None, host: str = INTERNET, tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    listener = socket.create_server((host, 0))
    site = Site(listener.getsockname()[1])

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        site.asked.append(request)
        return await handler(request) if handler else web.Response(body=b"content")

    class Counted(web.Server):
        def __call__(self) -> Any:
            site.connections += 1
            return super().__call__()

    server = Counted(answer)
    listening = await asyncio.get_running_loop().create_server(server, sock=listener, ssl=tls)
    try:
        yield site
    finally:
        listening.close()
        await server.shutdown(1)


def status(number: int, **headers: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=number, headers=headers, body=b"s3cret answer")

    return answer


async def get(
    url: str, rules: MediaRules = RULES, resolver: AbstractResolver | None = None, budget: Budget | None = None
) -> bytes | Failure:
    judged = rules.judge(url)
    if isinstance(judged, Failure):
        return judged
    answer = await Downloader(rules, resolver=resolver)(judged, budget or Budget(rules.max_bytes))
    if isinstance(answer, Failure):
        for secret in ("s3cret", "?", "token"):
            assert secret not in answer.message
    return answer


def refused(answer: bytes | Failure) -> str:
    assert isinstance(answer, Failure), answer
    assert answer.kind is FailureKind.MEDIA_REFUSED
    return answer.message


# -- who is reached ---------------------------------------------------------------------------------------------------


def test_a_public_host_is_asked_once_and_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.3:9/")

    async def run() -> None:
        async with serve() as site:
            assert await get(site.url("a%2Fb?token=1%2B&x=&y")) == b"content"

            (request,) = site.asked
            assert request.raw_path == "/a%2Fb?token=1%2B&x=&y"
            assert request.method == "GET"
            assert set(request.headers) == {"Host", "Connection", "Accept", "Accept-Encoding", "User-Agent"}
            assert request.headers["Accept-Encoding"] == "identity"

    asyncio.run(run())


@pytest.mark.parametrize("answer", [[PRIVATE], [INTERNET, PRIVATE], [PRIVATE, INTERNET], ["::1"]])
def test_a_name_with_a_private_address_does_not_reach_it(answer: list[str]) -> None:
    async def run() -> None:
        async with serve(host=PRIVATE) as site:
            # Nobody listens on that port of the public address.
            failure = await get(site.url(host="name.example"), resolver=Names(name=[answer]))

            assert site.connections == 0
            assert "not public" in refused(failure)
            assert PRIVATE not in refused(failure)

    asyncio.run(run())


def test_the_answers_of_the_systems_resolver_are_judged_too() -> None:
    async def run() -> None:
        async with serve() as site:
            judged = replace(RULES, public=lambda _: True).judge(site.url(host="localhost"))
            assert not isinstance(judged, Failure)

            answer = await Downloader(MediaRules())(judged, Budget(100))

            assert "not public" in refused(answer)
            assert site.connections == 0

    asyncio.run(run())


def test_a_name_is_resolved_once_so_a_second_answer_changes_nothing() -> None:
    async def run() -> None:
        names = Names(name=[[INTERNET], [PRIVATE]])
        async with serve() as site:
            assert await get(site.url(host="name.example"), resolver=names) == b"content"

        assert names.asked == ["name.example"]

    asyncio.run(run())


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_to_a_private_address_is_not_followed(code: int) -> None:
    async def run() -> None:
        async with (
            serve(host=PRIVATE) as private,
            serve(status(code, Location=private.url("x?token=1", host=PRIVATE))) as site,
        ):
            answer = await get(site.url())

            assert len(site.asked) == 1
            assert private.connections == 0
            assert refused(answer).startswith(f"after a redirect of {INTERNET}: the host {PRIVATE} ")

    asyncio.run(run())


def test_a_redirect_to_a_name_with_a_private_address_is_not_followed() -> None:
    async def run() -> None:
        async with (
            serve(host=PRIVATE) as private,
            serve(status(302, Location=private.url(host="inside.example"))) as site,
        ):
            answer = await get(site.url(), resolver=Names(inside=[[PRIVATE]]))

            assert private.connections == 0
            assert "not public" in refused(answer)

    asyncio.run(run())


@pytest.mark.parametrize(
    "location", ["file:///etc/hostname", "ftp://example.com/", "http://u:p@example.com/", "http://["]
)
def test_a_redirect_to_what_is_no_such_url_is_not_followed(location: str) -> None:
    async def run() -> None:
        async with serve(status(302, Location=location)) as site:
            answer = await get(site.url())

            assert isinstance(answer, Failure)
            assert not answer.kind.retryable

    asyncio.run(run())


def test_redirects_are_followed_by_relative_urls_and_counted() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        number = int(request.rel_url.query["n"])
        if number == 0:
            return web.Response(body=b"here")
        return web.Response(status=302, headers={"Location": f"../b?n={number - 1}"})

    async def run() -> None:
        async with serve(answer) as site:
            assert await get(site.url(f"a/b?n={MAX_REDIRECTS}")) == b"here"
            assert len(site.asked) == MAX_REDIRECTS + 1

            too_many = await get(site.url(f"a/b?n={MAX_REDIRECTS + 1}"))

            assert isinstance(too_many, Failure)
            assert too_many.kind is FailureKind.MEDIA_UNAVAILABLE

    asyncio.run(run())


def test_with_names_a_redirect_to_another_host_is_not_followed() -> None:
    rules = replace(RULES, domains=domains_of([PRIVATE]))

    async def run() -> None:
        async with serve() as other, serve(status(302, Location=other.url()), host=PRIVATE) as site:
            answer = await get(site.url(host=PRIVATE), rules)

            assert len(site.asked) == 1
            assert other.connections == 0
            assert "FLEET_ALLOWED_MEDIA_DOMAINS" in refused(answer)

    asyncio.run(run())


def test_a_named_host_may_be_this_machine_if_it_is_named_by_address() -> None:
    async def run() -> None:
        async with serve(host=PRIVATE) as site:
            named = MediaRules(domains=domains_of([PRIVATE, "name.example"]))

            assert await get(site.url(host=PRIVATE), named) == b"content"
            assert "not public" in refused(await get(site.url(host="name.example"), named, Names(name=[[PRIVATE]])))

    asyncio.run(run())


def test_a_certificate_must_be_valid(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make_certificate(cert, key)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)

    async def run() -> None:
        async with serve(tls=tls) as site:
            answer = await get(site.url().replace("http:", "https:"))

            assert site.asked == []
            assert isinstance(answer, Failure)
            assert answer.kind is FailureKind.MEDIA_UNAVAILABLE
            assert "certificate" in answer.message

    asyncio.run(run())


def make_certificate(cert: Path, key: Path) -> None:
    """A certificate that nobody signed but its owner. Without openssl: skipped at a desk, failed in CI."""
    openssl = shutil.which("openssl")
    if openssl is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("no openssl")
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={INTERNET}"]
    command += ["-addext", f"subjectAltName=IP:{INTERNET}", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)


# -- that it ends -----------------------------------------------------------------------------------------------------


def test_content_may_be_as_large_as_the_limit_and_no_larger() -> None:
    async def run() -> None:
        async with serve(status(200)) as site:
            assert await get(site.url(), replace(RULES, max_bytes=13)) == b"s3cret answer"
            assert "FLEET_MEDIA_MAX_BYTES" in refused(await get(site.url(), replace(RULES, max_bytes=12)))

    asyncio.run(run())


def test_content_that_says_that_it_is_too_large_is_not_waited_for() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000000000000"})
        await response.prepare(request)
        await asyncio.Event().wait()
        return response

    async def run() -> None:
        async with serve(answer) as site:
            assert "FLEET_MEDIA_MAX_BYTES" in refused(await get(site.url(), replace(RULES, timeout_s=5.0)))

    asyncio.run(run())


def test_content_without_end_is_cut_off_at_the_limit() -> None:
    sent = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(bytes(64 * 1024))
                sent += 64 * 1024
        return response

    async def run() -> None:
        async with serve(answer) as site:
            assert "FLEET_MEDIA_MAX_BYTES" in refused(await get(site.url(), replace(RULES, max_bytes=1_000_000)))

        assert sent < 32_000_000  # what buffers of the system take

    asyncio.run(run())


def test_the_limit_is_for_all_urls_of_a_request_together() -> None:
    async def run() -> None:
        async with serve() as site:
            budget = Budget(10)

            assert await get(site.url(), budget=budget) == b"content"
            assert "FLEET_MEDIA_MAX_BYTES" in refused(await get(site.url(), budget=budget))

    asyncio.run(run())


def test_compressed_content_is_not_unpacked() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=gzip.compress(bytes(1000)), headers={"Content-Encoding": "gzip"})

    async def run() -> None:
        async with serve(answer) as site:
            failure = await get(site.url())

            assert isinstance(failure, Failure)
            assert failure.kind is FailureKind.MEDIA_UNAVAILABLE

    asyncio.run(run())


def test_no_content_encoding_hides_another() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.Response(body=gzip.compress(bytes(1000)), headers={"Content-Encoding": "identity"})
        response.headers.add("Content-Encoding", "gzip")
        return response

    async def run() -> None:
        async with serve(answer) as site:
            assert isinstance(await get(site.url()), Failure)

    asyncio.run(run())


@pytest.mark.parametrize("silent", ["at once", "after the head", "drop by drop", "over redirects"])
def test_a_slow_server_meets_the_time_limit(silent: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if silent == "over redirects":
            await asyncio.sleep(0.2)
            return web.Response(status=302, headers={"Location": "/"})
        response = web.StreamResponse()
        if silent != "at once":
            await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await asyncio.sleep(0.05)
                if silent == "drop by drop":
                    await response.write(b"x")
        return response

    async def run() -> None:
        async with serve(answer) as site:
            failure = await get(site.url(), replace(RULES, timeout_s=0.4))

            assert isinstance(failure, Failure)
            assert failure.kind is FailureKind.MEDIA_DOWNLOAD
            assert "FLEET_MEDIA_TIMEOUT_S" in failure.message

    asyncio.run(asyncio.wait_for(run(), 20))


def test_downloads_at_the_same_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    go, two = asyncio.Event(), asyncio.Event()

    async def run() -> None:
        async with serve(answer) as site:

            async def look() -> None:
                await two.wait()
                await asyncio.sleep(0.2)  # a third one would have come by now
                assert len(site.asked) == 2
                go.set()

            downloader, url = Downloader(RULES), RULES.judge(site.url())
            assert not isinstance(url, Failure)
            looking = asyncio.create_task(look())
            answers = await asyncio.gather(*(downloader(url, Budget(100)) for _ in range(6)))
            await looking

        assert answers == [b"content"] * 6

    waiting = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal waiting
        waiting += 1
        if waiting == 2:
            two.set()
        await go.wait()
        return web.Response(body=b"content")

    assert MAX_DOWNLOADS > 2
    monkeypatch.setattr(download_module, "MAX_DOWNLOADS", 2)
    asyncio.run(asyncio.wait_for(run(), 20))


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (400, FailureKind.MEDIA_UNAVAILABLE),
        (401, FailureKind.MEDIA_UNAVAILABLE),
        (403, FailureKind.MEDIA_UNAVAILABLE),
        (404, FailureKind.MEDIA_UNAVAILABLE),
        (204, FailureKind.MEDIA_UNAVAILABLE),
        (304, FailureKind.MEDIA_UNAVAILABLE),
        (302, FailureKind.MEDIA_UNAVAILABLE),  # without a Location
        (408, FailureKind.MEDIA_DOWNLOAD),
        (429, FailureKind.MEDIA_DOWNLOAD),
        (500, FailureKind.MEDIA_DOWNLOAD),
        (503, FailureKind.MEDIA_DOWNLOAD),
    ],
)
def test_an_answer_that_may_pass_is_tried_again_and_one_that_stays_is_not(code: int, kind: FailureKind) -> None:
    async def run() -> None:
        async with serve(status(code)) as site:
            answer = await get(site.url("secret-path?token=1"))

            assert isinstance(answer, Failure)
            assert answer.kind is kind
            assert answer.message == f"the host {INTERNET} answered {code}" + (
                " without a place to go to" if code == 302 else ""
            )

    asyncio.run(run())


def test_a_host_that_cannot_be_reached_may_pass() -> None:
    async def run() -> None:
        with socket.create_server((INTERNET, 0)) as listener:
            port = listener.getsockname()[1]
        unreachable = await get(f"http://{INTERNET}:{port}/?token=1")
        unknown = await get("http://name.example/?token=1", resolver=Names(name=[[]]))
        for answer in (unreachable, unknown):
            assert isinstance(answer, Failure)
            assert answer.kind is FailureKind.MEDIA_DOWNLOAD

    asyncio.run(run())


@pytest.mark.parametrize("raw", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\ncut", b"s3cret nonsense\r\n\r\n"])
def test_an_answer_that_is_cut_off_or_none_may_pass(raw: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, INTERNET, 0)
        async with server:
            failure = await get(f"http://{INTERNET}:{server.sockets[0].getsockname()[1]}/?token=1")

        assert isinstance(failure, Failure)
        assert failure.kind is FailureKind.MEDIA_DOWNLOAD

    asyncio.run(run())


def test_the_addresses_of_these_tests_are_what_they_are_taken_for() -> None:
    assert not is_public(ipaddress.ip_address(INTERNET))
    assert not RULES.public(ipaddress.ip_address(PRIVATE))
