"""Sound by URL on a real model: what the worker fetches is answered as the same sound that came as `data:`."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import os
import socket
import struct
import threading
import wave
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from common.failures import FailureKind
from tests.rows import parse_row, same_row
from tests.vllm_flags import SMALL
from workers.engine import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from workers.engine import Reply

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    # vLLM, torch and transformers warn of each other's deprecations.
    pytest.mark.filterwarnings("default"),
]


def tone() -> bytes:
    """A second of a tone: what the model hears in it does not matter."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16_000)
        sound.writeframes(b"".join(struct.pack("<h", int(8000 * math.sin(k / 6))) for k in range(16_000)))
    return file.getvalue()


SOUND = tone()


@pytest.fixture(scope="module")
def ask(loop: Any) -> Iterator[Callable[[list[str]], list[Reply]]]:
    """Transcribe by URL, on an engine that may fetch from one address."""
    from workers.engine.vllm import VllmEngine

    folder = os.environ.get("FLEET_TEST_SPEECH_MODEL", "")
    if not (Path(folder) / "config.json").is_file():
        reason = "FLEET_TEST_SPEECH_MODEL names no model folder"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    before = dict(os.environ)
    engine = VllmEngine(folder, (*SMALL, "--allowed-media-domains", "127.0.0.1"))
    loop.run(engine.start(), timeout_s=180)

    def run(urls: list[str]) -> list[Reply]:
        async def together() -> list[Reply]:
            return await asyncio.gather(*(engine.run(Request(transcribe(url))) for url in urls))

        replies: list[Reply] = loop.run(together(), timeout_s=120)
        return replies

    yield run
    loop.run(engine.stop())
    os.environ.clear()
    os.environ.update(before)


def transcribe(url: str) -> str:
    body = {"model": "test-model", "file_url": url, "language": "en", "temperature": 0}
    return json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/audio/transcriptions", "body": body})


class Files(BaseHTTPRequestHandler):
    """Serves the sound, and a redirect to it."""

    def do_GET(self) -> None:
        moved = self.path.startswith("/moved")
        self.send_response(302 if moved else 200)
        self.send_header("Content-Length", "0" if moved else str(len(SOUND)))
        if moved:
            self.send_header("Location", "/tone.wav?key=s3cret")
        self.end_headers()
        if not moved:
            self.wfile.write(SOUND)

    def log_message(self, *_: object) -> None:
        pass


def test_sound_by_url_is_what_it_is_as_data(ask: Callable[[list[str]], list[Reply]]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        base = f"http://127.0.0.1:{server.server_port}"
        data = "data:audio/wav;base64," + base64.b64encode(SOUND).decode()
        given, fetched, moved = ask([data, f"{base}/tone.wav?key=s3cret", f"{base}/moved"])
        server.shutdown()
        thread.join(10)

    assert [reply.failure for reply in (given, fetched, moved)] == [None] * 3
    assert same_row(given.row, fetched.row)
    assert same_row(given.row, moved.row)


def test_sound_from_elsewhere_is_refused_by_the_settings_name(ask: Callable[[list[str]], list[Reply]]) -> None:
    with socket.create_server(("127.0.0.2", 0)) as listener:
        listener.setblocking(False)
        here = f"http://127.0.0.2:{listener.getsockname()[1]}/a?key=s3cret"
        replies = ask([here, "http://169.254.169.254/latest/meta-data/", "file:///etc/hostname"])
        with pytest.raises(BlockingIOError):
            listener.accept()

    assert {reply.failure for reply in replies} == {FailureKind.MEDIA_REFUSED}
    messages = [parse_row(reply.row)["error"]["message"] for reply in replies]
    assert all("FLEET_ALLOWED_MEDIA_DOMAINS" in message for message in messages[:2])
    assert not any("s3cret" in message for message in messages)
