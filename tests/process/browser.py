"""Chromium for tests, headless, driven through chromedriver's own HTTP protocol (WebDriver)."""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_ports
from tests.process.tasks import Started

CHROMIUM = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
]


class Browser:
    """A browser with one page; what it logs and asks for can be looked at."""

    def __init__(self, driver: str, profile: Path) -> None:
        (port,) = free_ports(1)
        # Chromium forgets files in the folder for temporary ones; its name is short, as a socket in it must be, and ours.
        self._scratch = tempfile.TemporaryDirectory(prefix="b")
        self._process = Started([driver, f"--port={port}"], {"TMPDIR": self._scratch.name})
        self._process.until("started successfully")
        self._address = f"http://127.0.0.1:{port}/session"
        options = {"args": [*CHROMIUM, f"--user-data-dir={profile}"]}
        logs = {"browser": "ALL", "performance": "ALL"}
        match = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": logs}
        wanted = {"capabilities": {"alwaysMatch": match}}
        self._address += "/" + self._ask("POST", "", wanted)["sessionId"]

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = json.dumps(body if body is not None else {}).encode() if method == "POST" else None
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, address: str) -> None:
        self._ask("POST", "/url", {"url": address})

    def run(self, script: str) -> Any:
        return self._ask("POST", "/execute/sync", {"script": script, "args": []})

    def until(self, script: str, timeout_s: float = 30.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if found := self.run(script):
                return found
            time.sleep(0.2)
        raise AssertionError(f"the page never came to {script}")

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def resize(self, width: int, height: int) -> None:
        """Makes the page so large, also smaller than a window can be, in the reader's wanted colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", size)

    def dress(self, scheme: str) -> None:
        """Light or dark."""
        self.command("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    def command(self, name: str, parameters: dict[str, Any]) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def console(self) -> list[str]:
        """What the page complained of since the last look."""
        entries = self._ask("POST", "/se/log", {"type": "browser"})
        return [e["message"] for e in entries if e["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """What the page asked for since the last look."""
        entries = self._ask("POST", "/se/log", {"type": "performance"})
        messages = [json.loads(e["message"])["message"] for e in entries]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def close(self) -> None:
        try:
            self._ask("DELETE", "")
        finally:
            self._process.process.terminate()
            self._process.end()
            self._scratch.cleanup()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    driver = shutil.which("chromedriver")
    if driver is None or shutil.which("chromium") is None:
        pytest.skip("needs Chromium and its driver (Debian: chromium chromium-driver)")
    browser = Browser(driver, tmp_path / "profile")
    try:
        yield browser
    finally:
        browser.close()
