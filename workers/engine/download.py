"""One GET of a URL that a request names, so that it reaches public hosts only and ends.

Owns: connecting, redirects, and the limits on size and time. Must not know: requests, engines.
The address is judged where the socket is made, and the connection goes to that very address: a name is resolved once
for each hop, so no second answer of its server is ever used. Every redirect is judged like the first URL.
Nothing is taken from the environment (proxies, `.netrc`), nothing is sent but the GET (no cookies, no credentials), and
nothing is decompressed, so that no small answer becomes a large one.
On failure: a `Failure`. What may pass (no connection, 408, 429, 5xx, too slow, cut off) is `media_download`, which is
tried again; what stays (404, a certificate, too large) is not.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import aiohttp
from yarl import URL

from common.failures import Failure, FailureKind
from workers.engine.media import MAX_BYTES, TIMEOUT, host_of, not_public

if TYPE_CHECKING:
    from aiohttp.abc import AbstractResolver

    from workers.engine.media import Budget, MediaRules

#: Redirects that are followed.
MAX_REDIRECTS = 5

#: Downloads of a worker at the same time.
MAX_DOWNLOADS = 16

#: Seconds for one address to accept a connection.
CONNECT_S = 10.0

CHUNK_BYTES = 64 * 1024

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "batch-fleet"}


class _NotPublicError(Exception):
    """A connection to an address that is not allowed; becomes a failure and never leaves this module."""


class Downloader:
    """Fetches URLs that `MediaRules.judge` allowed. Lives on one event loop.

    `resolver` resolves names; None for the system's.
    """

    def __init__(self, rules: MediaRules, *, resolver: AbstractResolver | None = None) -> None:
        self._rules = rules
        self._resolver = resolver
        self._slots = asyncio.Semaphore(MAX_DOWNLOADS)
        self._tls: ssl.SSLContext | None = None

    async def __call__(self, url: URL, budget: Budget) -> bytes | Failure:
        """The content of a URL, or why there is none."""
        async with self._slots:
            try:
                async with asyncio.timeout(self._rules.timeout_s):
                    return await self._follow(url, budget)
            except TimeoutError:
                return _passing(url, f"was not done within {self._rules.timeout_s:g} s ({TIMEOUT})")

    async def _follow(self, url: URL, budget: Budget) -> bytes | Failure:
        for _ in range(MAX_REDIRECTS + 1):
            answer = await self._get(url, budget)
            if not isinstance(answer, str):
                return answer
            try:
                target = str(url.join(URL(answer, encoded=answer.isascii())))
            except ValueError:
                return _lasting(url, "redirected to something that is not a URL")
            judged = self._rules.judge(target)
            if isinstance(judged, Failure):
                return Failure(judged.kind, f"after a redirect of {host_of(url)}: {judged.message}")
            url = judged
        return _lasting(url, f"redirected more than {MAX_REDIRECTS} times")

    async def _get(self, url: URL, budget: Budget) -> bytes | str | Failure:
        """One hop: the content, or where it redirects to."""
        host = host_of(url)

        def make_socket(info: tuple[Any, ...]) -> socket.socket:
            family, kind, protocol, _, address = info
            if not self._rules.may_connect(host, ipaddress.ip_address(address[0])):
                raise _NotPublicError
            return socket.socket(family, kind, protocol)

        connector = aiohttp.TCPConnector(
            resolver=self._resolver,
            socket_factory=make_socket,
            # One address after the other: a race of several would take the refusal of one for a failed connection.
            happy_eyeballs_delay=None,
            force_close=True,
            ssl=self._context() if url.scheme == "https" else True,
        )
        try:
            async with (
                aiohttp.ClientSession(
                    connector=connector,
                    cookie_jar=aiohttp.DummyCookieJar(),
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                    headers=_HEADERS,
                    auto_decompress=False,
                    trust_env=False,
                ) as session,
                session.get(url, allow_redirects=False) as response,
            ):
                return await self._read(url, response, budget)
        except _NotPublicError:
            return not_public(host)
        except aiohttp.InvalidURL:
            return Failure(FailureKind.MEDIA_REFUSED, "not a URL")
        except aiohttp.ClientConnectorCertificateError:
            return _lasting(url, "has a certificate that is not valid for it")
        except aiohttp.ClientConnectorDNSError:
            return _passing(url, "could not be resolved")
        except (aiohttp.ClientError, OSError) as exc:
            # Not its message: that holds the URL.
            return _passing(url, f"could not be read ({type(exc).__name__})")

    async def _read(self, url: URL, response: aiohttp.ClientResponse, budget: Budget) -> bytes | str | Failure:
        status = response.status
        if status in _REDIRECTS:
            return response.headers.get("Location") or _lasting(url, f"answered {status} without a place to go to")
        if status != HTTPStatus.OK:
            passing = status in (408, 429) or status >= HTTPStatus.INTERNAL_SERVER_ERROR
            return (_passing if passing else _lasting)(url, f"answered {status}")
        if any(coding.lower() != "identity" for coding in response.headers.getall("Content-Encoding", ())):
            return _lasting(url, "sent compressed content that nobody asked for")
        content = bytearray()
        # What is too large by its own account is not even begun.
        fits = (response.content_length or 0) <= budget.left
        while fits and (chunk := await response.content.read(CHUNK_BYTES)):
            fits = budget.take(len(chunk))
            content += chunk
        if not fits:
            limit = f"larger than {self._rules.max_bytes} bytes ({MAX_BYTES})"
            return Failure(FailureKind.MEDIA_REFUSED, f"the media of the request are {limit}")
        return bytes(content)

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


def _passing(url: URL, what: str) -> Failure:
    return Failure(FailureKind.MEDIA_DOWNLOAD, f"the host {host_of(url)} {what}")


def _lasting(url: URL, what: str) -> Failure:
    return Failure(FailureKind.MEDIA_UNAVAILABLE, f"the host {host_of(url)} {what}")
