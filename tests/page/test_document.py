"""The page as it is sent, without a browser: one public document under a policy that permits its own parts alone."""

import base64
import hashlib
import re

from penstock.engine.page.document import document
from tests.support.refusals import cases
from tests.support.router_fleet import running_router
from tests.support.running_server import Running, started

KEY = {"authorization": "Bearer sk-secret"}
server = started(api_keys=("sk-secret",))


def test_it_is_sent_without_a_key_with_its_headers_and_never_stored(server: Running) -> None:
    answer = server.http.get("/")
    assert answer.status_code == 200 and answer.content == document().body
    assert {*cases(__file__, "headers of the page")} <= {*answer.headers.items()}
    assert "sk-secret" not in answer.text
    assert server.http.head("/").headers["content-length"] == str(len(document().body))
    assert server.http.post("/", headers=KEY).status_code == 405


def test_its_policy_permits_only_its_own_script_style_and_origin(server: Running) -> None:
    """The browser then refuses to load from elsewhere, to run other code and to convert text to HTML."""
    answer = server.http.get("/")
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    for element in ("script", "style"):
        (text,) = re.findall(rf"<{element}[^>]*>(.*?)</{element}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy.pop(f"{element}-src") == f"'sha256-{digest}'"
    assert policy == dict(cases(__file__, "policy of the page"))


def test_a_router_has_no_page_and_says_where_to_look() -> None:
    with running_router(api_keys=("sk-secret",)) as router:
        answer = router.http.get("/")
        assert answer.status_code == 200 and answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert "/replicas" in answer.text and "sk-secret" not in answer.text
        assert router.http.head("/").headers["content-length"] == str(len(answer.content))
    with running_router() as router:  # without keys, which would be checked before the method
        assert router.http.post("/").status_code == 405
