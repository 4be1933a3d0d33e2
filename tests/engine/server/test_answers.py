"""Completions and chats as OpenAI's own client reads them, whole and streamed."""

import threading
from typing import Any

import pytest
from msgspec import Raw

from penstock.engine.sampling_params import SamplingParams
from penstock.engine.server import answer_writer, completions
from penstock.engine.server.embeddings import _vector
from penstock.engine.server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from penstock.engine.server.requests import EmbeddingRequest
from penstock.engine.text.template import ChatTemplate
from penstock.executor.protocol import TokenLogprobs
from tests.support.fake_engine import byte_tokenizer
from tests.support.refusals import cases
from tests.support.running_server import MODEL, Running, events, running

# Completions.


def test_prompts_may_be_one_or_many_texts_or_id_lists(client: Any) -> None:
    for prompt, texts in [
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        ([97, 98], ["ab"]),
        ([[97], [98, 99]], ["aa", "bc"]),
    ]:
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
        assert [choice.text for choice in answer.choices] == texts
        assert [(each.index, each.finish_reason) for each in answer.choices] == [
            (i, "length") for i in range(len(texts))
        ]
        assert answer.id.startswith("cmpl-") and answer.model == MODEL
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=1)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 4, 6)


def test_a_stream_adds_up_to_the_whole_answer_for_every_choice(client: Any) -> None:
    texts: dict[int, str] = {}
    reasons = {}
    stream = client.completions.create(model=MODEL, prompt=["ab", "xyz"], n=2, max_tokens=7, stream=True)
    for event in stream:
        (choice,) = event.choices
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        reasons[choice.index] = choice.finish_reason
    assert texts == {0: "abababa", 1: "abababa", 2: "xyzxyzx", 3: "xyzxyzx"}
    assert set(reasons.values()) == {"length"}


def test_echo_puts_the_prompt_first(client: Any) -> None:
    for prompt in ("abc", [97, 98, 99]):
        assert client.completions.create(model=MODEL, prompt=prompt, echo=True, max_tokens=2).choices[0].text == "abcab"
        stream = client.completions.create(model=MODEL, prompt=prompt, echo=True, max_tokens=2, stream=True)
        assert "".join(event.choices[0].text for event in stream) == "abcab"


def test_logprobs_come_as_parallel_lists_and_zero_of_them_show_the_chosen_token_alone(client: Any) -> None:
    logprobs = client.completions.create(model=MODEL, prompt="abc", logprobs=2, max_tokens=2).choices[0].logprobs
    assert logprobs.tokens == ["a", "b"]
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert logprobs.top_logprobs == [{"a": -0.5, "b": -9999.0}, {"b": -0.5, "c": -9999.0}]
    assert logprobs.text_offset == [0, 1]
    logprobs = client.completions.create(model=MODEL, prompt="abc", logprobs=0, max_tokens=1).choices[0].logprobs
    assert logprobs.top_logprobs == [{"a": -0.5}]


def test_echo_with_logprobs_scores_the_prompt(server: Running, client: Any) -> None:
    asked = {"model": MODEL, "prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 1}
    whole = client.completions.create(**asked).choices[0].logprobs
    assert whole.tokens == ["a", "b", "c", "a"]
    assert whole.token_logprobs == [None, -0.5, -0.5, -0.5]
    assert whole.text_offset == [0, 1, 2, 3]
    pieces = [event.choices[0].logprobs for event in client.completions.create(**asked, stream=True)]
    assert [token for piece in pieces for token in piece.tokens] == whole.tokens
    assert [offset for piece in pieces for offset in piece.text_offset] == whole.text_offset


@pytest.mark.parametrize("fields", [{"echo": True}, {"max_tokens": 5}], ids=["the prompt's", "the answer's"])
def test_many_logprobs_of_a_stream_are_formatted_aside(
    server: Running, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    threads = []

    def noting(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return completion_logprobs(*arguments)

    monkeypatch.setattr(completions, "completion_logprobs", noting)
    monkeypatch.setattr(answer_writer, "LONG_ANSWER", 0 if "max_tokens" in fields else 3)
    server.complete("abcdef", stream=True, logprobs=1, **({"max_tokens": 1} | fields))
    assert threads != [] and server.call(threading.current_thread) not in threads


def test_each_position_and_each_vector_is_encoded_by_itself() -> None:
    """So encoding a reply of a hundred megabytes never keeps the GIL from the event loop for long."""
    tokenizer, tokens = byte_tokenizer(), [TokenLogprobs((97, 98), (-0.5, -1.0), 1)]
    encoded = [
        chat_logprobs(tokenizer, tokens, None)["content"][0],
        completion_logprobs(tokenizer, tokens, 0, None, None)[0]["top_logprobs"][0],
        prompt_logprobs(tokenizer, tokens)[1],
        *(_vector(bytes(8), EmbeddingRequest(input=Raw(), encoding_format=form)) for form in ("float", "base64")),
    ]
    assert [type(each) for each in encoded] == [Raw] * 5


def test_prompt_logprobs_are_listed_by_id(server: Running) -> None:
    choice = server.complete("abc", prompt_logprobs=1, max_tokens=1).json()["choices"][0]
    first, second, _ = choice["prompt_logprobs"]
    assert first is None
    assert second == {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}
    assert choice["logprobs"] is None


def test_a_stop_string_ends_the_answer_and_is_named(server: Running) -> None:
    choice = server.complete("abcd", stop=["cd"], max_tokens=50).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", "cd")
    shown = server.complete("abcd", stop="cd", include_stop_str_in_output=True).json()["choices"][0]
    assert shown["text"] == "abcd"
    streamed = events(server.complete("abcd", stop=["cd"], max_tokens=50, stream=True))
    assert "".join(event["choices"][0]["text"] for event in streamed) == "ab"
    assert streamed[-1]["choices"][0]["stop_reason"] == "cd"


def test_every_sampling_field_reaches_the_engine(server: Running) -> None:
    given = dict(cases(__file__, "sampling fields"))
    for send, is_continuation in ((server.complete, True), (server.chat, False)):
        assert send(**given, logit_bias={"4": 1.5}, priority=3, cache_salt="s").status_code == 200
        params = server.params
        assert {name: getattr(params, name) for name in given} == given
        assert params.logit_bias == {4: 1.5}
        options = server.engine.submitted[-1][2]
        assert (options["priority"], options["cache_salt"]) == (3, "s")
        assert options.get("is_continuation", False) is is_continuation
    assert server.complete(logprobs=3).status_code == 200
    assert server.params.logprobs == 3
    assert set(given) | {"logit_bias", "logprobs", "detokenize", "structured_outputs"} == set(
        SamplingParams.__struct_fields__
    )


def test_defaults_are_openai_s_and_an_unasked_length_is_cut_to_the_context(server: Running) -> None:
    server.complete("abc")
    assert server.params == SamplingParams(max_tokens=16)
    assert server.complete([1] * 995).json()["usage"]["completion_tokens"] == 5
    server.chat()
    assert server.params == SamplingParams(max_tokens=None)
    server.chat(max_completion_tokens=4, max_tokens=9)
    assert server.params.max_tokens == 4


def test_the_model_s_own_defaults_apply_where_the_request_says_nothing() -> None:
    with running(default_sampling={"temperature": 0.6, "top_k": 20, "max_tokens": 7}) as server:
        server.complete(top_k=5)
        assert server.params == SamplingParams(temperature=0.6, top_k=5, max_tokens=7)
        server.chat(temperature=0)
        assert server.params == SamplingParams(temperature=0, top_k=20, max_tokens=7)


def test_a_truncated_prompt_keeps_its_end(server: Running) -> None:
    answer = server.complete("abcdef", truncate_prompt_tokens=2, max_tokens=2, echo=True).json()
    assert answer["choices"][0]["text"] == "efef"
    asked = {"truncate_prompt_tokens": 2, "truncation_side": "right", "max_tokens": 1, "return_token_ids": True}
    assert server.complete("abcdef", **asked).json()["choices"][0]["prompt_token_ids"] == [*b"ab"]
    assert server.chat(**asked).json()["prompt_token_ids"] == [*b"us"]
    assert server.complete([97] * 5000, truncate_prompt_tokens=-1).status_code == 400  # ids beyond the context: refused
    assert server.complete("a" * 5000, truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == 999


# Chats.


def test_a_chat_renders_the_template_and_answers_as_the_assistant(client: Any) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "U"}]}],
        max_completion_tokens=19,
    )
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", "system: S\nuser: U\n>")
    assert answer.choices[0].finish_reason == "length"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage.prompt_tokens_details.cached_tokens == 16


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_usage_explains_the_cache_when_asked_to_and_hides_other_salts(
    server: Running, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.engine, "miss", "other_salt")
    asked = {"prompt": "a" * 20} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a" * 9}]}
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 2, "stream": stream, **asked}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    for explains in (True, None):
        answer = server.post(path, body | {"explain_cache": explains})
        usage = (events(answer)[-1] if stream else answer.json())["usage"]
        report = [{"cached": {"device": 16}, "reason": "new_tokens", "differs_at": 0}]
        expected = {"cached_tokens": 16} | ({"penstock": report} if explains else {})
        assert usage["prompt_tokens_details"] == expected


def test_usage_in_a_stream_is_its_last_event_or_in_every_one(server: Running) -> None:
    for send in (server.complete, server.chat):
        assert all("usage" not in event for event in events(send(max_tokens=3, stream=True)))
        *pieces, last = events(send(max_tokens=3, stream=True, stream_options={"include_usage": True}))
        assert [piece["usage"] for piece in pieces] == [None] * 3
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 3
        alone = send(max_tokens=3, stream=True, stream_options={"continuous_usage_stats": True})
        assert all("usage" not in event for event in events(alone))
        options = {"include_usage": True, "continuous_usage_stats": True}
        *pieces, last = events(send(max_tokens=3, stream=True, stream_options=options))
        assert [piece["usage"]["completion_tokens"] for piece in pieces] == [1, 2, 3]


def test_chat_logprobs_come_with_bytes(client: Any) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "logprobs": True, "max_tokens": 2}
    first, second = client.chat.completions.create(**asked, top_logprobs=2).choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("u", -0.5, [117])
    assert [(top.token, top.logprob) for top in second.top_logprobs] == [("s", -0.5), ("t", -9999.0)]
    (plain, _) = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert plain.top_logprobs == []
    stream = client.chat.completions.create(**asked, stream=True)
    assert [event.choices[0].logprobs.content[0].token for event in stream] == ["u", "s"]


def test_template_variables_reach_the_template(server: Running) -> None:
    def prompt(**fields: object) -> str:
        server.chat(max_tokens=1, **fields)
        return server.prompt

    assert prompt(chat_template_kwargs={"enable_thinking": False}) == "user: hello\n[thinking False]>"
    assert prompt(reasoning_effort="low") == "user: hello\n[thinking True][effort low]>"
    assert prompt(verbosity="low") == "user: hello\n>"
    assert prompt(add_generation_prompt=False) == "user: hello\n"
    assert prompt(continue_final_message=True) == "user: hello"


def test_verbosity_is_handed_to_a_template_that_has_it_and_named_where_it_is_ignored(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "verbosity": "low"}
    with running(template=ChatTemplate("{{ verbosity or 'medium' }}{% for m in messages %}{% endfor %}")) as short:
        for fields, prompt in (({}, "low"), ({"chat_template_kwargs": {"verbosity": "high"}}, "high")):
            answer = short.chat(**body, **fields, max_tokens=1)
            assert (short.prompt, "x-penstock-ignored" in answer.headers) == (prompt, False)
        assert bytes(short.post("/tokenize", body).json()["tokens"]) == b"low"
    for path in ("/v1/chat/completions", "/tokenize"):
        assert server.post(path, body).headers["x-penstock-ignored"] == "verbosity"


def test_what_a_whole_answer_lacks_of_its_prompt_is_null(server: Running) -> None:
    fields = ("prompt_token_ids", "prompt_logprobs")
    (choice,) = server.complete(max_tokens=1).json()["choices"]
    for reply in (choice, server.chat(max_tokens=1).json()):
        assert [reply[field] for field in fields] == [None, None]
    for event in events(server.complete(max_tokens=1, stream=True)):
        assert not {*fields} & event["choices"][0].keys()


def test_a_model_without_a_template_can_only_complete(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.app.service, "template", None)
    answer = server.chat()
    assert answer.status_code == 400
    assert "no chat template" in answer.json()["error"]["message"]
    assert server.complete(max_tokens=1).status_code == 200


# Embeddings, tokens.


def test_embeddings_come_in_order_as_numbers_or_base64(client: Any) -> None:
    answer = client.embeddings.create(
        model=MODEL, input=["a", "abc"], encoding_format="float", extra_body={"normalize": False}
    )
    assert [item.embedding for item in answer.data] == [[1.0, 97.0, 2.0, 4.0], [3.0, 97.0, 2.0, 4.0]]
    assert answer.usage.prompt_tokens == 4
    decoded = client.embeddings.create(model=MODEL, input="a")  # the client asks for base64 by itself
    assert decoded.data[0].embedding == pytest.approx([value / 97.113 for value in (1, 97, 2, 4)], rel=1e-3)


def test_pooling_is_the_server_s_unless_asked_for() -> None:
    with running(pooling="mean") as server:
        server.post("/v1/embeddings", {"input": "a"})
        server.post("/v1/embeddings", {"input": "a", "pooling": "last"})
        assert [options["pooling"] for _, _, options in server.engine.submitted] == ["mean", "last"]


def test_tokenizing_and_back(server: Running) -> None:
    tokens = server.post("/tokenize", {"prompt": "né"}).json()
    assert tokens == {"count": 3, "max_model_len": 1000, "tokens": [110, 195, 169], "token_strs": None}
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "né"}
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    messages = {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}
    assert bytes(server.post("/tokenize", messages).json()["tokens"]) == b"user: x\n"


@pytest.mark.parametrize("as_ids", [False, True])
def test_text_offsets_are_places_in_the_text(server: Running, client: Any, as_ids: bool) -> None:
    text = "aé€𝄞b"
    asked = {"model": MODEL, "prompt": text, "logprobs": 0, "max_tokens": len(text.encode())}
    asked["extra_body"] = {"return_tokens_as_token_ids": as_ids}
    expected = [place for place, character in enumerate(text) for _ in character.encode()]
    whole = client.completions.create(**asked).choices[0]
    assert (whole.text, whole.logprobs.text_offset) == (text, expected)
    pieces = [event.choices[0].logprobs for event in client.completions.create(**asked, stream=True)]
    assert len(pieces) > 1 and [offset for piece in pieces for offset in piece.text_offset] == expected
