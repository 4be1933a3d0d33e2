"""The page as it is sent, without a browser: one document, locked down, that asks only for routes that there are."""

import base64
import hashlib
import re
from collections.abc import Iterator

import httpx
import pytest

from penstock.engine.http.page.document import NAMES, Kind, document
from penstock.engine.messages import Stats
from penstock.executor.protocol import ExpertUpdate
from penstock.router.app import OWN, PROXIED
from tests.support.router_fleet import running_router
from tests.support.router_stub import stub
from tests.support.running_server import running

KINDS = tuple(NAMES)


def html(kind: Kind) -> str:
    return document(kind).body.decode()


@pytest.fixture(scope="module")
def answers() -> Iterator[dict[Kind, httpx.Response]]:
    """`/` as the real server and the real router answer it, both with a key that no request carries."""
    with running(api_keys=("sk-secret",)) as server, running_router(api_keys=("sk-secret",)) as router:
        yield {"live": server.http.get("/"), "fleet": router.http.get("/")}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_sent_without_a_key_with_its_headers_and_never_stored(
    answers: dict[Kind, httpx.Response], kind: Kind
) -> None:
    answer = answers[kind]
    assert answer.status_code == 200 and answer.content == document(kind).body
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "sk-secret" not in answer.text


@pytest.mark.parametrize("kind", KINDS)
def test_the_policy_lets_only_this_script_and_style_run_and_only_this_origin_be_asked(
    answers: dict[Kind, httpx.Response], kind: Kind
) -> None:
    policy = dict(part.split(" ", 1) for part in answers[kind].headers["content-security-policy"].split("; "))
    for element in ("script", "style"):
        (text,) = re.findall(rf"<{element}[^>]*>(.*?)</{element}>", html(kind), re.DOTALL)
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


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_comes_from_elsewhere(kind: Kind) -> None:
    text = html(kind)
    assert [address for address in re.findall(r"https?://[^\"'\s]+", text) if "www.w3.org" not in address] == []
    assert re.findall(r"<(?:link|script|img|iframe)[^>]*(?:src|href)=\"(?!data:)", text) == []
    assert re.findall(r"@import|url\(|\bimport\s", text) == []


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_makes_html_or_code_of_text_or_writes_the_key_where_it_stays(kind: Kind) -> None:
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|Function\(|\.cookie"
    assert re.findall(forbidden, html(kind)) == []
    assert re.findall(r"localStorage.|(?<=local\.setItem\()\w+|\w+(?=\.setItem\(\"key\")", html(kind)) == [
        *('localStorage"', "session", "name")  # the one place that has it; where the key goes; what `store` is given
    ]
    assert set(re.findall(r"\bstore\((\w+)", html(kind))) == {"name", "SETTINGS", "KEPT"}
    assert re.findall(r"\son\w+=|style=\"", re.sub(r"<(script|style).*?</\1>", "", html(kind), flags=re.DOTALL)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_route_that_it_asks_for_is_there(kind: Kind) -> None:
    asked = set(re.findall(r"\bask\(\s*\"(/[^\"]*)\"", html(kind)))
    assert asked == {"/metrics", "/v1/models", "/v1/chat/completions"} | ({"/replicas"} if kind == "fleet" else set())
    assert len(re.findall(r"\bfetch\(", html(kind))) == 1  # in `ask`
    if kind == "fleet":
        assert asked <= OWN | PROXIED
    else:
        with running() as server:
            assert asked <= server.app.templates


@pytest.mark.parametrize("kind", KINDS)
def test_every_metric_that_it_shows_is_one_that_is_said(kind: Kind) -> None:
    if kind == "fleet":
        with stub() as backend, running_router(backend.url) as router:
            said = router.http.get("/metrics").text
    else:
        with running() as server:
            tiers: dict[str, dict[str, float]] = {"host": {"used_blocks": 1, "capacity_blocks": 2}}
            server.engine.stats = Stats(num_blocks=4, tiers=tiers, experts=ExpertUpdate(balance=1.0))
            said = server.http.get("/metrics").text
    families = set(re.findall(r"^# TYPE (\S+)", said, re.MULTILINE))
    named = set(re.findall(r"\"((?:vllm|penstock|process)[_:]\w+)\"", html(kind)))
    missing = {name for name in named if not families & {name, re.sub(r"_(sum|count|bucket)$", "", name)}}
    assert len(named) > 8 and missing == set()


@pytest.mark.parametrize("kind", KINDS)
def test_every_element_that_the_script_looks_up_is_there_once(kind: Kind) -> None:
    wanted = set(re.findall(r"byId\(\"([\w-]+)\"\)", html(kind)))
    there = re.findall(r"\sid=\"([\w-]+)\"", html(kind))
    assert len(there) == len(set(there)) and wanted - set(there) == set()


def test_a_head_is_answered_like_a_get_and_nothing_else_is() -> None:
    with running_router() as router:
        assert router.http.head("/").headers["content-length"] == str(len(document("fleet").body))
        assert router.http.post("/").status_code == 405
