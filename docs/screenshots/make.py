"""Make the pictures of this folder: a real fleet with the echo engine, Flower beside it, a headless Chromium.

    python docs/screenshots/make.py

Needs what the tests need, and Chromium on PATH (Debian: apt-get install chromium). Not part of any check.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.invariants import chat_line
from tests.servers import FleetServers, free_port, wait_until

HERE = Path(__file__).parent
LOGIN = "operator:password"
#: The picture, its page, and after how many of the requests it is taken.
PAGES = (
    ("flower-workers.png", "/workers", 100),
    ("flower-broker.png", "/broker", 100),
    ("flower-tasks.png", "/tasks", 370),
)


def main() -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("no Chromium on PATH")
    with tempfile.TemporaryDirectory() as folder, closing(FleetServers(Path(folder) / "f", port=free_port())) as fleet:
        port = free_port()
        workers = [fleet.aggregator(), fleet.worker("--max-inflight", "32"), fleet.worker("--max-inflight", "32")]
        flower = fleet.start("flower", "-m", "workers", "flower", f"--port={port}", FLOWER_BASIC_AUTH=LOGIN)
        wait_until(lambda: all("{task} enabled" in each.stderr for each in workers), 60, "events are turned on")
        lines = [chat_line(f"r{i:05}", f"Write the number {i}.", echo={"latency_s": 0.5 + i % 7}) for i in range(400)]
        batch_id = fleet.producer("submit", str(fleet.write("in.jsonl", lines)), "--detach").stdout.decode().strip()
        for name, page, finished in PAGES:
            wait_until(lambda least=finished: fleet.finished(batch_id) >= least, 120, f"{finished} are finished")
            # Its tables are filled by scripts; virtual time lets them run to their end.
            take(browser, f"http://{LOGIN}@127.0.0.1:{port}{page}", HERE / name, Path(folder))
        wait_until(lambda: fleet.is_closed(batch_id), 60, "the batch is closed")
        assert flower.stop().code == 0


def take(browser: str, url: str, picture: Path, folder: Path) -> None:
    started = time.monotonic()
    subprocess.run(
        [
            browser,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/browser",
            "--window-size=1500,700",
            "--virtual-time-budget=8000",
            f"--screenshot={picture}",
            url,
        ],
        check=True,
        timeout=120,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with suppress(ImportError):
        from PIL import Image  # noqa: PLC0415 - comes with vLLM; without it the pictures are larger

        Image.open(picture).convert("RGB").quantize(64).save(picture, optimize=True)
    print(f"{picture.name}: {picture.stat().st_size // 1024} KiB, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
