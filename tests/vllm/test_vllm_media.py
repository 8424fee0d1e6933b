"""The second wall in vLLM's own code: what we leave it with opens no connection, and reads what we put in place."""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import socket

import pytest

from workers.engine.media import MediaRules
from workers.engine.vllm import take_over_media

pytestmark = [
    pytest.mark.vllm,
    # vLLM, torch and transformers warn of each other's deprecations.
    pytest.mark.filterwarnings("default"),
]


def left_with() -> list[str]:
    args = argparse.Namespace(allowed_media_domains=None, allowed_local_media_path="")
    take_over_media(args, MediaRules())
    domains: list[str] = args.allowed_media_domains
    return domains


def test_vllm_refuses_a_url_that_was_overlooked(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the list that vLLM is left with it connects to nobody; without the list it does."""
    from vllm.entrypoints.launchers.run_batch import download_bytes_from_url
    from vllm.multimodal.media import MediaConnector

    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")
    monkeypatch.setenv("VLLM_IMAGE_FETCH_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/a.png"

        with pytest.raises(ValueError, match="allowed domains"):
            MediaConnector(allowed_media_domains=left_with()).fetch_image(url)
        with pytest.raises(Exception, match="allowed domains"):
            asyncio.run(download_bytes_from_url(url, allowed_media_domains=left_with()))
        with pytest.raises(BlockingIOError):
            listener.accept()

        with pytest.raises(Exception, match=r"[Tt]imed? ?out"):
            MediaConnector().fetch_image(url)
        listener.accept()[0].close()


def test_vllm_reads_what_was_put_in_place_as_it_reads_a_download(model_folder: str) -> None:
    from PIL import Image
    from vllm.entrypoints.launchers.run_batch import download_bytes_from_url
    from vllm.multimodal.media import MediaConnector

    file = io.BytesIO()
    Image.new("RGB", (2, 2), (1, 2, 3)).save(file, "PNG")
    data = f"data:application/octet-stream;base64,{base64.b64encode(file.getvalue()).decode()}"

    image = MediaConnector(allowed_media_domains=left_with()).fetch_image(data)

    assert (image.size, image.getpixel((0, 0))) == ((2, 2), (1, 2, 3))
    assert asyncio.run(download_bytes_from_url(data, allowed_media_domains=left_with())) == file.getvalue()
