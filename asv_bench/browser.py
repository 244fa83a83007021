"""A headless Chromium, driven through its DevTools protocol: for looking at what is published."""

from __future__ import annotations

import base64
import functools
import http.server
import itertools
import json
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome")

#: Seconds for the browser to start, and for a command to answer.
_PATIENCE = 60.0


def find() -> str | None:
    """Chromium's path, when it is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. ``errors``: what its console was told of errors, its uncaught exceptions, and its
    requests that failed, since it was opened."""

    def __init__(self, address: str) -> None:
        self.errors: list[str] = []
        self._socket = websocket.create_connection(address, timeout=_PATIENCE)
        self._numbers = itertools.count(1)
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        """Speaks to the browser no more."""
        self._socket.close()

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol, and its answer."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            self._notice(message)

    def _notice(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                told = details.get("exception", {}).get("description", details["text"])
                self.errors.append(f"exception: {told}")
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "assert"):
                told = [str(a.get("value", a.get("description"))) for a in parameters["args"]]
                self.errors.append(f"console: {' '.join(told)}")
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                entry = parameters["entry"]
                self.errors.append(f"log: {entry['text']} {entry.get('url', '')}")
            case "Network.loadingFailed" if not parameters.get("canceled"):
                self.errors.append(f"request: {parameters['errorText']}")

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression. Raises RuntimeError where it throws."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def open(self, address: str) -> None:
        """Opens a page from the beginning, even one that differs in its fragment only."""
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def wait(self, condition: str, patience: float = 30.0) -> None:
        """Until a JavaScript expression is true; raises TimeoutError with the errors so far."""
        end = time.monotonic() + patience
        while not self.evaluate(f"Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {condition}; errors: {self.errors}")
            time.sleep(0.05)

    def show(self, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """The window's size, and whether a page is asked to be dark."""
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[theme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        # A page that is opened before the window has its size may be resized while it is made.
        self.wait(f"innerWidth === {width} && innerHeight === {height}")

    def screenshot(self, path: Path) -> None:
        """What the window shows, as a PNG."""
        shot = self.send("Page.captureScreenshot")
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser() -> Iterator[Browser]:
    """A Chromium that ends with the block, its profile with it."""
    program = find()
    assert program is not None, "Chromium is not installed"
    with tempfile.TemporaryDirectory(
        prefix="mesp-chromium-", ignore_cleanup_errors=True
    ) as profile:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        flags += ["--no-first-run", "--remote-debugging-port=0", "--remote-allow-origins=*"]
        process = subprocess.Popen(
            [program, *flags, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            page = Browser(_page_address(Path(profile) / "DevToolsActivePort", process))
            try:
                yield page
            finally:
                page.close()
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _page_address(file: Path, process: subprocess.Popen[bytes]) -> str:
    """Where its first page is spoken to; it writes the port when it is ready."""
    end = time.monotonic() + _PATIENCE
    while not (file.exists() and file.read_text().strip()):
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError("Chromium did not start")
        time.sleep(0.05)
    port = file.read_text().split()[0]
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=10) as answer:
            pages = [page for page in json.load(answer) if page["type"] == "page"]
        if pages:
            return pages[0]["webSocketDebuggerUrl"]
        if time.monotonic() > end:
            raise RuntimeError("Chromium opened no page")
        time.sleep(0.05)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The folder at an address of this machine: asv's pages load data, which files may not."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: requests are no news."""

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
