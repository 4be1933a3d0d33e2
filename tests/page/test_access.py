"""The page for those who use a keyboard, a telephone, a screen reader or dark colours."""

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
ANSWER = streamed({"reasoning_content": "hm " * 200}, {"content": RICH})
# Of every text that can be seen: how much lighter the lighter one of its colour and what is behind it is.
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
UNNAMED = """[...document.querySelectorAll("button, input, select, textarea, summary, [role=region], a, [popover], dialog")]
  .filter((e) => !(e.ariaLabel || e.getAttribute("aria-labelledby") || e.labels?.length || e.textContent.trim()))
  .map((e) => e.outerHTML)"""


def wider_than_the_screen(page: Page) -> list[str]:
    """Elements that stand out to the right, but for those within a box that is moved sideways on its own."""
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    wide = "[...document.querySelectorAll('main:not([hidden]) *')].filter(e => e.getBoundingClientRect().right > 376 && !e.closest('pre, .table'))"
    found: list[str] = page.evaluate(f"{wide}.map(e => e.outerHTML.slice(0, 80))")
    return found


def test_each_view_fits_a_telephone_in_both_colour_schemes_and_so_does_a_conversation_with_its_drawers(
    browser: Any, slow: Running
) -> None:
    style = "(style => [style.backgroundColor, style.color])(getComputedStyle(document.documentElement))"
    with visit(browser, slow.url, viewport=TELEPHONE) as page:
        page.wait_for_selector("#state .dot.good")
        for view, scheme, is_dark in (("watch", "light", False), ("watch", "dark", True), ("chat", "dark", True)):
            page.emulate_media(color_scheme=scheme)
            page.click(f"a[href='#{view}']")
            page.wait_for_selector(f"main#{view}")
            assert wider_than_the_screen(page) == []
            paper, ink = (sum(map(int, re.findall(r"\d+", each)[:3])) / 765 for each in page.evaluate(style))
            assert (paper < 0.2 and ink > 0.8) if is_dark else (paper > 0.9 and ink < 0.2)
        page.answer_with(ANSWER)
        page.ask("wide " * 3 + "w" * 200)
        page.click("#talk summary")
        assert wider_than_the_screen(page) == []
        for drawer in ("past", "settings"):
            page.click(f"#{drawer}-open")
            assert page.is_visible(f"#{drawer}") and wider_than_the_screen(page) == []
            page.keyboard.press("Escape")
            assert page.is_hidden(f"#{drawer}")
            assert page.evaluate("document.activeElement.id") == f"{drawer}-open"


def test_all_text_stands_out_from_what_is_behind_it(browser: Any, slow: Running) -> None:
    with visit(browser, slow.url) as page:
        page.answer_with(ANSWER, streamed({"content": "half"}, finish=None))
        page.ask("abc")
        page.click("#talk summary")
        page.say("abc")
        page.wait_for_selector("#talk .error")
        page.click("#settings-open")
        send, drawer = (page.locator(name).bounding_box() for name in ("#send", "#settings"))
        assert send["x"] + send["width"] <= drawer["x"], "the settings cover the message box"
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            found = page.evaluate(CONTRASTS)
            assert len(found) > 40 and [each for each in found if each[0] < 4.5] == [], scheme


def test_everything_has_a_name_and_what_happens_is_announced(browser: Any, slow: Running) -> None:
    with visit(browser, slow.url) as page:
        page.say("abc")
        page.begun()
        assert page.inner_text("#said") == "Answering"
        assert page.get_attribute("#talk > li:last-child", "aria-busy") == "true"
        page.keyboard.press("Escape")
        said = page.answer()
        assert page.inner_text("#said").startswith(said[:9]) and "Answer complete: " in page.inner_text("#said")
        assert page.get_attribute("#said", "role") == "status"
        assert page.get_attribute("#talk > li:last-child", "aria-busy") is None
        assert page.evaluate(UNNAMED) == []


def test_the_keyboard_reaches_everything_in_order_and_it_is_seen_where_it_is(browser: Any, slow: Running) -> None:
    name = "(e => e.id || e.dataset.field || e.ariaLabel || e.textContent.trim())(document.activeElement)"
    seen = "(s => s.outlineStyle !== 'none' || s.boxShadow !== 'none')(getComputedStyle(document.activeElement))"

    def reached(number: int) -> list[str]:
        names = []
        for _ in range(number):
            page.keyboard.press("Tab")
            names.append(page.evaluate(name))
            assert page.evaluate(seen), names
        return names

    with visit(browser, slow.url) as page:
        page.answer_with(streamed({"content": "```c\nx\n```"}))
        page.wait_for_selector("#model option", state="attached")
        page.ask("abc")
        page.click("h1")
        assert reached(13) == [
            *("Chat", "Live", "abc", "Delete abc", "past-clear", "scroll", "Copy", "Code, c"),
            *("Regenerate", "Copy", "say", "new", "settings-open"),
        ]
        page.focus("#settings-open")
        page.keyboard.press("Enter")
        page.wait_for(f"{name} === 'Close'")
        assert reached(9) == [
            *("model", "system", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "tools"),
        ]
