"""Headless Chromium, driven through a pipe: opens a local page and tells how it looks and what it asked for."""

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_SECONDS = 60.0
# Asks for the flags that are broken behind their two hyphens.
BROKEN_FLAGS = """(() => {
  const broken = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), range = new Range();
  const top = (text, at) => { range.setStart(text, at); range.setEnd(text, at + 1);
    return range.getBoundingClientRect(); };
  for (let text = texts.nextNode(); text; text = texts.nextNode())
    for (const flag of text.data.matchAll(/--[a-z][a-z.-]+/g)) {
      const [before, after] = [top(text, flag.index), top(text, flag.index + 2)];
      if (before.height && after.top > before.top + before.height / 2) broken.push(flag[0]);
    }
  return broken;
})()"""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A page that was opened: the URLs that it requested but its own, what the console said, its widths in pixels, the
    colour of its background, the seconds until it was loaded and drawn, a PNG of it, and the answers to questions."""

    requests: list[str]
    console: list[str]
    width: int
    scroll_width: int
    background: str
    seconds: float
    png: bytes
    answers: list[Any]


class Browser:
    """One process of Chromium; `open` looks at a page in a new tab."""

    def __init__(self, process: "subprocess.Popen[bytes]", *, to: int, back: int) -> None:
        self._process, self._to, self._back = process, to, back
        self._data, self._number = b"", 0
        self.events: list[dict[str, Any]] = []

    def open(self, page: Path, *, width: int, is_dark: bool, asks: Sequence[str] = (), scale: float = 0.0) -> Seen:
        """The page as it is `width` pixels wide. `asks`: JavaScript whose values are the answers, one after the other.
        `scale`: draws the whole page in so many pixels for each of its own; 0: its first 900 pixels."""
        target = self._ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self._ask("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self._ask(f"{domain}.enable", {}, session)
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", metrics, session)
        media = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self._ask("Emulation.setEmulatedMedia", {"features": media}, session)
        self.events.clear()
        began = time.monotonic()
        self._ask("Page.navigate", {"url": page.as_uri()}, session)
        self._until(lambda: any(event["method"] == "Page.loadEventFired" for event in self.events))
        drawn = "new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)))"
        self._ask("Runtime.evaluate", {"expression": drawn, "awaitPromise": True}, session)
        seconds = time.monotonic() - began
        asked = [one["params"]["request"]["url"] for one in self.events if one["method"] == "Network.requestWillBeSent"]
        colour = "getComputedStyle(document.body).backgroundColor"
        words = f"JSON.stringify([innerWidth, document.documentElement.scrollWidth, {colour}])"
        found = self._value(words, session)
        answers = [self._value(f"JSON.stringify({one})", session) for one in asks]
        shown: dict[str, Any] = {"captureBeyondViewport": True}
        if scale:
            height = self._value("JSON.stringify(document.body.getBoundingClientRect().height)", session)
            shown["clip"] = {"x": 0, "y": 0, "width": width, "height": height, "scale": scale}
        png = self._ask("Page.captureScreenshot", shown, session)["data"]
        self._ask("Target.closeTarget", {"targetId": target})
        return Seen(
            requests=[url for url in asked if url != page.as_uri() and not url.startswith("data:")],
            console=self._said(),
            width=found[0],
            scroll_width=found[1],
            background=found[2],
            seconds=seconds,
            png=base64.b64decode(png),
            answers=answers,
        )

    def _said(self) -> list[str]:
        """What the console said."""
        kinds = ("Log.entryAdded", "Runtime.exceptionThrown")
        return [json.dumps(one["params"]) for one in self.events if one["method"] in kinds]

    def _value(self, expression: str, session: str) -> Any:
        """Of JavaScript that gives JSON."""
        return json.loads(self._ask("Runtime.evaluate", {"expression": expression}, session)["result"]["value"])

    def _ask(self, method: str, params: dict[str, Any], session: str = "") -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        answers: list[dict[str, Any]] = []

        def is_answered() -> bool:
            answers.extend(one for one in self.events if one.get("id") == number)
            self.events = [one for one in self.events if "method" in one]
            return bool(answers)

        self._until(is_answered)
        if "error" in answers[0]:
            raise AssertionError(f"{method}: {answers[0]['error']}")
        result: dict[str, Any] = answers[0]["result"]
        return result

    def _until(self, is_reached: Any) -> None:
        deadline = time.monotonic() + _SECONDS
        while not is_reached():
            if not select.select([self._back], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise AssertionError("Chromium does not answer")
            data = os.read(self._back, 1 << 20)
            if not data:
                raise AssertionError("Chromium has ended")
            *whole, self._data = (self._data + data).split(b"\0")
            self.events += [json.loads(one) for one in whole]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser whose profile is in `folder`, until the block ends."""
    inside_read, to = os.pipe()
    back, inside_write = os.pipe()
    # Chromium reads from descriptor 3 and writes to 4.
    words = [
        *("bash", "-c", f'exec "$@" 3<&{inside_read} 4>&{inside_write}', "bash", CHROMIUM or "chromium"),
        *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions"),
        *("--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={folder}"),
    ]
    process = subprocess.Popen(
        words,
        pass_fds=(inside_read, inside_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(inside_read)
    os.close(inside_write)
    try:
        yield Browser(process, to=to, back=back)
    finally:
        os.close(to)
        os.close(back)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
