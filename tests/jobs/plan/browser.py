"""A headless Chromium on two pipes: its DevTools protocol, as far as the page's tests need it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def found() -> str | None:
    """The program of a browser; none if this machine has none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def lacking() -> bool:
    """Whether tests of pages are skipped: there is no browser, and none is required by SPARING_BROWSER."""
    return found() is None and os.environ.get("SPARING_BROWSER") != "required"


class Tab:
    """One tab; every request that is made and every error of a script is kept."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._numbers, self._held = to, back, itertools.count(1), b""
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session: str | None = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    _session = None

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """The answer to one command."""
        number = next(self._numbers)
        asked = {"id": number, "method": method, "params": arguments}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        while (got := self._read()).get("id") != number:
            self._keep(got)
        assert "error" not in got, got["error"]
        answer: dict[str, Any] = got["result"]
        return answer

    def wait(self, event: str) -> None:
        """Until this event comes."""
        while (got := self._read()).get("method") != event:
            self._keep(got)

    def run(self, code: str) -> Any:
        """The value of an expression in the page."""
        got = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    def press(self, key: str) -> None:
        """A key goes down and up."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])
        self.settle()

    def settle(self) -> None:
        """Until what was asked for is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            piece = os.read(self._back, 1 << 20)
            assert piece, "the browser has gone"
            self._held += piece
        line, _, self._held = self._held.partition(b"\0")
        got: dict[str, Any] = json.loads(line)
        return got

    def _keep(self, got: dict[str, Any]) -> None:
        told = got.get("params", {})
        if got.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(told["exceptionDetails"]))
        elif got.get("method") == "Log.entryAdded" and told["entry"]["level"] in {"error", "warning"}:
            self.errors.append(told["entry"]["text"])
        elif got.get("method") == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])


KEYS = {"Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "Home": 36, "End": 35}


@contextmanager
def opened(page: Path, profile: Path) -> Iterator[Tab]:
    """A tab that shows the page."""
    program = found()
    assert program is not None, f"SPARING_BROWSER=required, and none of {', '.join(NAMES)} is here"
    ours, theirs = os.pipe(), os.pipe()
    options = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        f"--user-data-dir={profile}", "--remote-debugging-pipe",
    ]  # fmt: skip
    # the browser reads its commands from descriptor 3 and answers on 4
    ends = f'exec 3<&{theirs[0]} 4>&{ours[1]}; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", ends, "bash", program, *options], pass_fds=(theirs[0], ours[1]), stderr=subprocess.DEVNULL
    )
    os.close(theirs[0])
    os.close(ours[1])
    try:
        tab = Tab(theirs[1], ours[0])
        tab.call("Page.navigate", url=page.as_uri())
        tab.wait("Page.loadEventFired")
        yield tab
    finally:
        process.terminate()
        process.wait(30)
        os.close(theirs[1])
        os.close(ours[0])
