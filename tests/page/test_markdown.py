"""What the page makes of Markdown, of models that mean well and of others."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.page_browser import MARKS, Page, scripts
from tests.support.refusals import cases, hardest

pytestmark = MARKS
SCRIPTS = ("page.js", "charts.js", "markdown.js", "answer.js")
SHOW = """(texts) => texts.map((text) => {
  const box = document.createElement("div");
  new Markdown(box).show(text);
  return box.outerHTML;
})"""
# Texts with where they are cut: shown piece by piece and at once, and the names of what they became.
STREAM = """(cases) => cases.map(([text, cuts]) => {
  const boxes = [document.createElement("div"), document.createElement("div")];
  const markdown = new Markdown(boxes[0]);
  for (const cut of cuts) markdown.show(text.slice(0, cut));
  markdown.show(text);
  new Markdown(boxes[1]).show(text);
  const all = [...boxes[1].querySelectorAll("*")];
  const attributes = all.flatMap((element) => element.getAttributeNames());
  const [streamed, whole] = boxes.map((box) => box.outerHTML);
  const tags = all.map((element) => element.localName);
  return { streamed, whole, said: boxes[1].textContent, tags: [...new Set(tags)], attributes: [...new Set(attributes)] };
})"""
_DATA = json.loads(Path(__file__).with_name("markdown.json").read_text())
EXAMPLES: list[Any] = _DATA["examples"]
NO_LINKS: list[Any] = _DATA["no_links"]
HOSTILE: list[Any] = _DATA["hostile"]
PIECES: list[Any] = _DATA["pieces"]
WORD = r"word|constructor|é|𝄞"
TAGS = {
    *("div", "p", "h3", "h4", "h5", "h6", "strong", "em", "del", "code", "pre", "ul", "ol", "li", "blockquote", "hr"),
    *("table", "tr", "th", "td", "a", "span", "button"),
}
ATTRIBUTES = {"class", "href", "title", "target", "rel", "type", "start", "scope", "tabindex", "role", "aria-label"}
HUGE = cases(__file__, "huge texts")


@pytest.fixture(scope="module")
def page(browser: Any) -> Iterator[Page]:
    with scripts(browser, *SCRIPTS) as page:
        yield page


def simple(html: str) -> str:
    """Without what every element of its kind has."""
    html = re.sub(r' (?:class="[^"]*"|start="1"|scope="col"|rel="[^"]*"|target="_blank"|title="[^"]*")', "", html)
    box = r'<div><div><span>([^<]*)</span><button type="button">Copy</button></div><pre [^>]*><code>(.*?)</code></pre></div>'
    html = re.sub(box, r"<pre>\1|\2</pre>", html, flags=re.DOTALL)
    rows = re.sub(r"</t[hd]><t[hd]>", ",", html).replace("</tr><tr>", ";")
    rows = re.sub(r"<div>(<table>.*?</table>)</div>", r"\1", re.sub(r"</?t[rhd]>", "", rows))
    return rows.removeprefix("<div>").removesuffix("</div>")


def test_what_models_write_comes_out_as_they_mean_it(page: Page) -> None:
    shown = page.evaluate(SHOW, [text for text, _ in EXAMPLES])
    found = {text: simple(html) for (text, _), html in zip(EXAMPLES, shown, strict=True)}
    assert {text: html for text, html in found.items() if html != dict(EXAMPLES)[text]} == {}


def test_only_the_web_and_mail_addresses_become_links_and_all_else_stays_as_written(page: Page) -> None:
    read = "(text) => { const box = make('div'); new Markdown(box).show(text); return [box.textContent, box.querySelector('a')?.href]; }"
    for text in NO_LINKS:
        said, href = page.evaluate(read, text)
        assert href is None and said in (text, text.replace("\n\n", "")), text
    for link in page.evaluate(SHOW, ["[x](https://a.org)"]):
        assert 'target="_blank" rel="noopener noreferrer"' in link


def test_hostile_text_becomes_no_element_and_no_attribute_of_its_own(page: Page) -> None:
    for text, found in zip(HOSTILE, page.evaluate(STREAM, [[text, [9]] for text in HOSTILE]), strict=True):
        assert set(found["tags"]) <= TAGS and set(found["attributes"]) <= ATTRIBUTES, text
        assert found["said"] != "" and re.findall(r"<\w+", found["said"]) == re.findall(r"<\w+", text)
    assert page.evaluate("window.broken") is None


@pytest.mark.parametrize("seed", hardest(range(4), 0))
def test_random_text_loses_no_word_and_is_the_same_streamed_and_whole(page: Page, seed: int) -> None:
    rng = random.Random(seed)
    texts = ["".join(rng.choices(PIECES, k=rng.randint(1, 60))) for _ in range(200)]
    cases = [(text, sorted(rng.choices(range(len(text)), k=rng.choice([3, 30, 300])))) for text in texts]
    for text, found in zip(texts, page.evaluate(STREAM, cases), strict=True):
        assert set(found["tags"]) <= TAGS and set(found["attributes"]) <= ATTRIBUTES, json.dumps(text)
        assert found["streamed"] == found["whole"], json.dumps(text)
        assert re.findall(WORD, found["said"].replace("Copy", "")) == re.findall(WORD, text), json.dumps(text)


def test_huge_text_is_shown_without_a_halt(page: Page) -> None:
    show = "(text) => { const box = make('div'); new Markdown(box).show(text); return box.textContent.length; }"
    for text in HUGE:
        assert page.evaluate(show, text) <= len(text) + 30_000, text[:20]


def test_a_long_stream_leaves_alone_what_stands_and_touches_little(page: Page) -> None:
    """6,000 tokens, each shown: the elements that change with a token are those of its own paragraph."""
    block = (
        "## Part\n\nSome **bold** words and `code` of it.\n\n- one\n- two\n  - three\n\n```py\nx = 1\ny = 2\n```\n\n"
    )
    text = block * (6_000 * 4 // len(block))
    changes, same = page.evaluate(
        """async (text) => {
          const box = make("div");
          document.body.replaceChildren(box);
          const markdown = new Markdown(box);
          let changes = 0;
          const count = (records) => records.forEach((r) => (changes += r.addedNodes.length + r.removedNodes.length));
          const observer = new MutationObserver(count);
          observer.observe(box, { childList: true, subtree: true });
          markdown.show(text.slice(0, 400));
          const early = [...box.children].slice(0, 4);
          for (let end = 404; end < text.length; end += 4) markdown.show(text.slice(0, end));
          count(observer.takeRecords());
          return [changes, early.every((element, i) => box.children[i] === element)];
        }""",
        text,
    )
    assert same and changes < 6_000 * 12
