"""Which URLs of a request may be fetched, where they stand, and the request that comes out."""

from __future__ import annotations

import argparse
import asyncio
import base64
import ipaddress
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import EngineStartError, UsageError
from common.failures import Failure, FailureKind
from common.settings import WorkerSettings, load
from tests.conftest import CASES
from workers.app import media_rules
from workers.engine import Request
from workers.engine.echo import EchoEngine
from workers.engine.media import MAX_URLS, Budget, Media, MediaRules, domains_of, find_urls, is_public
from workers.engine.vllm import take_over_media

if TYPE_CHECKING:
    from yarl import URL

PUBLIC = ["8.8.8.8", "1.1.1.1", "151.101.1.69", "2606:4700::1111", "2a00:1450:4001:82b::200e"]

#: Each a kind of its own; a refusal of one must not rest on that of another.
NOT_PUBLIC = [
    "127.0.0.1",
    "127.8.9.10",
    "0.0.0.0",
    "0.1.2.3",
    "10.1.2.3",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "169.254.169.254",
    "169.254.170.2",
    "100.64.0.1",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "233.252.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::7f00:1",
    "::ffff:127.0.0.1",
    "::ffff:8.8.8.8",
    "64:ff9b::808:808",
    "64:ff9b:1::1",
    "100::1",
    "2001::1",
    "2001:20::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "2002:808:808::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%1",
    "fec0::1",
    "ff02::1",
]


def chat(*parts: Any, **body: Any) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **body}
    return json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body})


def image(url: object) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def places(line: str) -> dict[str, str]:
    return {place.name: place.text for place in find_urls(json.loads(line))}


def refusal(text: str, rules: MediaRules | None = None) -> str:
    judged = (rules or MediaRules()).judge(text)
    assert isinstance(judged, Failure), judged
    assert judged.kind is FailureKind.MEDIA_REFUSED
    return judged.message


def inline(media: Media, line: str) -> str | Failure:
    return asyncio.run(media.inline(line))


class Contents:
    """What downloads bring, by URL; counts them."""

    def __init__(self, **contents: bytes | Failure) -> None:
        self.contents = contents
        self.asked: list[str] = []

    async def __call__(self, url: URL, budget: Budget) -> bytes | Failure:
        self.asked.append(str(url))
        return self.contents[url.path.strip("/")]


# -- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_every_other_address_is_not(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@given(st.ip_addresses(v=4))
def test_no_wrapped_form_of_an_ipv4_address_is_public(address: ipaddress.IPv4Address) -> None:
    packed = address.packed
    for wrapped in (
        bytes(10) + b"\xff\xff" + packed,
        bytes(12) + packed,
        b"\x20\x02" + packed + bytes(10),
        b"\x00\x64\xff\x9b" + bytes(8) + packed,
        b"\x20\x01" + bytes(10) + packed,
    ):
        assert not is_public(ipaddress.IPv6Address(wrapped))


@pytest.mark.parametrize("address", [address for address in NOT_PUBLIC if "%" not in address])
def test_a_url_of_such_an_address_is_refused_and_names_the_setting(address: str) -> None:
    host = f"[{address}]" if ":" in address else address

    assert "FLEET_ALLOWED_MEDIA_DOMAINS" in refusal(f"http://{host}:8080/secret?token=s3cret")


# -- URLs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/a.png",
        "HTTP://EXAMPLE.COM:8080/",
        "http://bücher.example/ä",
        "http://8.8.8.8/",
        "http://a_b.c/",
    ],
)
def test_public_hosts_are_allowed_on_any_port(url: str) -> None:
    assert not isinstance(MediaRules().judge(url), Failure)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///etc/hostname", "only http:, https: and data:"),
        ("ftp://example.com/a", "only http:, https: and data:"),
        ("gopher://example.com/", "only http:, https: and data:"),
        ("//example.com/", "only http:, https: and data:"),
        ("/etc/passwd", "only http:, https: and data:"),
        ("iVBORw0KGgo=", "only http:, https: and data:"),
        ("javascript:alert(1)", "only http:, https: and data:"),
        (" http://example.com/", "a space"),
        ("http://exam\tple.com/", "a control character"),
        ("http://example.com\\@127.0.0.1/", "a backslash"),
        ("http://example.com/\r\nHost: x", "a control character"),
        ("http://example.com:x/", "not a URL"),
        ("http://example.com:99999/", "not a URL"),
        ("http://[::1", "not a URL"),
        ("http:///a", "names no host"),
        ("http://..", "names no host"),
        ("http://a..b/", "names no host"),
        ("http://%31%32%37.0.0.1/", "names no host"),
        (f"http://{'a' * 64}.example/", "names no host"),
        ("http://user:password@example.com/", "a user or a password"),
        ("http://example.com@127.0.0.1/", "a user or a password"),
        ("http://@example.com/", "a user or a password"),
    ],
)
def test_what_is_no_plain_url_of_a_host_is_refused(url: str, reason: str) -> None:
    assert reason in refusal(url)


@pytest.mark.parametrize(
    "host",
    [
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "017700000001",
        "127.1",
        "0",
        "127.0.0.1.",
        "１２７.０.０.１",
        "127。0。0。1",
    ],
)
def test_no_spelling_hides_an_address(host: str) -> None:
    """C libraries and browsers read all of these as an address of this machine."""
    assert "address" in refusal(f"http://{host}/")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "localhost.", "a.localhost", "ⓛocalhost"])
def test_this_machine_by_name_is_refused(host: str) -> None:
    assert "not public" in refusal(f"http://{host}/")


def test_a_signed_query_stays_as_it_was_written() -> None:
    url = "https://example.com/a%20b?X-Amz-Credential=A%2F1&s=%7e+%2B&s=&t"

    assert str(MediaRules().judge(url)) == url


# -- hosts that the operator names ------------------------------------------------------------------------------------


def test_with_names_only_those_are_allowed() -> None:
    rules = MediaRules(domains=domains_of(["Images.Example.COM.", "bücher.example", "8.8.8.8"]))

    for url in (
        "http://images.example.com/",
        "https://IMAGES.example.com./",
        "http://xn--bcher-kva.example/",
        "http://8.8.8.8/",
    ):
        assert not isinstance(rules.judge(url), Failure)
    for url in (
        "http://example.com/",
        "http://a.images.example.com/",
        "http://images.example.com.evil.example/",
        "http://1.1.1.1/",
    ):
        assert "FLEET_ALLOWED_MEDIA_DOMAINS" in refusal(url, rules)


@pytest.mark.parametrize("address", ["10.1.2.3", "192.168.1.1", "172.20.0.1", "100.64.0.1", "fd12::1", "8.8.8.8"])
def test_a_named_host_may_be_in_a_network_of_ones_own(address: str) -> None:
    rules = MediaRules(domains=domains_of(["minio"]))

    assert rules.may_connect("minio", ipaddress.ip_address(address))
    assert rules.may_connect("other", ipaddress.ip_address(address)) == (address == "8.8.8.8")


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "::1", "169.254.169.254", "fe80::1", "100.100.100.200", "fd00:ec2::254", "0.0.0.0", "224.0.0.1"],
)
def test_a_name_never_leads_to_this_machine_or_to_metadata(address: str) -> None:
    """A name resolves to what its owner likes; an address that the operator wrote is meant."""
    found = ipaddress.ip_address(address)

    assert not MediaRules(domains=domains_of(["minio"])).may_connect("minio", found)
    assert MediaRules(domains=domains_of([address])).may_connect(address, found)


def test_localhost_may_be_named() -> None:
    rules = MediaRules(domains=domains_of(["localhost"]))

    assert rules.may_connect("localhost", ipaddress.ip_address("127.0.0.1"))
    assert not rules.may_connect("localhost", ipaddress.ip_address("169.254.169.254"))
    assert not isinstance(rules.judge("http://localhost:9000/"), Failure)


@pytest.mark.parametrize("name", ["http://a", "a:80", "a/b", "*.example.com", "", "a b", "..", "user@a"])
def test_what_is_no_host_cannot_be_named(name: str) -> None:
    with pytest.raises(ValueError, match="is not the name of a host"):
        domains_of([name])


# -- places -----------------------------------------------------------------------------------------------------------

U = "http://example.com/u"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": U}},
        {"type": "image_url", "image_url": U},
        {"image_url": U},
        {"type": "input_image", "image_url": U, "detail": "auto"},
        {"type": "audio_url", "audio_url": {"url": U}},
        {"audio_url": U},
        {"type": "video_url", "video_url": {"url": U}},
        {"video_url": U},
        # vLLM does not look at `type` when there is a `uuid`.
        {"type": "text", "text": "t", "uuid": "1", "image_url": {"url": U}},
        {"type": "input_file", "file_url": U},
    ],
)
@pytest.mark.parametrize("name", ["messages", "input", "data_1", "text_2", "queries", "query", "documents", "items"])
def test_a_url_is_found_in_all_that_holds_content(part: dict[str, Any], name: str) -> None:
    for content in (
        {"content": [part]},
        [{"role": "user", "content": [{"type": "text", "text": "t"}, part]}],
        [[part]],
    ):
        request = {"url": "/x", "body": {"model": "m", name: content}}

        assert [place.text for place in find_urls(request)] == [U]


def test_places_are_named_as_people_find_them() -> None:
    line = chat({"type": "text", "text": "t"}, image(U), file_url="http://b.example/")

    assert places(line) == {"file_url": "http://b.example/", "messages.0.content.1.image_url": U}


def test_what_is_never_fetched_is_no_place() -> None:
    """Data, empty values, and URLs in schemas, tools, metadata and texts."""
    other = {"image_url": {"url": U}}
    line = chat(
        image("data:image/png;base64,AA"),
        image("DATA:image/png;base64,AA"),
        image(""),
        image(None),
        {"type": "text", "text": f'{{"image_url": "{U}"}}'},
        tools=[other],
        response_format=other,
        metadata=other,
        chat_template_kwargs=other,
    )

    assert places(line) == {}
    assert inline(Media(), line) == line


# -- the request that comes out ---------------------------------------------------------------------------------------


def test_contents_stand_in_the_place_of_their_urls_and_nothing_else_changes() -> None:
    download = Contents(a=b"\x00first", b=b"")
    more = {"n": 1, "temperature": 0.10, "seed": 2**63 - 1, "x": None, "name": "é\u2028\ud83d\ude00"}
    parts = [image("http://example.com/a"), {"image_url": "http://example.com/b"}, image("http://example.com/a")]
    line = chat(*parts, image("data:image/png;base64,AA"), **more)

    changed = inline(Media(download=download), line)

    assert isinstance(changed, str)
    expected = json.loads(line)
    first = "data:application/octet-stream;base64," + base64.b64encode(b"\x00first").decode()
    content = expected["body"]["messages"][0]["content"]
    content[0]["image_url"]["url"] = content[2]["image_url"]["url"] = first
    content[1]["image_url"] = "data:application/octet-stream;base64,"
    assert json.loads(changed) == expected
    assert list(json.loads(changed)["body"]) == list(expected["body"])
    assert sorted(download.asked) == ["http://example.com/a", "http://example.com/b"]


def test_a_request_without_urls_comes_back_byte_for_byte() -> None:
    for line in ('{"a":  1.50, "b_url": "x"}', chat({"type": "text", "text": "t"}), 'no JSON _url"', '["image_url"]'):
        assert inline(Media(download=Contents()), line) is line


def test_a_number_that_is_not_finite_is_left_to_the_engine() -> None:
    line = chat(image("http://example.com/a"), temperature=0).replace('"temperature": 0', '"temperature": 1e400')

    assert inline(Media(download=Contents(a=b"a")), line) is line


def test_escapes_in_a_key_hide_no_url() -> None:
    line = chat({"image_url": "http://127.0.0.1/"}).replace("image_url", "image\\u005furl")

    assert isinstance(inline(Media(), line), Failure)


def test_of_repeated_keys_the_engine_sees_the_one_that_was_judged() -> None:
    line = chat(image("http://example.com/a")).replace('"url": "http', '"url": "http://127.0.0.1/", "url": "http')

    changed = inline(Media(download=Contents(a=b"a")), line)

    assert isinstance(changed, str)
    assert "127.0.0.1" not in changed


def test_one_refused_url_refuses_the_request_before_anything_is_fetched() -> None:
    download = Contents(a=b"a")

    failure = inline(Media(download=download), chat(image("http://example.com/a"), image("http://10.0.0.1/x?token=1")))

    assert isinstance(failure, Failure)
    assert failure.message.startswith("messages.0.content.1.image_url: the host 10.0.0.1 ")
    assert "token" not in failure.message
    assert download.asked == []


def test_a_failure_that_stays_is_told_before_one_that_may_pass() -> None:
    passing, lasting = Failure(FailureKind.MEDIA_DOWNLOAD, "p"), Failure(FailureKind.MEDIA_UNAVAILABLE, "l")
    media = Media(download=Contents(p=passing, l=lasting))
    parts = [image("http://example.com/p"), image("http://example.com/l")]

    assert inline(media, chat(*parts)) == Failure(FailureKind.MEDIA_UNAVAILABLE, "messages.0.content.1.image_url: l")
    assert inline(media, chat(parts[0])) == Failure(FailureKind.MEDIA_DOWNLOAD, "messages.0.content.0.image_url: p")


def test_the_urls_of_a_request_are_counted() -> None:
    urls = [image(f"http://example.com/{number}") for number in range(MAX_URLS + 1)]

    assert inline(Media(), chat(*urls[:-1])) == chat(*urls[:-1])
    assert "different URLs" in inline(Media(), chat(*urls)).message  # type: ignore[union-attr]


def test_local_files_are_left_to_an_engine_that_was_given_a_folder() -> None:
    line = chat(image("file:///srv/a.png"))

    assert inline(Media(MediaRules(local_files=True)), line) == line
    assert isinstance(inline(Media(), line), Failure)


# -- engines ----------------------------------------------------------------------------------------------------------


def test_the_replay_case_is_refused_without_a_connection() -> None:
    lines = (CASES / "I27.jsonl").read_text().splitlines()
    answers = {json.loads(line)["custom_id"]: inline(Media(download=Contents()), line) for line in lines}

    refused = {name for name, answer in answers.items() if isinstance(answer, Failure)}
    assert refused == {"au-meta", "au-loop", "au-file"}


def echo(line: str, media: MediaRules | None = None) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(asyncio.run(EchoEngine("m", media=media).run(Request(line))).row)
    return row


def test_echo_refuses_what_vllm_refuses_and_fetches_nothing() -> None:
    """A file that is tried on echo first meets the same refusals; echo has no need of the content."""
    refused = echo(chat(image("http://169.254.169.254/latest?token=1")))

    assert refused["response"]["status_code"] == 400
    assert refused["error"]["code"] == "media_refused"
    assert "token" not in json.dumps(refused)
    assert echo(chat({"type": "text", "text": "hi"}, image("http://example.com/a")))["error"] is None
    only = MediaRules(domains=domains_of(["a.example"]))
    assert "FLEET_ALLOWED_MEDIA_DOMAINS" in echo(chat(image("http://example.com/a")), only)["error"]["message"]


def test_settings_become_rules() -> None:
    defaults = media_rules(load(WorkerSettings))
    settings = load(WorkerSettings, allowed_media_domains="A.example, 10.0.0.1", media_max_bytes=5, media_timeout_s=2)

    assert defaults == MediaRules()
    assert media_rules(settings) == MediaRules(domains=frozenset({"a.example", "10.0.0.1"}), max_bytes=5, timeout_s=2)


def test_a_setting_that_names_no_host_is_refused_at_start() -> None:
    with pytest.raises(UsageError, match="FLEET_ALLOWED_MEDIA_DOMAINS: 'http://a' is not"):
        media_rules(load(WorkerSettings, allowed_media_domains="b,http://a"))


def flags(domains: list[str] | None = None, path: str = "") -> argparse.Namespace:
    return argparse.Namespace(allowed_media_domains=domains, allowed_local_media_path=path)


def test_vllm_is_left_without_a_host_to_fetch_from() -> None:
    for args in (flags(), flags([]), flags(["a.example"])):
        take_over_media(args, MediaRules())

        (left,) = args.allowed_media_domains
        assert left.endswith(".invalid")  # RFC 6761: no such name is ever resolved


def test_vllms_own_flags_win() -> None:
    setting = MediaRules(domains=domains_of(["a.example"]))

    assert take_over_media(flags(), setting) == setting
    assert take_over_media(flags(["B.example"]), setting).domains == {"b.example"}
    assert not take_over_media(flags(), setting).local_files
    assert take_over_media(flags(path="/srv"), setting).local_files
    with pytest.raises(EngineStartError, match="--allowed-media-domains: 'http://b' is not"):
        take_over_media(flags(["http://b"]), setting)
