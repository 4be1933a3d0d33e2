"""The page with a keyboard, on a telephone, with a screen reader and in dark colours."""

import re
from typing import Any

from tests.support.page_browser import MARKS, Page, streamed, visit
from tests.support.running_server import Running

pytestmark = MARKS
TELEPHONE = {"width": 375, "height": 667}
RICH = (
    f"# A title\n\n{'wide' * 60}\n\n- one\n  - {'two' * 60}\n\n```python\n{'x = 1; ' * 60}\n```\n\n"
    f"|{'a heading|' * 12}\n|{'---|' * 12}\n|{'cell|' * 12}\n\n> said\n\n[a link](https://example.org) and `code`\n\n---\n"
)
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
