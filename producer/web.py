"""Files by HTTP: one GET that goes on where it broke, and one PUT.

Owns: URLs as the user wrote them, connections, retries, what may be shown of a URL.
Must not know: what the files mean.
On failure: connection errors, 5xx and 429 are tried again with growing pauses, at most `TRIES` times; every other
answer is final. Nothing here repeats a query, a user or a password: they may be signatures and secrets.

The standard library's client is used since it sends a target byte for byte as it is given: urllib3 and what is built
on it rewrite percent-encodings, which breaks signatures over the text of a URL. It sends no header that we do not name.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import os
import re
import ssl
import time
import urllib.request
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING
from urllib.parse import unquote, urljoin, urlsplit

from common.errors import OutputFailedError, SourceUnavailableError, UsageError
from common.streams import TRIES, Body, ResumingStream, buffered

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Seconds for a connection, and between two signs of life of one. A server may take long to answer a large PUT.
CONNECT_S = 20.0
SILENCE_S = 300.0
#: Seconds before the second try; each later one waits twice as long, or as `Retry-After` says, up to a limit.
PAUSE_S = 1.0
MAX_PAUSE_S = 60.0

MAX_REDIRECTS = 10
_BLOCK_BYTES = 1024 * 1024
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_AGENT = "batch-fleet"


@dataclass(frozen=True, slots=True)
class Url:
    """A URL in its pieces. `target` is path and query, byte for byte."""

    scheme: str
    host: str
    port: int | None
    target: str
    login: str
    shown: str

    @classmethod
    def parse(cls, text: str) -> Url:
        """Raises `UsageError`, which shows the URL without its query and login."""
        shown = shown_url(text)
        if re.fullmatch(r"[\x21-\x7e]+", text) is None:
            raise UsageError(f"{shown}: a URL is ASCII without spaces; percent-encode everything else")
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise UsageError(f"{shown}: not a URL") from None
        if parts.scheme not in ("http", "https") or not host:
            raise UsageError(f"{shown}: not a URL with a host")
        # Not urlsplit's: it drops an empty query's question mark.
        rest = text.partition("://")[2].partition("#")[0]
        target = re.sub(r"^[^/?]*", "", rest)
        login = "" if parts.username is None else f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        return cls(parts.scheme, host, port, target if target.startswith("/") else f"/{target}", login, shown)

    def redirected(self, location: str) -> Url:
        """Where an answer's `Location` leads to. Raises `UsageError` if that is out of TLS."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = f":{self.port}" if self.port else ""
        found = Url.parse(urljoin(f"{self.scheme}://{host}{port}{self.target}", location))
        if self.scheme == "https" and found.scheme != "https":
            raise UsageError(f"{self.shown}: redirected from https to http")
        return found


def shown_url(text: str) -> str:
    """A URL for people, logs and records: without login, query and fragment."""
    scheme, _, rest = text.partition("://")
    place = re.split(r"[?#]", rest, maxsplit=1)[0]
    authority, slash, path = place.partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"


class _TransientError(Exception):
    """The server answered with a status that may pass."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the server answered {status}")


def _connection(url: Url) -> tuple[http.client.HTTPConnection, str]:
    """A connection that is not made yet, and the target to ask it for; through the environment's proxy, if any."""
    kind: type[http.client.HTTPConnection] = http.client.HTTPConnection
    options: dict[str, ssl.SSLContext] = {}
    if url.scheme == "https":
        kind, options = http.client.HTTPSConnection, {"context": ssl.create_default_context()}
    proxy = urllib.request.getproxies().get(url.scheme)
    if proxy is None or urllib.request.proxy_bypass(url.host):
        return kind(url.host, url.port, timeout=CONNECT_S, **options), url.target  # type: ignore[arg-type]
    via = Url.parse(proxy if "://" in proxy else f"http://{proxy}")
    login = _basic(via.login)
    if url.scheme == "https":
        tunnel = kind(via.host, via.port or 80, timeout=CONNECT_S, **options)  # type: ignore[arg-type]
        tunnel.set_tunnel(url.host, url.port or 443, {"Proxy-Authorization": login} if login else {})
        return tunnel, url.target
    host = f"[{url.host}]" if ":" in url.host else url.host
    port = f":{url.port}" if url.port else ""
    return http.client.HTTPConnection(via.host, via.port or 80, timeout=CONNECT_S), f"http://{host}{port}{url.target}"


def _basic(login: str) -> str:
    return "Basic " + base64.b64encode(login.encode()).decode() if login else ""


def _begin(url: Url, method: str, headers: Mapping[str, str], login: str) -> http.client.HTTPConnection:
    connection, target = _connection(url)
    try:
        connection.connect()
        connection.sock.settimeout(SILENCE_S)
        connection.putrequest(method, target, skip_accept_encoding=True)
        for name, value in {"User-Agent": _AGENT, **headers}.items():
            connection.putheader(name, value)
        if login:
            connection.putheader("Authorization", _basic(login))
        connection.endheaders()
    except BaseException:
        connection.close()
        raise
    return connection


def _may_pass(status: int) -> bool:
    return status == 429 or status >= 500


def _pause_s(response: http.client.HTTPResponse) -> float:
    """What `Retry-After` asks for, in seconds; 0 for nothing (a date is not looked at)."""
    text = response.getheader("Retry-After") or ""
    return min(float(text), MAX_PAUSE_S) if text.isdecimal() else 0.0


def reason_of(exc: Exception) -> str:
    """Why a request failed, in words that hold nothing of the URL."""
    if isinstance(exc, _TransientError):
        return str(exc)
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"its certificate is not valid ({exc.verify_message})"
    if isinstance(exc, OSError) and exc.strerror:
        return exc.strerror
    return {"TimeoutError": "timed out"}.get(type(exc).__name__, type(exc).__name__)


# -- GET ---------------------------------------------------------------------------------------------------------------


class _Download:
    """A URL as the origin of a stream."""

    broken: tuple[type[Exception], ...] = (OSError, http.client.HTTPException, _TransientError)

    def __init__(self, url: Url) -> None:
        self._url = url
        self._validator = ""
        self._seen = hashlib.sha256()
        self.size: int | None = None

    def connect(self, position: int) -> Body:
        headers = {"Range": f"bytes={position}-"} if position else {}
        if position and self._validator:
            headers["If-Range"] = self._validator
        body = _WebBody(*self._answer(headers), self._seen)
        response = body.response
        try:
            if position == 0:
                self._seen = body.seen = hashlib.sha256()
                self._remember(response)
            elif response.status == 206:
                if not (response.getheader("Content-Range") or "").startswith(f"bytes {position}-"):
                    raise self._changed()
            else:
                self._skip(body, position)
        except BaseException:
            body.close()
            raise
        return body

    def _answer(self, headers: Mapping[str, str]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        url, login = self._url, self._url.login
        for _ in range(MAX_REDIRECTS + 1):
            connection = _begin(url, "GET", headers, login)
            with contextlib.ExitStack() as closing:
                closing.callback(connection.close)
                response = closing.enter_context(connection.getresponse())
                if response.status in (200, 206):
                    closing.pop_all()
                    return connection, response
                location = response.getheader("Location")
                if response.status in _REDIRECTS and location:
                    found = url.redirected(location)
                    if (found.scheme, found.host, found.port) != (url.scheme, url.host, url.port):
                        login = ""  # it was meant for the first host
                    url = found
                    continue
                if _may_pass(response.status):
                    time.sleep(_pause_s(response))
                    raise _TransientError(response.status)
                raise UsageError(f"{self._url.shown}: the server answered {response.status}")
        raise UsageError(f"{self._url.shown}: more than {MAX_REDIRECTS} redirects")

    def _remember(self, response: http.client.HTTPResponse) -> None:
        etag = response.getheader("ETag") or ""
        self._validator = etag if etag.startswith('"') else response.getheader("Last-Modified") or ""
        self.size = response.length

    def _skip(self, body: _WebBody, amount: int) -> None:
        """Read again what was read before, and see that it is the same."""
        before, body.seen = self._seen, hashlib.sha256()
        while amount:
            data = body.read(min(amount, _BLOCK_BYTES))
            if not data:
                raise EOFError
            amount -= len(data)
        if body.seen.digest() != before.digest():
            raise self._changed()
        self._seen = body.seen

    def _changed(self) -> SourceUnavailableError:
        return SourceUnavailableError(f"{self._url.shown}: it changed while it was read")

    def lost(self, exc: Exception) -> Exception:
        return SourceUnavailableError(f"{self._url.shown} cannot be read: {reason_of(exc)}")


class _WebBody:
    """An answer's body; closing it closes the connection. `seen` is the digest of all that came."""

    def __init__(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, seen: hashlib._Hash
    ) -> None:
        self._connection = connection
        self.response = response
        self.seen = seen

    def read(self, amount: int, /) -> bytes:
        data = self.response.read(amount)
        self.seen.update(data)
        return data

    def close(self) -> None:
        self.response.close()
        self._connection.close()


def open_url(url: Url, *, pause_s: float = PAUSE_S) -> IO[bytes]:
    """What a GET answers, as a stream that goes on where it broke. Nothing is asked before the first read.

    Reading raises `SourceUnavailableError` when all tries failed, and `UsageError` for a final answer.
    """
    return buffered(ResumingStream(_Download(url), pause_s=pause_s))


# -- PUT ---------------------------------------------------------------------------------------------------------------


def check_reachable(url: Url) -> None:
    """Connect, TLS included, and ask nothing. Raises `UsageError`."""
    connection, _ = _connection(url)
    try:
        connection.connect()
    except (OSError, http.client.HTTPException) as exc:
        raise UsageError(f"{url.shown} cannot be reached: {reason_of(exc)}") from None
    finally:
        connection.close()


def put(url: Url, file: IO[bytes], *, pause_s: float = PAUSE_S) -> None:
    """Send a whole file; returns after exactly one answer 2xx. Redirects are not followed.

    The only headers are Host, User-Agent and Content-Length, as signed URLs want it. Raises `OutputFailedError`.
    """
    size = file.seek(0, os.SEEK_END)
    for attempt in range(1, TRIES + 1):
        asked_s = 0.0
        try:
            status, asked_s = _put_once(url, file, size)
        except (OSError, http.client.HTTPException) as exc:
            reason = reason_of(exc)
        else:
            if 200 <= status < 300:
                return
            reason = f"the server answered {status}"
            if not _may_pass(status):
                raise OutputFailedError(f"{url.shown}: {reason}")
        if attempt == TRIES:
            raise OutputFailedError(f"{url.shown} was not written, tried {TRIES} times: {reason}")
        time.sleep(max(pause_s * 2 ** (attempt - 1), asked_s))
    raise AssertionError("unreachable")


def _put_once(url: Url, file: IO[bytes], size: int) -> tuple[int, float]:
    file.seek(0)
    with contextlib.closing(_begin(url, "PUT", {"Content-Length": str(size)}, url.login)) as connection:
        broken: ConnectionError | None = None
        try:
            while block := file.read(_BLOCK_BYTES):
                connection.send(block)
        except ConnectionError as exc:
            # A server may refuse and close before it has read everything: its answer says more than our error.
            broken = exc
        with connection.getresponse() as response:
            if broken is not None and response.status < 300:
                raise broken
            return response.status, _pause_s(response)
