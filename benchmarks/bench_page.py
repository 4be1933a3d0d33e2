"""Measures what one more token of a long answer costs the browser: the script that draws it, and the layout after it.

python -m benchmarks.bench_page
"""

from importlib import resources

from tests.page.test_markdown import SCRIPTS
from tests.support.page_browser import scripts, started

CHARACTERS = 4  # of a token
LENGTHS = (1_000, 20_000)  # tokens of the answer so far
BLOCK = (
    "## A part of it\n\nSome **bold** words, `code` and a [link](https://example.org), then a sentence that goes on "
    "for about as long as sentences do.\n\n- one\n- two\n  - three\n\n```python\ndef f(x):\n    return x\n```\n\n"
)
KINDS = {
    "mixed": ("", BLOCK),
    "one list": ("", "- an item with **bold** and `code`\n"),
    "one fence": ("```\n", "    x = f(1, 2)  # a line of code\n"),
    "one paragraph": ("", "words and **bold** words and `code` "),
}
BOXES = """() => {
  const put = (parent, tag, id) => parent.appendChild(Object.assign(make(tag), { id }));
  put(put(put(document.body, "main", "chat"), "div", "scroll"), "ol", "talk");
}"""
# Of the last 200 tokens of a text: the mean milliseconds of script and of layout; and of all of it anew.
RUN = """([text, step]) => {
  const item = make("li");
  document.getElementById("talk").replaceChildren(item);
  const shown = () => document.getElementById("scroll").scrollHeight;
  const start = performance.now();
  const answer = new Answer({ role: "assistant", content: text.slice(0, -200 * step) }, item);
  shown();
  const anew = performance.now() - start;
  const spent = [0, 0];
  for (let end = text.length - 199 * step; end <= text.length; end += step) {
    const times = [performance.now()];
    answer.markdown.show(text.slice(0, end));
    times.push(performance.now());
    shown();
    times.push(performance.now());
    for (const i of [0, 1]) spent[i] += (times[i + 1] - times[i]) / 200;
  }
  return [...spent, anew];
}"""


def main() -> None:
    style = resources.files("penstock.engine.http.page").joinpath("page.css").read_text("utf-8")
    print(f"{'ms':<16}{'tokens':>8}{'script':>9}{'layout':>9}{'all anew':>10}")
    with started() as browser, scripts(browser, *SCRIPTS) as page:
        page.add_style_tag(content=style)
        page.evaluate(BOXES)
        for name, (start, block) in KINDS.items():
            for tokens in LENGTHS:
                length = CHARACTERS * tokens
                text = (start + block * (length // len(block) + 1))[:length]
                script, layout, anew = page.evaluate(RUN, [text, CHARACTERS])
                print(f"{name:<16}{tokens:>8,}{script:>9.2f}{layout:>9.2f}{anew:>10.0f}")


if __name__ == "__main__":
    main()
