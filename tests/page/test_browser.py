"""The page in a real browser: one answer, the API key, the live view, and servers that go away; with a keyboard, on a
telephone, with a screen reader and in dark colours."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.engine.messages import Stats
from penstock.engine.text.model_text import load_text
from tests.support.default_file import default_file
from tests.support.fake_engine import FakeEngine
from tests.support.page_browser import MARKS, Page, streamed, visit
from tests.support.refusals import cases
from tests.support.running_server import Running, engine_of, running, until

pytestmark = MARKS
ENDLESS = """void (window.fetch = async (path, { signal }) => {
  if (!path.includes("chat")) return new Promise(() => {});
  signal.addEventListener("abort", () => (window.isClosed = true));
  return new Response(new ReadableStream({ start: (stream) => stream.enqueue(new TextEncoder().encode("data: {\\n\\n")) }));
})"""
IMPATIENT = "void ([window.patient, AbortSignal.timeout] = [AbortSignal.timeout, (ms) => window.patient(ms / 50)])"
PATIENT = "void (AbortSignal.timeout = window.patient)"
HOSTILE = '<img src=x onerror="window.broken=1"><script>window.broken=1</script><b>x</b>'


@pytest.fixture(params=["fake", pytest.param("default", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> Iterator[Running]:
    """Start a server over the fake engine, or over the default model, where it is installed."""
    settings: tuple[Any, ...] = ()
    if request.param == "default":
        path, (tokenizer, template) = default_file(), load_text(None)
        settings = engine_of(path, tokenizer, kv_cache_bytes=2**27, max_model_len=1024), tokenizer, template
    with running(*settings) as server:
        yield server


def test_a_question_is_answered_with_its_counts_and_once_more_on_demand(browser: Any, model: Running) -> None:
    with visit(browser, model.url) as page:
        page.set_fields(temperature="0", max_tokens="90", system="You answer in one short sentence.")
        is_fake = isinstance(model.engine, FakeEngine)  # it repeats the prompt
        first = page.ask("What is the capital of France?")
        assert ("What is the capital of France?" if is_fake else "Paris") in first
        figures = r" · \d+ out · [\d,.]+ tok/s · first token .*s" + is_fake * " · cut at its length"
        assert re.fullmatch(rf"\d+ tokens in(, \d+ of them cached)?{figures}", page.foot())
        why = "" if is_fake else "Why no more of the prompt was cached: no earlier prompt goes on like this."
        assert (page.locator(".counts").last.get_attribute("title") or "") == why
        page.click("[data-does=again]")
        page.wait_for_selector("#talk li:last-child.busy", state="detached")
        assert page.answer() == first and page.locator("#talk li").count() == 2
        assert re.fullmatch(rf"\d+ tokens in, \d+ of them cached{figures}", page.foot()), "the same prompt is cached"
        page.ask("And of Italy?")
        assert page.locator("#talk li").count() == 4
        page.click("#new")
        assert page.locator("#talk li").count() == 0 and page.is_visible("#empty")


def test_the_stop_button_and_escape_end_the_computation(browser: Any, slow: Running) -> None:
    with visit(browser, slow.url) as page:
        for num_stopped, way in enumerate(("button", "key"), 1):
            page.say("abc")
            page.begun()
            if way == "button":
                page.click("#stop")
            else:
                page.keyboard.press("Escape")
            assert page.answer() and "stopped" in page.foot()
            until(lambda: len(slow.engine.answers) == 0)
            assert len(slow.engine.aborted) == num_stopped
            assert page.is_visible("#send") and page.evaluate("document.activeElement.id") == "say"
            page.click("#new")


def test_an_answer_that_fails_is_kept_as_far_as_it_came_with_the_reason(browser: Any, slow: Running) -> None:
    with visit(browser, slow.url, may_complain=True) as page:  # the browser notes every 4xx
        page.say("abc")
        page.begun()
        slow.engine.fail_next = "the grammar broke"
        page.wait_for_selector("#talk .error")
        assert "the grammar broke" in page.inner_text("#talk .error") and len(page.answer()) > 3
        slow.engine.fail_next = None
        assert page.inner_text("[data-does=again]") == "Try again"
        page.click("#new")
        page.set_fields(max_tokens="3000000000")
        page.say("refused")
        page.wait_for_selector("#talk .error")
        assert "max_tokens" in page.inner_text("#talk .error")
        page.click("#new")
        page.answer_with(streamed({"content": "half an ans"}, finish=None))
        assert page.ask("abc") == "half an ans" and page.inner_text("#talk .error") == "The answer broke off."
        page.click("#new")
        page.evaluate(ENDLESS)
        page.ask("abc")
        assert page.is_visible("#talk .error") and page.evaluate("window.isClosed"), "the connection stays open"


def test_markup_of_a_user_a_model_and_its_name_is_shown_as_text(browser: Any) -> None:
    with running(FakeEngine(), served_model_names=(HOSTILE,)) as server, visit(browser, server.url) as page:
        page.set_fields(max_tokens=str(len(HOSTILE) + 20), system=HOSTILE)
        page.say(HOSTILE)
        assert HOSTILE in page.answer()
        assert page.inner_text("#talk li.user .prose") == HOSTILE
        assert page.inner_text("#talk li.assistant .who") == HOSTILE and page.inner_text("#state-text") == HOSTILE
        assert page.locator("#talk img, #talk script, #talk b, header img").count() == 0
        assert page.evaluate("window.broken") is None


def test_a_question_waits_for_the_key_which_stays_in_the_tab_alone(browser: Any) -> None:
    with running(api_keys=("sk-right",)) as server, visit(browser, server.url, may_complain=True) as page:
        page.wait_for_selector("#key[open]")
        page.click("#key-cancel")
        page.wait_for("document.getElementById('state-text').textContent.includes('API key')")
        page.say("abc")
        page.wait_for_selector("#key[open]")
        page.click("#key-cancel")
        page.answer()
        assert "needs an API key" in page.inner_text("#talk .error")
        page.click("[data-does=again]")
        page.fill("#key-value", "sk-wrong")
        page.press("#key-value", "Enter")
        page.wait_for("document.getElementById('key-why').textContent.includes('refused')")
        page.fill("#key-value", "sk-right")
        page.press("#key-value", "Enter")
        page.wait_for("document.querySelector('#talk .error') === null")
        assert "user: abc" in page.answer() and page.turns()[0] == "abc"
        page.wait_for_selector("#model option", state="attached")
        all_texts = "Array.from(localStorage, (_, i) => localStorage.getItem(localStorage.key(i))).join()"
        session, local, cookie = page.evaluate(f"[sessionStorage.getItem('key'), {all_texts}, document.cookie]")
        assert session == "sk-right" and cookie == "" and "user: abc" in local and "sk-right" not in local
        page.click("#key-open")
        page.click("#key-forget")
        page.wait_for_selector("#key[open]")
        assert page.evaluate("sessionStorage.getItem('key')") is None


def test_the_live_view_shows_the_figures_of_the_engine(browser: Any) -> None:
    engine = FakeEngine()
    engine.stats = Stats(**dict(cases(__file__, "figures of an engine")))
    with running(engine) as server, visit(browser, f"{server.url}/#watch") as page:
        server.complete("abc", max_tokens=5)
        page.wait_for("document.querySelectorAll('.tile .figure')[2].textContent === '0tok/s'")
        figures = page.locator(".tile .figure").all_inner_texts()
        assert figures[:6] == ["3", "1,234", "0tok/s", "0tok/s", "25%", "25ms"]
        assert page.locator(".tile .label").all_inner_texts()[4] == "Prefix hits, since start"
        assert len(figures) == 10 and all(re.fullmatch(r"0|[\d,.]+m?s", figure) for figure in figures[6:])
        rows = [re.sub(r"\s+", " ", text) for text in page.locator("#tiers .meter").all_inner_texts()]
        assert rows == cases(__file__, "memory of these figures")
        engine.stats = Stats(num_running=4, prefix_queries=400, prefix_hits=200)
        page.wait_for("document.querySelector('.tile .figure').textContent === '4'")
        assert page.locator(".tile").all_inner_texts()[4].split("\n") == ["Prefix hits", "75%"]


def test_a_silent_server_is_reported_and_its_models_come_back(browser: Any) -> None:
    with visit(browser, "about:blank", may_complain=True) as page:
        with running() as server:
            page.goto(server.url)
            page.wait_for_selector("#state .dot.good")
            page.route("**/metrics", lambda route: None)
            page.evaluate(IMPATIENT)
            page.wait_for("document.getElementById('state-text').textContent === 'no response'")
            page.wait_for_selector("body.stale")
            page.evaluate(PATIENT)
            page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "another"}]}))
            page.route("**/metrics", lambda route: route.fulfill(body="process_start_time_seconds 1\n"))
            page.wait_for("document.getElementById('model').value === 'another'")
            page.unroute("**/metrics")
        page.wait_for_selector("#state .dot.bad")
        assert page.inner_text("#state-text") == "not reachable"
        page.click("nav a[href='#watch']")
        assert re.match(r"No data since [\d:]+", page.inner_text("#gap"))


TELEPHONE = {"width": 375, "height": 667}
RICH = "\n\n".join(cases(__file__, "parts of a rich answer"))
# The contrast of each visible text to its background, by the formula of WCAG 2, with the beginning of its element.
CONTRASTS = """() => {
  const shade = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    shade.clearRect(0, 0, 1, 1);
    shade.fillStyle = colour;
    shade.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = shade.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const behind = (element) => {
    const below = element.parentElement ? behind(element.parentElement) : [255, 255, 255, 1];
    return over(rgba(getComputedStyle(element).backgroundColor), below);
  };
  const light = (colour) => colour.slice(0, 3).map((part) => part / 255)
    .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  const seen = [...document.querySelectorAll("body *")].filter((element) => element.checkVisibility()
    && !element.disabled && (element.placeholder || [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim())));
  return seen.map((element) => {
    const back = behind(element);
    const [a, b] = [light(over(rgba(getComputedStyle(element).color), back)), light(back)];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), element.outerHTML.slice(0, 60)];
  });
}"""
# Elements that reach beyond the right edge of a telephone, outside of a box that is scrolled sideways.
TOO_WIDE = """[...document.querySelectorAll("main:not([hidden]) *")]
  .filter((e) => e.getBoundingClientRect().right > 376 && !e.closest("pre, .table")).map((e) => e.outerHTML.slice(0, 80))"""
UNNAMED = """[...document.querySelectorAll("button, input, select, textarea, summary, [role=region], a, [popover], dialog")]
  .filter((e) => !(e.ariaLabel || e.getAttribute("aria-labelledby") || e.labels?.length || e.textContent.trim()))
  .map((e) => e.outerHTML)"""


def test_all_text_fits_a_telephone_and_is_legible_in_both_colour_schemes(browser: Any, slow: Running) -> None:
    with visit(browser, slow.url, viewport=TELEPHONE) as page:
        answer = streamed({"reasoning_content": "hm " * 200}, {"content": RICH})
        page.answer_with(answer, streamed({"content": "half"}, finish=None))
        page.ask("wide " * 3 + "w" * 200)
        page.click("#talk summary")
        page.ask("abc")
        page.wait_for_selector("#talk .error")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            for part in ("watch", "chat", "past", "settings"):
                is_drawer = part in ("past", "settings")
                page.click(f"#{part}-open" if is_drawer else f"a[href='#{part}']")
                page.wait_for_selector("#watch .tile .figure" if part == "watch" else f"#{part}")
                contrasts = page.evaluate(CONTRASTS)
                assert len(contrasts) > 10 and [each for each in contrasts if each[0] < 4.5] == [], (scheme, part)
                assert page.evaluate("document.documentElement.scrollWidth") == 375
                assert page.evaluate(TOO_WIDE) == []
                if is_drawer:
                    page.keyboard.press("Escape")
                    assert page.is_hidden(f"#{part}")
                    assert page.evaluate("document.activeElement.id") == f"{part}-open"
            paper = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
            brightness = sum(map(int, re.findall(r"\d+", paper)[:3])) / 765
            assert brightness < 0.2 if scheme == "dark" else brightness > 0.9


def test_every_control_has_a_name_and_answers_are_announced(browser: Any, slow: Running) -> None:
    with visit(browser, slow.url) as page:
        page.say("abc")
        page.begun()
        assert page.inner_text("#said") == "Answering"
        assert page.get_attribute("#talk > li:last-child", "aria-busy") == "true"
        page.keyboard.press("Escape")
        answer = page.answer()
        assert page.inner_text("#said").startswith(answer[:9]) and "Answer complete: " in page.inner_text("#said")
        assert page.get_attribute("#said", "role") == "status"
        assert page.get_attribute("#talk > li:last-child", "aria-busy") is None
        assert page.evaluate(UNNAMED) == []


def tab_through(page: Page, controls: list[str]) -> None:
    name = "(e => e.id || e.dataset.field || e.ariaLabel || e.textContent.trim())(document.activeElement)"
    is_seen = "(s => s.outlineStyle !== 'none' || s.boxShadow !== 'none')(getComputedStyle(document.activeElement))"
    for control in controls:
        page.keyboard.press("Tab")
        assert page.evaluate(name) == control and page.evaluate(is_seen)


def test_the_keyboard_reaches_every_control_in_order_with_a_visible_focus(browser: Any, slow: Running) -> None:
    with visit(browser, slow.url) as page:
        page.answer_with(streamed({"content": "```c\nx\n```"}))
        page.wait_for_selector("#model option", state="attached")
        page.ask("abc")
        page.click("h1")
        tab_through(page, ["Chat", "Live", "abc", "Delete abc", "past-clear", "scroll", "Copy", "Code, c"])
        tab_through(page, ["Regenerate", "Copy", "say", "new", "settings-open"])
        page.keyboard.press("Enter")
        page.wait_for("document.activeElement.textContent === 'Close'")
        tab_through(page, ["model", "system", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "tools"])
