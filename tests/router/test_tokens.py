"""Tokenizing in the router: the same ids as the engine's, sent in place of the text unless they might differ."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from tokenizers import AddedToken

from penstock.engine.front.hf_interface import messages_of
from penstock.engine.http import token_form
from penstock.engine.http.body import split_object
from penstock.engine.http.errors import HttpError
from penstock.engine.text.model_text import load_text
from penstock.engine.text.template import ChatTemplate, text_digest
from penstock.engine.text.tokenizer import Tokenizer
from penstock.router.placement.load import PolicyConfig
from penstock.router.placement.placement import Placement, ReplicaInfo
from penstock.router.placement.prompts import CHAT, COMPLETIONS, PreparedRequest, PromptReader, RequestFields
from penstock.router.placement.segments import MIN_CHARS, OVERHEAD_BYTES, SegmentCache
from tests.support.fake_engine import byte_tokenizer, line_template
from tests.support.refusals import cases, table
from tests.support.router_fleet import RunningRouter, client_request, mock_replicas, running_router
from tests.support.router_stub import stub


@pytest.fixture(scope="module")
def smollm() -> tuple[Tokenizer, ChatTemplate | None]:
    return load_text(None)


@pytest.fixture(scope="module")
def tokenizing() -> Iterator[RunningRouter]:
    with mock_replicas(2) as replicas, running_router(*(each.url for each in replicas), tokenizes=True) as router:
        yield router


def test_a_text_cut_at_special_tokens_has_the_ids_of_the_whole(smollm: tuple[Tokenizer, ChatTemplate | None]) -> None:
    tokenizer, _ = smollm
    cache = SegmentCache(tokenizer)
    assert cache.is_exact
    specials = [str(tokenizer.backend.id_to_token(token_id)) for token_id in sorted(tokenizer.special_ids)]
    words, rng = cases(__file__, "pieces of texts"), random.Random(1)
    for _ in range(400):
        is_special = rng.choices((True, False), (1, 4), k=12)
        text = "".join(
            rng.choice(specials) if each else rng.choice(words) * rng.randrange(1, 12) for each in is_special
        )
        for adds in (False, True):
            packed = cache.encode(text, adds)
            assert memoryview(packed).cast("i").tolist() == tokenizer.encode(text, adds)
        cache.check()


def test_a_conversation_that_grows_is_tokenized_only_where_it_is_new(
    smollm: tuple[Tokenizer, ChatTemplate | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, template = smollm
    cache = SegmentCache(tokenizer)
    monkeypatch.setattr(tokenizer, "encode_batch", encode := Mock(wraps=tokenizer.encode_batch))
    messages: list[dict[str, Any]] = []
    assert template is not None
    for turn in range(4):
        messages.append({"role": "user", "content": f"Question {turn}: " + "why is that so? " * 20})
        messages.append({"role": "assistant", "content": f"Answer {turn}: " + "because it is. " * 20})
        encode.reset_mock()
        cache.encode(template.render(messages_of(messages)), False)
        assert sum(map(len, encode.call_args.args[0])) < 900


def test_a_segment_may_fill_the_whole_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, text = byte_tokenizer(), "x" * MIN_CHARS
    cache = SegmentCache(tokenizer, OVERHEAD_BYTES + 8 * MIN_CHARS)
    monkeypatch.setattr(tokenizer, "encode_batch", encode := Mock(wraps=tokenizer.encode_batch))
    assert cache.encode(text, False) == cache.encode(text, False)
    encode.assert_called_once()


def test_the_memory_of_segments_is_bounded(smollm: tuple[Tokenizer, ChatTemplate | None]) -> None:
    cache = SegmentCache(smollm[0], capacity_bytes=20_000)
    for index in range(100):
        cache.encode(f"{index} " + "word " * 100 + "<|im_end|>" + f"{index} again " * 50, False)
        cache.check()


def test_a_text_is_not_cut_at_special_tokens_that_strip_spaces() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_special_tokens([AddedToken("<greedy>", lstrip=True, special=True)])
    tokenizer.backend.add_tokens([AddedToken("<eos>x", normalized=False)])
    cache = SegmentCache(tokenizer)
    assert not cache.is_exact  # the first is greedy, and the other may belong to a longer token
    text = "a <greedy> b<eos>x"
    assert memoryview(cache.encode(text, False)).cast("i").tolist() == tokenizer.encode(text)


def test_answers_are_the_same_with_and_without_tokenizing(tokenizing: RunningRouter) -> None:
    replica = next(iter(tokenizing.fleet.replicas))
    for body in table(__file__, "bodies"):
        path = CHAT if "messages" in body else COMPLETIONS
        through, direct = (tokenizing.http.post(url + path, json=body) for url in (tokenizing.url, replica))
        assert through.status_code == direct.status_code, body
        assert comparable(through.json()) == comparable(direct.json()), body
        texts = [tokenizing.http.post(f"{url}{path}/render", json=body).text for url in (tokenizing.url, replica)]
        assert len({re.sub('"request_id":"[^"]+"', "", text) for text in texts}) == 1, body


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """Return what two answers to the same request have in common."""
    (answer.get("usage") or {}).pop("prompt_tokens_details", None)
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


def _prepared(body: dict[str, Any], texts: PromptReader | None = None, fingerprint: bytes = b"m") -> PreparedRequest:
    placement = Placement(PolicyConfig())
    placement.add_replica("a", ReplicaInfo(fingerprint=fingerprint, block_size=16, num_blocks=64))
    raw = json.dumps(body).encode()
    texts = texts or PromptReader(byte_tokenizer(), line_template())
    request = client_request(CHAT if "messages" in body else COMPLETIONS, raw)
    return texts.prepare(request, msgspec.json.decode(raw, type=RequestFields), placement)


USER = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(("body", "is_exact"), table(__file__, "exact ids", USER=USER))
def test_ids_are_sent_only_if_the_engine_would_make_the_same(body: dict[str, Any], is_exact: bool) -> None:
    assert (_prepared(body).body_with_ids is not None) == is_exact


def test_tools_are_rendered_as_the_engine_renders_them(tokenizing: RunningRouter) -> None:
    replica = next(iter(tokenizing.fleet.replicas))
    for fields in cases(__file__, "tools of chats"):
        answer = tokenizing.http.post(f"{replica}{CHAT}/render", json={"messages": USER, **fields})
        raw = answer.request.content
        ids = tokenizing.app.prompts.ids(CHAT, raw, RequestFields(), split_object(raw), is_ours=True)
        assert ids is not None and [*memoryview(ids[0]).cast("i")] == answer.json()["token_ids"], fields


def test_engines_of_other_kinds_show_their_templates_all_of_a_tool() -> None:
    body = {"messages": USER, "tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}
    assert _prepared(body).num_tokens + len(', "strict": true') == _prepared(body, fingerprint=b"").num_tokens


def test_without_a_tokenizer_a_token_is_four_bytes() -> None:
    prepared = _prepared({"prompt": "x" * 400}, PromptReader())
    assert (prepared.num_tokens, prepared.body_with_ids) == (100, None)


def test_after_a_template_that_loops_chats_are_rendered_in_a_thread() -> None:
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    reader = PromptReader(
        byte_tokenizer(), ChatTemplate("{% if messages[0].content == 'loop' %}" + loops + "{% endif %}x")
    )
    assert not reader.is_long(CHAT, b"{}")
    prepared = _prepared({"messages": [{"role": "user", "content": "loop"}]}, reader)
    assert prepared.body_with_ids is None and prepared.num_tokens > 0  # the replica gets the text
    assert reader.is_long(CHAT, b"{}") and not reader.is_long(COMPLETIONS, b"{}")
    assert _prepared({"messages": USER}, reader).body_with_ids is not None


@pytest.mark.parametrize(("path", "num_tokens"), cases(__file__, "work of 400 bytes", **globals()))
def test_only_requests_whose_text_is_computed_count_as_work(path: str, num_tokens: int) -> None:
    prepared = PromptReader().prepare(client_request(path, b"x" * 400), RequestFields(), Placement(PolicyConfig()))
    assert (prepared.prompt, prepared.num_tokens) == (None, num_tokens)


@pytest.mark.parametrize(
    ("tokenizes", "prompt"), [(True, "abc"), (False, [1, 2, 3])], ids=["another tokenizer", "no tokenizer"]
)
def test_a_replica_that_may_not_know_the_binary_form_gets_json(tokenizes: bool, prompt: str | list[int]) -> None:
    with stub() as backend:
        backend.models = b'{"data": [{"id": "m", "text_digest": "another"}]}'
        with running_router(backend.url, tokenizes=tokenizes) as router:
            router.complete(prompt)
    (seen,) = backend.seen
    assert seen.header(b"content-type") == [b"application/json"] and json.loads(seen.body)["prompt"] == prompt


def test_the_digest_tells_tokenizers_and_templates_apart(smollm: tuple[Tokenizer, ChatTemplate | None]) -> None:
    texts = [(byte_tokenizer(), None), (byte_tokenizer(), line_template()), (smollm[0], None), smollm]
    assert len({text_digest(*each) for each in texts}) == 4
    assert text_digest(*texts[1]) == text_digest(byte_tokenizer(), line_template())


@pytest.mark.parametrize(("form", "message"), table(__file__, "binary forms"))
def test_a_binary_form_of_the_wrong_size_is_refused(form: bytes, message: str) -> None:
    with pytest.raises(HttpError, match=message) as refusal:
        token_form.unpack(form)
    assert refusal.value.status == 400


def test_no_ids_and_ids_outside_the_vocabulary_are_refused_in_the_binary_form(tokenizing: RunningRouter) -> None:
    url = next(iter(tokenizing.fleet.replicas))
    for ids in (b"", b"\xff\xff\xff\xff", b"\xe8\x03\x00\x00"):
        form = token_form.join(b'{"prompt":null}', ids)
        answer = tokenizing.http.post(
            url + COMPLETIONS, content=form, headers={"content-type": token_form.CONTENT_TYPE.decode()}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
