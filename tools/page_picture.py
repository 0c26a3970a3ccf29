"""Draw the page of ``vitrail web`` for its documentation: ``docs/images/web-page.jpg``, by Playwright and chromium."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "web-page.jpg"
ADDRESS, PORT = "http://127.0.0.1", 8799


def main() -> None:
    """Start the page, wait until it is complete, and write the picture."""
    command = [sys.executable, "-m", "vitrail", "web", "--no-open", "--port", str(PORT)]
    with subprocess.Popen(command) as server:
        try:
            _wait()
            PICTURE.write_bytes(_picture())
        finally:
            server.terminate()


def _wait(seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(f"{ADDRESS}:{PORT}/").close()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.5)
        else:
            return


def _picture() -> bytes:
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1240, "height": 1010}, device_scale_factor=2)
        page.goto(f"{ADDRESS}:{PORT}/#image=church&value=16")
        page.wait_for_selector("canvas[data-ahead]", timeout=120_000)
        shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        browser.close()
    file = io.BytesIO()
    shot.resize((1240, 1010), Image.Resampling.LANCZOS).save(file, "JPEG", quality=86)
    return file.getvalue()


if __name__ == "__main__":
    main()
