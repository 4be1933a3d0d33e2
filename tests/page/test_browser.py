"""The pages in a real browser: what their user sees, presses and reads.

Needs Chromium, which `.ci/run` installs. By hand:

    apt-get install --no-install-recommends chromium
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.engine.messages import Stats
from penstock.executor.protocol import ExpertUpdate
from tests.support.default_model import default_model
from tests.support.fake_engine import FakeEngine
from tests.support.router_fleet import running_router
from tests.support.router_stub import stub
from tests.support.running_server import Running, running, until

sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install -c constraints.txt playwright")
CHROMIUM = shutil.which(os.environ.get("PENSTOCK_CHROMIUM", "chromium"))
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install --no-install-recommends chromium"),
    pytest.mark.timeout(300),
]
TIMEOUT_MS = 30_000
HOSTILE = '<img src=x onerror="window.broken=1"><script>window.broken=1</script><b>x</b>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
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
    assert may_complain or said == []


def say(page: Any, text: str) -> None:
    page.fill("#say", text)
    page.press("#say", "Enter")


def answer(page: Any) -> str:
    """The text of the last answer, once it is complete."""
    page.wait_for_selector("#talk li:last-child [data-does=again]")
    text: str = page.inner_text("#talk li:last-child .text")
    return text


def wait_for(page: Any, condition: str) -> None:
    """Playwright's own waits for a condition in the page are `eval`, which the policy forbids."""
    until(lambda: page.evaluate(condition), 30.0)


def foot(page: Any) -> str:
    text: str = page.inner_text("#talk li:last-child .counts")
    return text


@pytest.fixture(scope="module")
def model() -> Iterator[Running]:
    with default_model() as server:
        yield server


@pytest.fixture
def slow() -> Iterator[Running]:
    with running(FakeEngine(delay_s=0.02)) as server:
        yield server


def test_a_question_is_answered_by_the_default_model_with_its_counts_and_again_when_asked(
    browser: Any, model: Running
) -> None:
    with visit(browser, model.url) as page:
        page.fill("[data-field=temperature]", "0")
        page.fill("#system", "You answer in one short sentence.")
        say(page, "What is the capital of France?")
        first = answer(page)
        assert "Paris" in first
        assert re.fullmatch(r"\d+ tokens in(, \d+ cached)? · \d+ out · [\d,.]+ tok/s · first token .*s", foot(page))
        page.click("[data-does=again]")
        page.wait_for_selector("#talk li:last-child.busy", state="detached")
        assert answer(page) == first and page.locator("#talk li").count() == 2
        say(page, "And of Italy?")
        answer(page)
        assert page.locator("#talk li").count() == 4
        page.click("#new")
        assert page.locator("#talk li").count() == 0 and page.is_visible("#empty")


def test_an_answer_after_a_schema_is_json_of_that_form(browser: Any, model: Running) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    with visit(browser, model.url) as page:
        page.select_option("#form", "json_schema")
        page.fill("#schema", json.dumps(schema))
        say(page, "Name a city.")
        found = json.loads(answer(page))
        assert found["city"] in ("Paris", "Rome") and found["big"] in (True, False)


def test_a_schema_that_is_none_is_said_beside_it_and_nothing_is_sent(browser: Any, slow: Running) -> None:
    with visit(browser, slow.url) as page:
        page.select_option("#form", "json_schema")
        page.fill("#schema", "{broken")
        say(page, "abc")
        assert "This is not a JSON schema" in page.evaluate("document.getElementById('schema').validationMessage")
        assert page.locator("#talk li").count() == 0 and slow.engine.submitted == []
        page.select_option("#form", "text")
        say(page, "abc")
        page.wait_for_selector("#talk li.assistant")


def test_the_settings_go_with_the_request_and_empty_ones_are_left_out(browser: Any, slow: Running) -> None:
    with visit(browser, slow.url) as page:
        for field, value in {
            "temperature": "0.5",
            "top_p": "0.9",
            "top_k": "7",
            "max_tokens": "3",
            "seed": "11",
        }.items():
            page.fill(f"[data-field={field}]", value)
        page.fill("#system", "Be brief.")
        say(page, "abc")
        answer(page)
    prompt, params, _ = slow.engine.submitted[0]
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.seed) == (0.5, 0.9, 7, 3, 11)
    assert params.min_p == 0.0
    assert bytes(prompt).decode().startswith("system: Be brief.\nuser: abc\n")


@pytest.mark.parametrize("how", ["button", "escape"])
def test_an_answer_is_stopped_and_the_engine_stops_with_it(browser: Any, slow: Running, how: str) -> None:
    with visit(browser, slow.url) as page:
        say(page, "abc")
        wait_for(page, "document.querySelector('#talk li:last-child .text').textContent.length > 3")
        if how == "button":
            page.click("#stop")
        else:
            page.keyboard.press("Escape")
        assert answer(page) and "stopped" in foot(page)
        until(lambda: slow.engine.num_open == 0 and len(slow.engine.aborted) == 1)
        assert page.is_visible("#send") and page.evaluate("document.activeElement.id") == "say"


def test_an_answer_that_fails_on_its_way_keeps_what_came_and_says_why(browser: Any, slow: Running) -> None:
    with visit(browser, slow.url) as page:
        say(page, "abc")
        wait_for(page, "document.querySelector('#talk li:last-child .text').textContent.length > 3")
        slow.engine.fail_next = "the grammar broke"
        page.wait_for_selector("#talk .error")
        assert "the grammar broke" in page.inner_text("#talk .error") and len(answer(page)) > 3
        slow.engine.fail_next = None
        assert page.inner_text("[data-does=again]") == "Try again"


def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(browser: Any, slow: Running) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "half an ans"}, "finish_reason": None}]}
    body = f"data: {json.dumps(chunk)}\n\n"
    with visit(browser, slow.url) as page:
        page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
        say(page, "abc")
        assert answer(page) == "half an ans" and page.inner_text("#talk .error") == "The answer broke off."


def test_a_refusal_is_shown_in_the_server_s_words(browser: Any, slow: Running) -> None:
    with visit(browser, slow.url, may_complain=True) as page:  # the browser notes every 4xx
        page.fill("[data-field=max_tokens]", "100000")
        say(page, "abc")
        page.wait_for_selector("#talk .error")
        assert "max_tokens" in page.inner_text("#talk .error")


def test_markup_of_a_user_a_model_and_a_name_is_shown_as_text(browser: Any) -> None:
    with running(FakeEngine(), served_model_names=(HOSTILE,)) as server, visit(browser, server.url) as page:
        page.fill("[data-field=max_tokens]", str(len(HOSTILE) + 20))
        page.fill("#system", HOSTILE)
        say(page, HOSTILE)
        assert HOSTILE in answer(page)
        assert page.inner_text("#talk li.user .prose") == HOSTILE
        assert page.inner_text("#talk li.assistant .who") == HOSTILE and page.inner_text("#state-text") == HOSTILE
        assert page.locator("#talk img, #talk script, #talk b, header img").count() == 0
        assert page.evaluate("window.broken") is None


def test_a_policy_keeps_even_the_console_from_making_html_of_text(browser: Any, slow: Running) -> None:
    with visit(browser, slow.url, may_complain=True) as page, pytest.raises(sync_api.Error, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<b>x</b>'")


def test_a_key_is_asked_for_refused_when_wrong_and_kept_in_the_tab_alone(browser: Any) -> None:
    with running(api_keys=("sk-right",)) as server, visit(browser, server.url, may_complain=True) as page:
        page.wait_for_selector("#key[open]")
        page.click("#key-cancel")
        wait_for(page, "document.getElementById('state-text').textContent.includes('API key')")
        page.click("#key-open")
        page.fill("#key-value", "sk-wrong")
        page.press("#key-value", "Enter")
        wait_for(page, "document.getElementById('key-why').textContent.includes('refused')")
        page.fill("#key-value", "sk-right")
        page.press("#key-value", "Enter")
        page.wait_for_selector("#model option", state="attached")
        page.wait_for_selector("#key:not([open])", state="attached")
        say(page, "abc")
        page.wait_for_selector("#talk li.assistant .text .prose")
        kept = page.evaluate("[sessionStorage.getItem('key'), localStorage.length, document.cookie]")
        assert kept == ["sk-right", 0, ""]
        page.click("#key-open")
        page.click("#key-forget")
        page.wait_for_selector("#key[open]")
        assert page.evaluate("sessionStorage.length") == 0


def test_the_live_view_shows_what_the_engine_says(browser: Any) -> None:
    engine = FakeEngine()
    loads = {"rank_load": b"\x00\x00\x80\x3e\x00\x00\x40\x3f", "expert_load": b"\x00\x00\x00\x3f" * 2}  # ¼, ¾; ½, ½
    engine.stats = Stats(
        num_running=3,
        num_waiting=1234,
        num_blocks=64,
        num_used_blocks=16,
        num_cached_blocks=20,
        prefix_queries=200,
        prefix_hits=50,
        num_steps=4,
        step_s=0.1,
        tiers={"host": {"used_blocks": 5, "capacity_blocks": 50}, "disk": {"used_blocks": 7}},
        experts=ExpertUpdate(balance=0.5, num_moved=9, rank_load=loads["rank_load"], expert_load=loads["expert_load"]),
    )
    with running(engine) as server, visit(browser, f"{server.url}/#watch") as page:
        server.complete("abc", max_tokens=5)
        wait_for(page, "document.querySelectorAll('#latency rect[height]').length > 0")
        page.select_option("#window", "start")
        wait_for(page, "document.querySelectorAll('.tile .figure')[2].textContent === '0tok/s'")
        assert page.locator(".tile .figure").all_inner_texts() == ["3", "1,234", "0tok/s", "0tok/s", "25%", "25ms"]
        rows = [re.sub(r"\s+", " ", text) for text in page.locator("#tiers .meter").all_inner_texts()]
        assert rows == ["Device 16 held, 20 cached of 64", "Host 5 of 50", "Disk 7 blocks"]
        rows = [re.sub(r"\s+", " ", text) for text in page.locator("#ranks .meter").all_inner_texts()]
        assert rows == ["Rank 0 25 % of the tokens", "Rank 1 75 % of the tokens"]
        assert page.locator("#expert-load i").count() == 2
        assert "Between tokens" in page.inner_text("#latency") and "p95" in page.inner_text("#latency")
        engine.stats = Stats(num_running=4)
        wait_for(page, "document.querySelector('.tile .figure').textContent === '4'")
        assert page.is_hidden("#experts")


def test_a_server_that_goes_away_is_said_and_found_again(browser: Any) -> None:
    with visit(browser, "about:blank", may_complain=True) as page:
        with running() as server:
            page.goto(server.url)
            page.wait_for_selector("#state .dot.good")
        page.wait_for_selector("#state .dot.bad")
        assert page.inner_text("#state-text") == "not reachable"


def test_a_router_s_page_shows_its_fleet_and_chats_through_it(browser: Any) -> None:
    with running(FakeEngine()) as server, stub() as other:
        other.models = json.dumps({"object": "list", "data": [{"id": HOSTILE}]}).encode()
        with (
            running_router(server.url, other.url) as router,
            visit(browser, f"http://127.0.0.1:{router.port}/") as page,
        ):
            page.wait_for_selector("#replicas tbody tr >> nth=1")
            assert page.inner_text("#state-text") == "2 of 2 replicas take requests"
            rows = page.locator("#replicas tbody tr").all_inner_texts()
            assert server.url in rows[0] and "tiny" in rows[0] and "up" in rows[0]
            assert HOSTILE in rows[1] and page.locator("#replicas img").count() == 0
            page.click("nav a[href='#chat']")
            page.select_option("#model", "tiny")
            say(page, "abc")
            assert "user: abc" in answer(page)
            page.click("nav a[href='#watch']")
            wait_for(page, "document.querySelector('#replicas tbody tr').cells[6].textContent === '1'")
            other.is_ready = False
            wait_for(page, "document.querySelectorAll('#replicas .dot.good').length === 1")


@pytest.mark.parametrize("view", ["chat", "watch"])
@pytest.mark.parametrize("kind", ["server", "router"])
def test_it_fits_a_telephone_and_both_colour_schemes(browser: Any, slow: Running, view: str, kind: str) -> None:
    with running_router(slow.url) as router:
        url = slow.url if kind == "server" else f"http://127.0.0.1:{router.port}"
        lightness = {}
        for scheme in ("light", "dark"):
            size = {"width": 375, "height": 667}
            with visit(browser, f"{url}/#{view}", color_scheme=scheme, viewport=size) as page:
                page.wait_for_selector("#state .dot.good")
                assert page.evaluate("document.documentElement.scrollWidth") == 375
                wide = "[...document.querySelectorAll('main:not([hidden]) *')].filter(e => e.getBoundingClientRect().right > 376)"
                assert page.evaluate(f"{wide}.map(e => e.outerHTML.slice(0, 80))") == []
                paper, ink = page.evaluate(
                    "(style => [style.backgroundColor, style.color])(getComputedStyle(document.documentElement))"
                )
                lightness[scheme] = [sum(map(int, re.findall(r"\d+", colour)[:3])) / 765 for colour in (paper, ink)]
        assert lightness["light"][0] > 0.9 and lightness["light"][1] < 0.2
        assert lightness["dark"][0] < 0.2 and lightness["dark"][1] > 0.8


def test_the_keyboard_reaches_everything_in_order(browser: Any, slow: Running) -> None:
    with visit(browser, slow.url) as page:
        page.wait_for_selector("#model option", state="attached")
        page.click("h1")
        reached = []
        for _ in range(18):
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate("(e => e.id || e.dataset.field || e.textContent.trim())(document.activeElement)")
            )
        assert [each for each in reached if each != "penstock"][:16] == [
            *("Chat", "Live", "scroll", "say", "new", "send", "Settings", "model", "system"),
            *("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "form"),
        ]
