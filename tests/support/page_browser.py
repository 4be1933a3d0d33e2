"""The page in Chromium: opening it, asking, waiting, and answers of one's own in place of the server's.

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

import pytest

from tests.support.running_server import until

sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install -c constraints.txt playwright")
CHROMIUM = shutil.which(os.environ.get("PENSTOCK_CHROMIUM", "chromium"))
MARKS = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install --no-install-recommends chromium"),
    pytest.mark.timeout(300),
]
TIMEOUT_MS = 30_000
CHAT = "**/v1/chat/completions"


@contextlib.contextmanager
def started() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # root has no sandbox
        yield browser
        browser.close()


@contextlib.contextmanager
def visit(browser: Any, url: str, *, may_complain: bool = False, **options: Any) -> Iterator[Any]:
    """A page in a profile of its own. At the end nothing may stand in its console."""
    said: list[str] = []
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(url)
    try:
        yield page
    finally:
        context.close()
    assert may_complain or said == [], said


def say(page: Any, text: str) -> None:
    page.fill("#say", text)
    page.press("#say", "Enter")


def answer(page: Any) -> str:
    """The text of the last answer, once it is complete."""
    page.wait_for_selector("#talk > li:last-child [data-does=again]")
    text: str = page.inner_text("#talk > li:last-child .text")
    return text


def begun(page: Any) -> None:
    """Wait for some of the last answer."""
    wait_for(page, "document.querySelector('#talk > li:last-child .text')?.textContent.length > 3")


def wait_for(page: Any, condition: str) -> None:
    """Playwright's own waits for a condition in the page are `eval`, which the policy forbids."""
    until(lambda: page.evaluate(condition), 30.0)


def foot(page: Any) -> str:
    text: str = page.inner_text("#talk > li:last-child .counts")
    return text


def turns(page: Any) -> list[str]:
    """What is said in the open conversation, one after the other."""
    said: list[str] = page.locator("#talk > li > .prose, #talk > li > .text").all_inner_texts()
    return said


def set_fields(page: Any, **fields: str) -> None:
    """Through the drawer, as a user does it. Numbers by the name of their field, all else by id."""
    page.click("#settings-open")
    for name, value in fields.items():
        control = page.locator(f"#settings [data-field={name}], #settings #{name}")
        if control.evaluate("e => e.tagName") == "SELECT":
            control.select_option(value)
        else:
            control.fill(value)
    page.keyboard.press("Escape")


def streamed(*deltas: dict[str, Any], finish: str | None = "stop") -> str:
    """The body of a stream with these deltas; with no `finish` it is cut off."""
    choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices += [{"index": 0, "delta": {}, "finish_reason": finish}] if finish else []
    return "".join(f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices)


def answer_with(page: Any, *bodies: str) -> list[dict[str, Any]]:
    """Answer chats with these streams, in place of the server; the requests' bodies are collected."""
    asked: list[dict[str, Any]] = []
    left = list(bodies)

    def fulfill(route: Any) -> None:
        asked.append(route.request.post_data_json)
        route.fulfill(body=left.pop(0), content_type="text/event-stream")

    page.route(CHAT, fulfill)
    return asked


@contextlib.contextmanager
def scripts(browser: Any, *names: str) -> Iterator[Any]:
    """An empty page with these parts of the page's script, whose functions a test can call."""
    with visit(browser, "about:blank") as page:
        folder = resources.files("penstock.engine.http.page")
        page.add_script_tag(content="\n".join(folder.joinpath(name).read_text("utf-8") for name in names))
        yield page
