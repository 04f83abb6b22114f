"""A headless Chromium for tests, driven through a pipe: no port, no driver, no library.

Chromium reads messages of its DevTools protocol from file descriptor 3 and writes to 4, each of
them JSON with a zero byte behind it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "microsoft-edge",
)
MISSING = (
    "NOT RUN in a browser: none of " + ", ".join(NAMES) + " is on PATH; "
    "install one (Debian and Ubuntu: apt-get install chromium)"
)
_SECONDS = 60.0
# Becomes the browser, with the two ends of the pipes where it looks for them.
_START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, place in zip(ends, (3, 4)):
    os.dup2(end, place)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str | None:
    """The path of a browser of the Chromium family, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a browser; ``events`` has what it told without being asked, as it came."""

    def __init__(self, command: str, profile: Path) -> None:
        to_read, self._to_browser = os.pipe()
        self._from_browser, to_write = os.pipe()
        options = (
            "--headless --remote-debugging-pipe --no-sandbox --disable-gpu --no-first-run "
            "--disable-dev-shm-usage --hide-scrollbars"
        )
        command_line = [command, *options.split(), f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(to_read), str(to_write), *command_line],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._ids = itertools.count(1)
        self._read = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        (page,) = (t["targetId"] for t in targets if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError, EOFError, TimeoutError):
            self._session = None
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._to_browser)
        os.close(self._from_browser)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a message and return its answer."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") != number:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']['message']}")
            else:
                return dict(answer["result"])

    def _message(self) -> dict[str, Any]:
        end = time.monotonic() + _SECONDS
        while b"\0" not in self._read:
            if not select.select([self._from_browser], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"the browser has said nothing for {_SECONDS:g} seconds")
            more = os.read(self._from_browser, 1 << 16)
            if not more:
                raise EOFError("the browser has ended")
            self._read += more
        raw, _, self._read = self._read.partition(b"\0")
        return dict(json.loads(raw))

    def open(self, path: Path, width: int = 1500, height: int = 1200) -> None:
        """Open a file and wait until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.readyState === 'complete' && location.protocol === 'file:'")

    def evaluate(self, expression: str) -> Any:
        """What an expression of the page comes to, as JSON carries it."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"], indent=1))
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression of the page is true."""
        end = time.monotonic() + _SECONDS
        while not self.evaluate(condition):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {condition}")
            time.sleep(0.02)

    def type_into(self, element: str, text: str) -> None:
        """Put text into the input of an id as a keyboard would, in place of what is there."""
        self.evaluate(f"document.getElementById({json.dumps(element)}).select()")
        if text:
            self.call("Input.insertText", text=text)
        else:
            for kind in ("keyDown", "keyUp"):
                self.call(
                    "Input.dispatchKeyEvent",
                    type=kind,
                    key="Delete",
                    code="Delete",
                    windowsVirtualKeyCode=46,
                )

    def click(self, selector: str) -> None:
        """Click into the middle of an element with the mouse."""
        where = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=where[0],
                y=where[1],
                button="left",
                clickCount=1,
            )
