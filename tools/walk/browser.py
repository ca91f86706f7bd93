# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven over a pipe by its own protocol (Chrome DevTools Protocol)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PATIENCE_S = 60.0
_PAUSE_S = 0.2
NO_BROWSER = "chromium: apt-get install it"
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_SIZE = (1440, 1000)


class BrowserError(Exception):
    """The browser did not do what it was told. One line."""


def find_browser() -> str | None:
    """Returns the path of Chromium, by ``UMBP_CHROMIUM`` or on ``PATH``; None: there is none."""
    given = os.environ.get("UMBP_CHROMIUM")
    return given or next(filter(None, map(shutil.which, _NAMES)), None)


class Browser:
    """One page of a browser.

    Attributes:
        problems: What the page complained about: errors on its console, exceptions, and requests
            that failed, each with where it came from.
    """

    def __init__(self, program: str) -> None:
        self.problems: list[str] = []
        self._profile = tempfile.TemporaryDirectory(prefix="umbp-browser-")
        self._process, self._requests, self._answers = _launch(program, self._profile.name)
        self._received = b""
        self._serial = 0
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        size = {"width": _SIZE[0], "height": _SIZE[1], "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def block(self, patterns: Sequence[str]) -> None:
        """Lets requests to some addresses fail, as without a network."""
        self._call("Network.setBlockedURLs", urls=list(patterns))

    def open(self, url: str) -> None:
        """Opens a page and waits until it has loaded.

        Raises:
            BrowserError: It cannot be loaded.
        """
        self.problems.clear()
        error = self._call("Page.navigate", url=url).get("errorText")
        if error:
            raise BrowserError(f"{url}: {error}")
        self.await_true("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Evaluates JavaScript in the page, and waits for it where it is a promise.

        Raises:
            BrowserError: It throws.
        """
        answer = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']['text']}")
        return answer["result"].get("value")

    def await_true(self, expression: str) -> None:
        """Waits until something is true in the page.

        Raises:
            BrowserError: It does not become true.
        """
        give_up_s = time.monotonic() + PATIENCE_S
        while not self.evaluate(expression):
            if time.monotonic() > give_up_s:
                raise BrowserError(f"has not become true: {expression}")
            time.sleep(_PAUSE_S)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Writes what the page looks like as PNG: what is visible, or the whole page."""
        taken = self._call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        """Ends the browser."""
        self._process.terminate()
        self._process.wait(PATIENCE_S)
        os.close(self._requests)
        os.close(self._answers)
        remove(self._profile, PATIENCE_S)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._serial += 1
        request: dict[str, Any] = {"id": self._serial, "method": method, "params": parameters}
        if self._session is not None:
            request["sessionId"] = self._session
        os.write(self._requests, json.dumps(request).encode() + b"\0")
        while True:
            message = self._next_message()
            if message.get("id") == self._serial:
                break
            self._note(message)
        if "error" in message:
            raise BrowserError(f"{method}: {message['error']['message']}")
        result: dict[str, Any] = message["result"]
        return result

    def _next_message(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            more = os.read(self._answers, 1 << 16)
            if not more:
                raise BrowserError("the browser has ended")
            self._received += more
        one, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        """Keeps what a page complains about."""
        parameters = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            what = details.get("exception", {}).get("description", details["text"])
            self.problems.append(f"exception: {what}")
        elif event["method"] == "Runtime.consoleAPICalled" and parameters["type"] == "error":
            said = [str(one.get("value", one.get("description"))) for one in parameters["args"]]
            self.problems.append(f"console: {' '.join(said)}")
        elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            entry = parameters["entry"]
            self.problems.append(f"{entry['text']} ({entry.get('url', 'no address')})")


def remove(folder: tempfile.TemporaryDirectory[str], patience_s: float) -> None:
    """Removes a folder into which somebody may still write for a moment.

    Chromium is several processes, and some outlive the one that was ended.

    Raises:
        OSError: It is still written to when that time has passed.
    """
    give_up_s = time.monotonic() + patience_s
    while True:
        try:
            folder.cleanup()
        except OSError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(_PAUSE_S)
        else:
            return


def _launch(program: str, profile: str) -> tuple[subprocess.Popen[bytes], int, int]:
    """Starts the browser; returns it and the ends of its pipes to write to and read from."""
    theirs_in, requests = os.pipe()
    answers, theirs_out = os.pipe()
    # The protocol wants descriptors 3 and 4: the shell moves ours there.
    script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    options = ["--headless=new", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
    if os.getuid() == 0:
        options.append("--no-sandbox")  # Chromium refuses root otherwise.
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", program, *options, f"--user-data-dir={profile}"],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    return process, requests, answers
