"""The page in Chromium: opening it, asking, waiting, and prepared answers in place of the server's.

Needs Chromium, which `.ci/run` installs. By hand:

    apt-get install --no-install-recommends chromium
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from importlib import resources
from typing import Any
from urllib.parse import urljoin

import pytest

from tests.support.running_server import until

sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install -c constraints.txt playwright")
CHROMIUM = shutil.which(os.environ.get("PENSTOCK_CHROMIUM", "chromium"))
MARKS = [pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install --no-install-recommends chromium")]
TIMEOUT_MS = 120_000
CHAT = "**/v1/chat/completions"


@contextlib.contextmanager
def started() -> Iterator[Any]:
    """Start Chromium, with a profile whose first page stays open: it keeps the process that renders our pages. A process
    of its own for each page costs three times as much CPU."""
    flags = ["--no-sandbox", "--process-per-site"]  # root has no sandbox
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        context = browser.new_context()
        context.new_page()
        yield context
        browser.close()


class Page:
    """An open page, with what its user does there. All else is Playwright's page."""

    def __init__(self, page: Any) -> None:
        self._page = page

    def __getattr__(self, name: str) -> Any:
        return getattr(self._page, name)

    def say(self, text: str) -> None:
        self.fill("#say", text)
        self.press("#say", "Enter")

    def answer(self) -> str:
        """Return the text of the last answer, once it is complete."""
        self.wait_for_selector("#talk > li:last-child [data-does=again]")
        return str(self.inner_text("#talk > li:last-child .text"))

    def ask(self, text: str) -> str:
        self.say(text)
        return self.answer()

    def begun(self) -> None:
        """Wait for some of the last answer."""
        self.wait_for("document.querySelector('#talk > li:last-child .text')?.textContent.length > 3")

    def wait_for(self, condition: str) -> None:
        """Wait for a condition in the page, whose elements may not be drawn yet. Playwright's own waits need `eval`."""
        until(lambda: self.evaluate(f"(() => {{ try {{ return {condition}; }} catch {{ return false; }} }})()"))

    def foot(self) -> str:
        return str(self.inner_text("#talk > li:last-child .counts"))

    def turns(self) -> list[str]:
        """Return the texts of the open conversation."""
        return list(self.locator("#talk > li > .prose, #talk > li > .text").all_inner_texts())

    def set_fields(self, **fields: str) -> None:
        """Fill in the drawer. Numbers are found by the name of their field, all else by id."""
        self.click("#settings-open")
        for name, value in fields.items():
            self.fill(f"#settings [data-field={name}], #settings #{name}", value)
        self.keyboard.press("Escape")

    def answer_with(self, *bodies: str) -> None:
        """Answer chats with these streams, in place of the server."""
        left = iter(bodies)
        self.route(CHAT, lambda route: route.fulfill(body=next(left), content_type="text/event-stream"))

    def answer_texts(self, *texts: str) -> None:
        self.answer_with(*(streamed({"content": text}) for text in texts))


@contextlib.contextmanager
def visit(browser: Any, url: str, *, may_complain: bool = False, viewport: Any = None) -> Iterator[Page]:
    """Open a page in a tab of its own, with nothing stored. At the end its console must be empty."""
    complaints: list[str] = []
    first = browser.pages[0]
    if url.startswith("http"):
        first.goto(urljoin(url, "/health"))
        first.evaluate("localStorage.clear()")
    page = browser.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    if viewport is not None:
        page.set_viewport_size(viewport)
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(url)
    try:
        yield Page(page)
    finally:
        for each in browser.pages[1:]:
            each.close()
    assert may_complain or complaints == [], complaints


def streamed(*deltas: dict[str, Any], finish: str | None = "stop") -> str:
    """Return the body of a stream with these deltas; without `finish` it is cut off."""
    choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices += [{"index": 0, "delta": {}, "finish_reason": finish}] if finish else []
    return "".join(f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices)


@contextlib.contextmanager
def scripts(browser: Any, *names: str) -> Iterator[Any]:
    """Open an empty page with these parts of the page's script, whose functions a test can call."""
    with visit(browser, "about:blank") as page:
        folder = resources.files("penstock.engine.page")
        page.add_script_tag(content="\n".join(folder.joinpath(name).read_text("utf-8") for name in names))
        yield page
