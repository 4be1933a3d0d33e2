"""The page as it is sent, without a browser: one document, locked down, that asks only for routes that there are."""

import base64
import hashlib
import re
from collections.abc import Iterator

import pytest

from penstock.engine.page.document import document
from tests.support.router_fleet import running_router
from tests.support.running_server import Running, running

HTML = bytes(document().body).decode()
KEY = {"authorization": "Bearer sk-secret"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(api_keys=("sk-secret",)) as server:
        yield server


def test_it_is_sent_without_a_key_with_its_headers_and_never_stored(server: Running) -> None:
    answer = server.http.get("/")
    assert answer.status_code == 200 and answer.content == document().body
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "sk-secret" not in answer.text
    assert server.http.head("/").headers["content-length"] == str(len(document().body))
    assert server.http.post("/", headers=KEY).status_code == 405


def test_the_policy_lets_only_this_script_and_style_run_and_only_this_origin_be_asked(server: Running) -> None:
    policy = dict(part.split(" ", 1) for part in server.http.get("/").headers["content-security-policy"].split("; "))
    for element in ("script", "style"):
        (text,) = re.findall(rf"<{element}[^>]*>(.*?)</{element}>", HTML, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy.pop(f"{element}-src") == f"'sha256-{digest}'"
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }


def test_nothing_comes_from_elsewhere() -> None:
    text = HTML
    assert [address for address in re.findall(r"https?://[^\"'\s]+", text) if "www.w3.org" not in address] == []
    assert re.findall(r"<(?:link|script|img|iframe)[^>]*(?:src|href)=\"(?!data:)", text) == []
    assert re.findall(r"@import|url\(|\bimport\s", text) == []


def test_nothing_makes_html_or_code_of_text_or_writes_the_key_where_it_stays() -> None:
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|Function\(|\.cookie"
    assert re.findall(forbidden, HTML) == []
    assert re.findall(r"localStorage.|(?<=local\.setItem\()\w+|\w+(?=\.setItem\(\"key\")", HTML) == [
        *('localStorage"', "session", "name")  # the one place that has it; where the key goes; what `store` is given
    ]
    assert set(re.findall(r"\bstore\((\w+)", HTML)) == {"name", "SETTINGS", "KEPT"}
    assert re.findall(r"\son\w+=|style=\"", re.sub(r"<(script|style).*?</\1>", "", HTML, flags=re.DOTALL)) == []


def test_every_route_that_it_asks_for_is_there(server: Running) -> None:
    asked = set(re.findall(r"\bask\(\s*\"(/[^\"]*)\"", HTML))
    assert asked == {"/metrics", "/v1/models", "/v1/chat/completions"}
    assert len(re.findall(r"\bfetch\(", HTML)) == 1  # in `ask`
    assert asked <= server.app.templates


def test_every_element_that_the_script_looks_up_is_there_once() -> None:
    wanted = set(re.findall(r"byId\(\"([\w-]+)\"\)", HTML))
    there = re.findall(r"\sid=\"([\w-]+)\"", HTML)
    assert len(there) == len(set(there)) and wanted - set(there) == set()


def test_a_router_has_no_page_and_says_where_to_look() -> None:
    with running_router(api_keys=("sk-secret",)) as router:
        answer = router.http.get("/")
        assert answer.status_code == 200 and answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert "/replicas" in answer.text and "sk-secret" not in answer.text
        assert router.http.head("/").headers["content-length"] == str(len(answer.content))
    with running_router() as router:  # without keys: else the key comes first
        assert router.http.post("/").status_code == 405
