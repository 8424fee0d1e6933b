"""URLs inside requests: where they stand, which may be fetched, and the request with their content in their place.

A batch file may come from somebody else, and a URL in it is fetched from the worker's place in the network. So engines
never open a connection for a request: what may be fetched is fetched here (by `download.py`), and the engine is handed
the same request with `data:` URLs. Whatever is not plainly allowed is refused.
Owns: the rules, and the places of a body from which vLLM fetches. Must not know: HTTP, engines, Celery.
On failure: a `Failure`, whose message names the place, the host and the setting, and never a path, a query or an
address that a name resolved to.

What was read in vLLM 0.30, 0.32 and 0.33 (where `MM_PARSER_MAP` is; `entrypoints/launchers/run_batch.py`;
`multimodal/media/`): a content part's URL is taken from `image_url`, `audio_url` or `video_url`, as a string or as
`{"url": …}`, whatever its `type` says; audio requests have `file_url`; `data:` in any case of letters is decoded and
never fetched; and bytes that come as `application/octet-stream` are read as those of a download are.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import re
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pydantic_core import from_json, to_json
from yarl import URL

from common.batch import has_nonfinite_number
from common.failures import Failure, FailureKind, cut
from workers.engine import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Address = ipaddress.IPv4Address | ipaddress.IPv6Address

#: The setting, as messages name it. vLLM's flag means the same.
ALLOWED_DOMAINS = "FLEET_ALLOWED_MEDIA_DOMAINS"
MAX_BYTES = "FLEET_MEDIA_MAX_BYTES"
TIMEOUT = "FLEET_MEDIA_TIMEOUT_S"

#: Fields of a body that hold content: of chat, responses, embeddings, score and rerank.
CONTENT_FIELDS = (
    "messages",
    "input",
    "data_1",
    "data_2",
    "text_1",
    "text_2",
    "queries",
    "query",
    "documents",
    "items",
)

#: Keys whose value is fetched, wherever they stand in content.
URL_KEYS = frozenset({"image_url", "audio_url", "video_url", "file_url"})

#: A line without a match has none of these keys: they may be written with escapes, but only of ASCII characters.
_MAY_HOLD_URL = re.compile(r'_url"|\\u00[2-7]')

#: Most different URLs of one request.
MAX_URLS = 256

#: What a URL must not contain: parsers differ over it, and nobody needs it.
_ODD_CHARACTERS = re.compile(r"[\x00-\x20\x7f\\]")

#: A host's name, in lower case and IDNA, without a final dot.
_HOST_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")

#: Never public, whatever the version of Python thinks of them: what wraps an IPv4 address (6to4, Teredo), addresses of
#: protocols, and the Azure host that serves its machines.
_NEVER_PUBLIC = tuple(
    ipaddress.ip_network(network)
    for network in (
        "168.63.129.16/32",
        "192.0.0.0/24",
        "192.88.99.0/24",
        "2001::/23",
        "2002::/16",
    )
)

#: Of IPv6, only this is handed out for use in the Internet. Mapped addresses and those of NAT64 lie outside.
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")

#: Where a host that the operator named may be: networks of one's own.
_OWN_NETWORKS = tuple(
    ipaddress.ip_network(network)
    for network in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
)

_LOOPBACK = ipaddress.ip_address("127.0.0.1")

#: Addresses of such networks under which clouds give out credentials.
_METADATA = frozenset(ipaddress.ip_address(address) for address in ("100.100.100.200", "fd00:ec2::254"))


# -- the rules --------------------------------------------------------------------------------------------------------


def is_public(address: Address) -> bool:
    """Whether an address is one of the Internet's: of no network of one's own, of no machine's own, of no group."""
    if isinstance(address, ipaddress.IPv6Address) and address not in _GLOBAL_UNICAST:
        return False
    return address.is_global and not address.is_multicast and not any(address in network for network in _NEVER_PUBLIC)


@dataclass(frozen=True, slots=True)
class MediaRules:
    """What may be fetched for a request. `domains`: only these hosts; None for every public one.

    `max_bytes` is for all URLs of a request together, `timeout_s` for each. `local_files` leaves `file:` URLs to vLLM,
    which confines them to its `--allowed-local-media-path`.
    """

    domains: frozenset[str] | None = None
    max_bytes: int = 128 * 1024 * 1024
    timeout_s: float = 60.0
    local_files: bool = False
    #: Which addresses anybody may be sent to.
    public: Callable[[Address], bool] = is_public

    def may_connect(self, host: str, address: Address) -> bool:
        """Whether a connection to this address may be opened for a URL of this host.

        A host that the operator named may be in a network of one's own; loopback and link-local addresses, where
        metadata services are, only if the entry is that very address (or `localhost`): names resolve to what their
        owner likes.
        """
        if self.public(address):
            return True
        if self.domains is None or host not in self.domains:
            return False
        if host == str(address) or (host == "localhost" and address.is_loopback):
            return True
        return address not in _METADATA and any(address in network for network in _OWN_NETWORKS)

    def judge(self, text: str) -> URL | Failure:
        """The URL, if its scheme, its host's name and its literal address are allowed."""
        try:
            url = url_of(text)
        except ValueError as exc:
            return _refused(str(exc))
        host = host_of(url)
        if self.domains is not None and host not in self.domains:
            return _refused(f"the host {host} is not one of those that {ALLOWED_DOMAINS} names")
        if _is_odd_address(host):
            return _refused(f"the host {host} is an address in a form that hides it")
        address = _LOOPBACK if host == "localhost" or host.endswith(".localhost") else _address(host)
        if address is not None and not self.may_connect(host, address):
            return not_public(host)
        return url


def not_public(host: str) -> Failure:
    """The refusal of a host that is no public one, or has an address that is none."""
    return _refused(
        f"the host {host} has an address that is not public; only a host that {ALLOWED_DOMAINS} names may have one"
    )


def url_of(text: str) -> URL:
    """Read a URL that could be fetched. One in ASCII is sent as it was written: its query may be signed.

    Raises `ValueError` with what is wrong with it.
    """
    if _ODD_CHARACTERS.search(text):
        raise ValueError("the URL has a space, a control character or a backslash in it")
    try:
        url = URL(text, encoded=text.isascii())
        host, named = host_of(url), url.raw_authority
        url.port  # noqa: B018 - read from the text only now; ValueError
    except ValueError:
        raise ValueError("not a URL") from None
    if url.scheme not in ("http", "https"):
        raise ValueError("only http:, https: and data: URLs are taken")
    if "@" in named:
        raise ValueError("the URL must not hold a user or a password")
    if _address(host) is None and _HOST_NAME.fullmatch(host) is None:
        raise ValueError("the URL names no host")
    return url


def host_of(url: URL) -> str:
    """The host of a URL in the form in which rules name it: lower case, IDNA, no final dot; an address as Python's."""
    host = (url.raw_host or "").lower().rstrip(".")
    address = _address(host)
    return host if address is None else str(address)


def domains_of(names: Iterable[str]) -> frozenset[str]:
    """Hosts that somebody named, in the form of `host_of`. Raises `ValueError` for what is no host."""
    found = set()
    for name in names:
        bare = name.strip().rstrip(".")
        address = _address(bare.removeprefix("[").removesuffix("]"))
        host = str(address) if address is not None else _host_name(bare)
        if not host:
            raise ValueError(f"{name!r} is not the name of a host: write it without scheme, port, path or wildcard")
        found.add(host)
    return frozenset(found)


def _host_name(text: str) -> str:
    """A host's name in the form of `host_of`; empty for what is none."""
    try:
        return host_of(url_of(f"http://{text}")) if re.fullmatch(r"[\w.-]+", text) else ""
    except ValueError:
        return ""


def _address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_odd_address(host: str) -> bool:
    """Whether a host is an IPv4 address in one of the forms that C libraries read: 2130706433, 0x7f.1, 127.1."""
    try:
        socket.inet_aton(host)
    except OSError:
        return False
    return _address(host) is None


def _refused(message: str) -> Failure:
    return Failure(FailureKind.MEDIA_REFUSED, message)


# -- the places -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """A URL in a body: `holder[key]`, and how to tell people where that is."""

    holder: dict[str, Any]
    key: str
    name: str

    @property
    def text(self) -> str:
        """The URL, as the request has it."""
        return str(self.holder[self.key])


def find_urls(request: dict[str, Any]) -> list[Place]:
    """The places of a request from which vLLM would fetch: every URL but `data:`, and empty ones."""
    body = request.get("body")
    if not isinstance(body, dict):
        return []
    places = [Place(body, "file_url", "file_url")] if _is_url(body.get("file_url")) else []
    for name in CONTENT_FIELDS:
        if name in body:
            places.extend(_walk(body[name], name))
    return places


def _walk(content: Any, name: str) -> Iterator[Place]:
    stack = [(content, name)]
    while stack:
        node, path = stack.pop()
        if isinstance(node, list):
            stack.extend((item, f"{path}.{index}") for index, item in reversed(list(enumerate(node))))
        elif isinstance(node, dict):
            for key, value in node.items():
                if key in URL_KEYS and _is_url(value):
                    yield Place(node, key, f"{path}.{key}")
                elif key in URL_KEYS and isinstance(value, dict) and _is_url(value.get("url")):
                    yield Place(value, "url", f"{path}.{key}")
                else:
                    stack.append((value, f"{path}.{cut(key, 100)}"))


def _is_url(value: object) -> bool:
    return isinstance(value, str) and value != "" and value[:5].lower() != "data:"


# -- fetching ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Budget:
    """How many bytes the URLs of a request may still bring, all together."""

    left: int

    def take(self, count: int) -> bool:
        """Whether there was room for so many more."""
        self.left -= count
        return self.left >= 0


class Download(Protocol):
    """What fetches one URL that was judged."""

    async def __call__(self, url: URL, budget: Budget) -> bytes | Failure:
        """The content, or why there is none."""


@dataclass(frozen=True, slots=True)
class Media:
    """The media of requests under one set of rules.

    Without `download` nothing is fetched: requests are judged, and come back as they are.
    """

    rules: MediaRules = field(default_factory=MediaRules)
    download: Download | None = None

    async def admit(self, request: Request) -> Request | Failure:
        """The request as an engine may have it (see `inline`), or why none may."""
        line = await self.inline(request.line)
        if isinstance(line, Failure):
            return line
        return request if line is request.line else Request(line, request.calls)

    async def inline(self, line: str) -> str | Failure:
        """The request line with the content of every URL in its place, or why that cannot be.

        A line without such URLs comes back as it is, also one that is no request: that is for the engine to say.
        """
        request, places = self._find(line)
        if not places:
            return line
        wanted = self._judge(places)
        if isinstance(wanted, Failure):
            return wanted
        if self.download is None:
            return line
        contents = await self._fetch(self.download, wanted)
        if isinstance(contents, Failure):
            return contents
        # Megabytes of base64 and JSON would hold the loop.
        return await asyncio.to_thread(_put_in, request, places, contents)

    def _find(self, line: str) -> tuple[Any, list[Place]]:
        # A number that is not finite would not outlive being written again; engines refuse such a line.
        if _MAY_HOLD_URL.search(line) is None or has_nonfinite_number(line):
            return None, []
        try:
            request = from_json(line)
        except ValueError:
            return None, []
        found = find_urls(request) if isinstance(request, dict) else []
        if self.rules.local_files:
            found = [place for place in found if place.text[:5].lower() != "file:"]
        return request, found

    def _judge(self, places: list[Place]) -> dict[str, tuple[Place, URL]] | Failure:
        """Each different URL with the first place of it, if all are allowed."""
        wanted: dict[str, tuple[Place, URL]] = {}
        for place in places:
            if place.text in wanted:
                continue
            judged = self.rules.judge(place.text)
            if isinstance(judged, Failure):
                return _at(place, judged)
            if len(wanted) == MAX_URLS:
                return _at(place, _refused(f"more than {MAX_URLS} different URLs in a request"))
            wanted[place.text] = place, judged
        return wanted

    async def _fetch(self, download: Download, wanted: dict[str, tuple[Place, URL]]) -> dict[str, bytes] | Failure:
        budget = Budget(self.rules.max_bytes)
        answers = await asyncio.gather(*(download(url, budget) for _, url in wanted.values()))
        contents: dict[str, bytes] = {}
        failed: list[Failure] = []
        for (text, (place, _)), answer in zip(wanted.items(), answers, strict=True):
            if isinstance(answer, Failure):
                failed.append(_at(place, answer))
            else:
                contents[text] = answer
        # One that stays decides: trying again would not help.
        return min(failed, key=lambda failure: failure.kind.retryable) if failed else contents


def _at(place: Place, failure: Failure) -> Failure:
    return Failure(failure.kind, f"{place.name}: {failure.message}")


def _put_in(request: dict[str, Any], places: list[Place], contents: dict[str, bytes]) -> str:
    encoded = {
        text: f"data:application/octet-stream;base64,{base64.b64encode(content).decode('ascii')}"
        for text, content in contents.items()
    }
    for place in places:
        if (data := encoded.get(place.text)) is not None:
            place.holder[place.key] = data
    return to_json(request).decode("utf-8")
