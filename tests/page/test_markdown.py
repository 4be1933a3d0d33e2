"""Markdown of models as elements of the page, also of models with bad intentions."""

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
# Shows each text piece by piece, as it is cut, and at once; returns both with the names of the elements.
SHOW = """(cases) => cases.map(([text, cuts]) => {
  const boxes = [document.createElement("div"), document.createElement("div")];
  const markdown = new Markdown(boxes[0]);
  for (const cut of cuts) markdown.show(text.slice(0, cut));
  markdown.show(text);
  new Markdown(boxes[1]).show(text);
  const all = [...boxes[1].querySelectorAll("*")];
  const attributes = all.flatMap((element) => element.getAttributeNames());
  const [streamed, whole] = boxes.map((box) => box.outerHTML);
  const tags = all.map((element) => element.localName);
  return { streamed, whole, text: boxes[1].textContent, tags: [...new Set(tags)], attributes: [...new Set(attributes)] };
})"""
_DATA = json.loads(Path(__file__).with_name("markdown.json").read_text())
EXAMPLES: list[tuple[str, str]] = _DATA["examples"]
PIECES: list[str] = _DATA["pieces"]
WORD = r"word|constructor|é|𝄞"
TAGS = {*cases(__file__, "elements of answers")}
ATTRIBUTES = {"class", "href", "title", "target", "rel", "type", "start", "scope", "tabindex", "role", "aria-label"}


@pytest.fixture(scope="module")
def page(browser: Any) -> Iterator[Page]:
    with scripts(browser, *SCRIPTS) as page:
        yield page


def simple(html: str) -> str:
    """Remove what every element of its kind has."""
    html = re.sub(r' (?:class="[^"]*"|start="1"|scope="col"|rel="[^"]*"|target="_blank"|title="[^"]*")', "", html)
    box = r'<div><div><span>([^<]*)</span><button type="button">Copy</button></div><pre [^>]*><code>(.*?)</code></pre></div>'
    html = re.sub(box, r"<pre>\1|\2</pre>", html, flags=re.DOTALL)
    rows = re.sub(r"</t[hd]><t[hd]>", ",", html).replace("</tr><tr>", ";")
    rows = re.sub(r"<div>(<table>.*?</table>)</div>", r"\1", re.sub(r"</?t[rhd]>", "", rows))
    return rows.removeprefix("<div>").removesuffix("</div>")


def test_every_example_becomes_the_elements_that_its_author_meant(page: Page) -> None:
    """HTML stays text, and only addresses of the web and of mail become links."""
    results = page.evaluate(SHOW, [[text, [9]] for text, _ in EXAMPLES])
    shown = {text: simple(result["whole"]) for (text, _), result in zip(EXAMPLES, results, strict=True)}
    assert {text: html for text, html in shown.items() if html != dict(EXAMPLES)[text]} == {}
    (link,) = page.evaluate(SHOW, [["[x](https://a.org)", []]])
    assert 'target="_blank" rel="noopener noreferrer"' in link["whole"]


@pytest.mark.parametrize("seed", hardest(range(4), 0))
def test_random_text_loses_no_word_and_is_the_same_streamed_and_whole(page: Page, seed: int) -> None:
    rng = random.Random(seed)
    texts = ["".join(rng.choices(PIECES, k=rng.randint(1, 60))) for _ in range(200)]
    streams = [(text, sorted(rng.choices(range(len(text)), k=rng.choice([3, 30, 300])))) for text in texts]
    for text, shown in zip(texts, page.evaluate(SHOW, streams), strict=True):
        assert set(shown["tags"]) <= TAGS and set(shown["attributes"]) <= ATTRIBUTES, json.dumps(text)
        assert shown["streamed"] == shown["whole"], json.dumps(text)
        assert re.findall(WORD, shown["text"].replace("Copy", "")) == re.findall(WORD, text), json.dumps(text)


def test_huge_text_is_shown_at_once(page: Page) -> None:
    show = "(text) => { const box = make('div'); new Markdown(box).show(text); return box.textContent.length; }"
    for text in cases(__file__, "huge texts"):
        assert page.evaluate(show, text) <= len(text) + 30_000, text[:20]


def test_a_long_stream_changes_only_its_last_paragraph(page: Page) -> None:
    """Each of 6,000 tokens is shown, and changes the elements of its own paragraph."""
    block = "## Part\n\n**Bold** words and `code` of it.\n\n- one\n- two\n  - three\n\n```py\nx = 1\ny = 2\n```\n\n"
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
