"""One PUT that is right to the byte, and one GET that goes on where it broke."""

from __future__ import annotations

import io
import os
import tempfile
from typing import TYPE_CHECKING

import pytest

from common.errors import OutputFailedError, SourceUnavailableError, UsageError
from producer.web import Url, check_reachable, open_url, put, shown_url
from tests.certificates import server_context
from tests.servers import free_port
from tests.webserver import Exchange, RawServer, Uploads

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB = 1024 * 1024

#: Escapes in lower case, escapes that nobody needs, a plus, an empty value, a second question mark: all must stay.
QUERY = "?X-Amz-Signature=aB%2f%3d%7E+~&empty=&&partNumber=1?x=%c3%a9'!()*"


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy of this machine."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def send(url: str, data: bytes) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        put(Url.parse(url), file, pause_s=0.01)


def get(url: str) -> bytes:
    with open_url(Url.parse(url), pause_s=0.01) as stream:
        return stream.read()


def status(code: int, *headers: str) -> Callable[[Exchange], None]:
    def answer(exchange: Exchange) -> None:
        exchange.body()
        exchange.answer(code, *headers)

    return answer


def half_then_close(exchange: Exchange) -> None:
    exchange.read(int(exchange.headers["content-length"]) // 2)
    exchange.reset()


# -- PUT ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1_000_000, 5 * MIB, 12_000_000], ids=["empty", "1 MB", "5 MiB", "12 MB"])
def test_O03_a_put_has_a_length_no_chunks_and_no_header_that_is_not_signed(size: int) -> None:
    """O03: a chunked PUT, one without a length or with a header more than is signed is refused by S3."""
    uploads, data = Uploads(), os.urandom(size)
    with RawServer(uploads) as server:
        send(f"{server.url}/bucket/a%2fb%20c{QUERY}", data)

    assert uploads.stored == [(f"/bucket/a%2fb%20c{QUERY}", data)]
    assert len(server.seen) == 1
    assert set(server.seen[0].headers) == {"host", "user-agent", "content-length"}


def test_O05_every_try_sends_the_whole_file_again() -> None:
    """O05: a retry sends the rest, or nothing, of the file. Half and a reset, then a 503, then accepted."""
    uploads, data = Uploads(), os.urandom(3 * MIB)
    with RawServer(half_then_close, status(503), uploads) as server:
        send(f"{server.url}/out", data)

    assert uploads.stored == [("/out", data)]
    assert len(server.seen) == 3


@pytest.mark.parametrize("code", [200, 201, 202, 204])
def test_any_2xx_is_success_and_there_is_exactly_one(code: int) -> None:
    uploads = Uploads(code)
    with RawServer(uploads) as server:
        send(f"{server.url}/out", b"row\n")

    assert len(uploads.stored) == len(server.seen) == 1


@pytest.mark.parametrize("code", [301, 307, 400, 403, 404, 409, 412])
def test_a_final_answer_is_not_tried_again_and_no_redirect_followed(code: int) -> None:
    uploads = Uploads()
    with (
        RawServer(status(code, "Location: /elsewhere"), uploads) as server,
        pytest.raises(OutputFailedError, match=f"the server answered {code}"),
    ):
        send(f"{server.url}/out", b"row\n")

    assert uploads.stored == []
    assert len(server.seen) == 1


@pytest.mark.parametrize("code", [429, 500, 503])
def test_what_may_pass_is_tried_five_times(code: int) -> None:
    with RawServer(status(code)) as server, pytest.raises(OutputFailedError, match=rf"tried 5 times.* {code}"):
        send(f"{server.url}/out{QUERY}", b"row\n")

    assert len(server.seen) == 5


def test_a_refusal_before_the_whole_body_is_the_reason_and_no_success() -> None:
    """A server that answers early and closes: the answer is read although sending failed; a 200 then is none."""

    def early(code: int) -> Callable[[Exchange], None]:
        def answer(exchange: Exchange) -> None:
            exchange.read(1000)
            exchange.answer(code)
            exchange.connection.shutdown(2)

        return answer

    with RawServer(early(413)) as server, pytest.raises(OutputFailedError):
        send(f"{server.url}/out", b"x" * 16 * MIB)

    uploads = Uploads()
    with RawServer(early(200), uploads) as server:
        send(f"{server.url}/out", b"x" * 16 * MIB)
    assert [len(body) for _, body in uploads.stored] == [16 * MIB]


def test_a_server_that_is_away_is_said_without_the_query() -> None:
    url = f"http://user:password@127.0.0.1:{free_port()}/out?X-Amz-Signature=secret"
    with pytest.raises(OutputFailedError) as caught:
        send(url, b"row\n")
    with pytest.raises(UsageError) as unreachable:
        check_reachable(Url.parse(url))

    for message in (str(caught.value), str(unreachable.value)):
        assert "Connection refused" in message
        assert "secret" not in message
        assert "password" not in message


def test_looking_whether_a_server_is_there_asks_it_nothing() -> None:
    with RawServer(Uploads()) as server:
        check_reachable(Url.parse(server.url))

    assert server.seen == []


def test_tls_is_spoken_and_certificates_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context, trusted = server_context(tmp_path)
    uploads = Uploads()
    with RawServer(uploads, tls=context) as server:
        with pytest.raises(UsageError, match="certificate is not valid"):
            check_reachable(Url.parse(server.url))
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
        send(f"{server.url}/out{QUERY}", b"row\n" * 1000)

    assert uploads.stored == [(f"/out{QUERY}", b"row\n" * 1000)]


def test_a_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = Uploads()
    with RawServer(uploads) as server:
        monkeypatch.setenv("http_proxy", server.url)
        send(f"http://no-such-host.invalid/out{QUERY}", b"row\n")
        monkeypatch.setenv("no_proxy", "no-such-host.invalid")
        with pytest.raises(UsageError, match="cannot be reached"):
            check_reachable(Url.parse("http://no-such-host.invalid/out"))

    assert uploads.stored == [(f"http://no-such-host.invalid/out{QUERY}", b"row\n")]


def test_a_login_in_the_url_is_sent_as_one() -> None:
    with RawServer(status(200)) as server:
        put(Url.parse(server.url.replace("//", "//me:a%40b@") + "/out"), io.BytesIO(b""))

    assert server.seen[0].headers["authorization"] == "Basic bWU6YUBi"
    assert server.seen[0].headers["host"] == f"127.0.0.1:{server.port}"


# -- GET ---------------------------------------------------------------------------------------------------------------


def test_a_get_asks_for_the_url_byte_for_byte() -> None:
    with RawServer(lambda exchange: exchange.answer(200, body=b"lines\n")) as server:
        assert get(f"{server.url}/a%2fb{QUERY}#fragment") == b"lines\n"

    assert server.seen[0].request == f"GET /a%2fb{QUERY}"
    assert set(server.seen[0].headers) == {"host", "user-agent"}


def half(data: bytes, *headers: str) -> Callable[[Exchange], None]:
    return lambda exchange: exchange.answer(200, *headers, body=data[: len(data) // 2], length=len(data))


def rest(data: bytes, start: int) -> Callable[[Exchange], None]:
    return lambda exchange: exchange.answer(
        206, f"Content-Range: bytes {start}-{len(data) - 1}/{len(data)}", body=data[start:]
    )


def test_a_download_goes_on_where_it_broke() -> None:
    data = os.urandom(2 * MIB)
    with RawServer(half(data, 'ETag: "one"'), rest(data, MIB)) as server:
        assert get(f"{server.url}/in") == data

    assert server.seen[1].headers["range"] == f"bytes={MIB}-"
    assert server.seen[1].headers["if-range"] == '"one"'


def test_a_server_without_ranges_sends_all_again_and_the_beginning_is_compared() -> None:
    data = os.urandom(2 * MIB)

    def whole(exchange: Exchange) -> None:
        exchange.answer(200, body=data)

    with RawServer(half(data), half(data), whole) as server:
        assert get(f"{server.url}/in") == data
    with (
        RawServer(half(os.urandom(2 * MIB)), whole) as server,
        pytest.raises(SourceUnavailableError, match="changed while it was read"),
    ):
        get(f"{server.url}/in")


@pytest.mark.parametrize("chunked", [True, False], ids=["cut in its chunks", "reset before its answer"])
def test_a_connection_that_breaks_is_never_the_end_of_the_input(chunked: bool) -> None:
    """Half an input would be a batch of its own."""

    def cut(exchange: Exchange) -> None:
        if chunked:
            head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            exchange.connection.sendall(head + b"4\r\nline\r\n4\r\nli")
        else:
            exchange.reset()

    with RawServer(cut) as server, pytest.raises(SourceUnavailableError, match="cannot be read"):
        get(f"{server.url}/in{QUERY}")
    assert len(server.seen) >= 5


def test_what_may_pass_is_tried_again_and_a_final_answer_is_not() -> None:
    with RawServer(
        status(503, "Retry-After: 0"), status(429), lambda exchange: exchange.answer(200, body=b"x")
    ) as server:
        assert get(f"{server.url}/in") == b"x"
    with RawServer(status(404)) as server, pytest.raises(UsageError, match="the server answered 404"):
        get(f"{server.url}/in")
    assert len(server.seen) == 1


def test_redirects_are_followed_without_the_login() -> None:
    with RawServer(lambda exchange: exchange.answer(200, body=b"x")) as other:
        with RawServer(status(302, f"Location: {other.url}/moved%2f?a=%2f")) as server:
            assert get(server.url.replace("//", "//me:secret@") + "/in") == b"x"
        assert "authorization" in server.seen[0].headers

    assert other.seen[0].target == "/moved%2f?a=%2f"
    assert "authorization" not in other.seen[0].headers


def test_redirects_end_and_never_lead_out_of_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context, trusted = server_context(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    with RawServer(status(302, "Location: /again")) as server, pytest.raises(UsageError, match="redirects"):
        get(f"{server.url}/in")
    with (
        RawServer(status(302, f"Location: {server.url}/in"), tls=context) as secure,
        pytest.raises(UsageError, match="from https to http"),
    ):
        get(f"{secure.url}/in")


# -- URLs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("https://h/p?sig=secret", "https://h/p"),
        ("https://me:secret@h:8080/p#secret", "https://h:8080/p"),
        ("https://h?sig=secret/x@y", "https://h"),
        ("https://h/a@b", "https://h/a@b"),
    ],
)
def test_a_url_for_people_holds_no_query_and_no_login(url: str, seen: str) -> None:
    assert shown_url(url) == Url.parse(url).shown == seen


@pytest.mark.parametrize("url", ["http://", "http:///p", "http://h/a b", "http://h/é", "http://h:port/", "http://[h/"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        Url.parse(url)
