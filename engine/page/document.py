"""The page at `/` of a server: one HTML document that contains its style and script.

It is a single document because only `/` and the liveness probe are open without a key; it contains no data, and its
script requests the other routes with the key that the user enters. The content security policy names the style and the
script by their digests and forbids HTML made from text, so text of a model or a user cannot become part of the page.
"""

import base64
import hashlib
import json
from functools import cache
from pathlib import Path

from starlette.responses import HTMLResponse

SCRIPTS = (
    *("page.js", "markdown.js", "conversations.js", "settings.js", "answer.js", "chat.js", "charts.js"),
    "start.js",  # all before it are definitions
)


@cache
def document() -> HTMLResponse:
    """Return the page with its headers, including the content security policy. It is built at the first call."""
    style = _read("page.css")
    script = "\n".join(map(_read, SCRIPTS))
    assert "</" not in style and "</script" not in script  # either would end its element
    html = _read("shell.html")
    for place, content in (
        ("<style></style>", f"<style>{style}</style>"),
        ('<script type="module"></script>', f'<script type="module">{script}</script>'),
    ):
        assert html.count(place) == 1, f"shell.html has not one {place}"
        html = html.replace(place, content)
    digests = {"script": _digest(script), "style": _digest(style)}
    headers = json.loads(_read("headers.json"))
    return HTMLResponse(html, headers={name: "; ".join(headers[name]).format(**digests) for name in headers})


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
