"""Completions and chats as OpenAI's own client reads them, whole and streamed."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from penstock.engine.front.submit import begin_answer
from penstock.engine.sampling_params import SamplingParams
from penstock.engine.text.template import ChatTemplate
from penstock.engine.text.tokenizer import Tokenizer
from tests.support.fake_engine import INFO, FakeEngine, byte_tokenizer
from tests.support.refusals import cases
from tests.support.running_server import MODEL, Running, events, running, until
from tests.support.text_samples import sentencepiece
from tests.support.three_apis import APIS

# Completions.

Choice = dict[str, Any]


def choices_of(replies: list[dict[str, Any]]) -> list[Choice]:
    """Return the choices of a whole answer, or those that the events of a stream add up to."""
    choices: dict[int, Choice] = {}
    for part in [part for reply in replies for part in reply["choices"]]:
        choice = choices.setdefault(part["index"], {"text": "", "logprobs": {}})
        assert choice.get("finish_reason") is None, "nothing comes behind the end"
        choice["text"] += part["text"]
        for name, values in (part["logprobs"] or {}).items():
            choice["logprobs"][name] = choice["logprobs"].get(name, []) + values
        choice |= {name: part.get(name) for name in ("finish_reason", "stop_reason")}
    return [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize(("fields", "texts", "expected"), cases(__file__, "completions"))
def test_a_completion_is_the_same_whole_and_streamed(
    server: Running, fields: dict[str, Any], texts: list[str], expected: Choice
) -> None:
    reply = server.complete(**fields).json()
    whole = choices_of([reply])
    assert choices_of(events(server.complete(**fields, stream=True))) == whole
    assert [choice["text"] for choice in whole] == texts and reply["id"].startswith("cmpl-")
    end = {"finish_reason": "length", "stop_reason": None, "logprobs": {}, **expected}
    logprobs = end.pop("logprobs")
    for choice in whole:
        assert choice == {**choice, **end}
        assert choice["logprobs"] == {**choice["logprobs"], **logprobs} and bool(choice["logprobs"]) == bool(logprobs)


def test_the_usage_of_a_completion_counts_all_prompts_and_choices(client: Any) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=1)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 4, 6)
    assert answer.model == MODEL


def test_the_offsets_of_an_echo_are_those_of_its_text() -> None:
    """Which lacks the token that begins every prompt, and the space before the first word."""
    tokenizer = Tokenizer(sentencepiece(), eos_ids=frozenset())
    engine = FakeEngine(tokenizer=tokenizer, info=msgspec.structs.replace(INFO, vocab_size=tokenizer.vocab_size))
    with running(engine, tokenizer) as server:
        (choice,) = server.complete("hello there", echo=True, logprobs=0, max_tokens=1).json()["choices"]
    assert choice["logprobs"]["text_offset"][:7] == [0, 0, 5, 6, 7, 9, 10]


def test_prompt_logprobs_are_listed_by_id(server: Running) -> None:
    choice = server.complete("abc", prompt_logprobs=1, max_tokens=1).json()["choices"][0]
    first, second, _ = choice["prompt_logprobs"]
    assert first is None
    assert second == {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}
    assert choice["logprobs"] is None


@pytest.mark.parametrize("num_written", [1, 0])
def test_prompts_up_to_the_limit_are_scored_and_longer_ones_refused(server: Running, num_written: int) -> None:
    """An evaluation harness, lm_eval, scores so; older versions of it request no token."""
    fields = {"temperature": 0, "max_tokens": num_written, "logprobs": 1, "seed": 1234, "echo": True}
    longest = [1] * (server.engine.info.max_model_len - num_written)
    scored = server.complete([longest], **fields)
    assert scored.status_code == 200 and scored.json()["usage"]["total_tokens"] == len(longest) + num_written
    refused = server.complete([[*longest, 7]], **fields)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"


def test_every_sampling_field_reaches_the_engine(server: Running) -> None:
    fields = dict(cases(__file__, "sampling fields"))
    begun = partial(server.chat, continue_final_message=True, add_generation_prompt=False)
    for send, is_continuation in ((server.complete, True), (server.chat, False), (begun, True)):
        assert send(**fields, logit_bias={"4": 1.5}, priority=3, cache_salt="s").status_code == 200
        params = server.params
        assert {name: getattr(params, name) for name in fields} == fields
        assert params.logit_bias == {4: 1.5}
        options = server.engine.submitted[-1][2]
        assert (options["priority"], options["cache_salt"]) == (3, "s")
        assert options.get("is_continuation", False) is is_continuation
    assert server.complete(logprobs=3).status_code == 200
    assert server.params.logprobs == 3
    others = {"logit_bias", "logprobs", "detokenize", "structured_outputs"}
    assert fields.keys() | others == {*SamplingParams.__struct_fields__}


def test_every_sampling_field_reaches_the_core_or_concerns_the_text_alone() -> None:
    def sent(**fields: Any) -> Any:
        params = SamplingParams(**{"seed": 1, **fields})
        answer = begin_answer("r", b"\1\0\0\0", params, INFO, None, Mock(), sampling=params.sampling([3]))
        return msgspec.to_builtins(answer.messages)

    fields = dict(cases(__file__, "sampling fields")) | {"logit_bias": {7: 1.0}, "logprobs": 1}
    unsent = {name for name, value in fields.items() if sent(**{name: value}) == sent()}
    assert unsent == {"stop", "include_stop_str_in_output", "skip_special_tokens"}


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


def test_a_seed_of_the_server_is_used_for_requests_without_one() -> None:
    def sampled(**settings: Any) -> list[int | None]:
        with running(**settings) as server:
            for _ in range(3):
                server.complete("abc", max_tokens=1, temperature=1)
            server.complete("abc", max_tokens=1, temperature=1, seed=77)
            return [params.seed for _, params, _ in server.engine.submitted]

    assert sampled(seed=5) == sampled(seed=5) != sampled(seed=6)
    assert len(set(sampled(seed=5))) == 4 and sampled(seed=5)[-1] == 77
    assert sampled() == [None, None, None, 77]  # drawn when it is handed to the core


def test_a_truncated_prompt_keeps_its_end(server: Running) -> None:
    fields = {"truncate_prompt_tokens": 2, "truncation_side": "right", "max_tokens": 1, "return_token_ids": True}
    assert server.complete("abcdef", **fields).json()["choices"][0]["prompt_token_ids"] == [*b"ab"]
    assert server.chat(**fields).json()["prompt_token_ids"] == [*b"us"]
    assert server.complete([97] * 5000, truncate_prompt_tokens=-1).status_code == 400  # ids beyond the context: refused
    assert server.complete("a" * 5000, truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == 999


def test_openais_package_reads_a_chat_whole_and_streamed(client: Any) -> None:
    fields = {"model": MODEL, "messages": [{"role": "user", "content": "U"}], "max_completion_tokens": 19}
    answer = client.chat.completions.create(**fields, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.message.content == "user: U\n>" * 2 + "u"
    tops = choice.logprobs.content[1].top_logprobs
    assert [(top.token, top.logprob) for top in tops] == [("s", -0.5), ("t", -9999.0)]
    stream = list(client.chat.completions.create(**fields, logprobs=True, stream=True))
    assert "".join(event.choices[0].delta.content for event in stream) == choice.message.content
    assert [event.choices[0].logprobs.content[0].token for event in stream] == [*choice.message.content]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_usage_explains_the_cache_on_request_and_hides_other_salts(
    server: Running, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.engine, "miss", "other_salt")
    prompt = {"prompt": "a" * 20} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a" * 9}]}
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 2, "stream": stream, **prompt}
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
        alone = send(max_tokens=3, stream=True, stream_options={"continuous_usage_stats": True, "include_usage": None})
        assert all("usage" not in event for event in events(alone))
        options = {"include_usage": True, "continuous_usage_stats": True}
        *pieces, last = events(send(max_tokens=3, stream=True, stream_options=options))
        assert [piece["usage"]["completion_tokens"] for piece in pieces] == [1, 2, 3]


@pytest.mark.parametrize("name", APIS)
def test_the_operator_s_template_variables_reach_the_template_in_every_api(name: str) -> None:
    source = "{% for m in messages %}{% endfor %}{{ enable_thinking }} {{ level }}"
    with running(template=ChatTemplate(source, {}, {"enable_thinking": False, "level": 7})) as server:
        assert APIS[name].ask(server).status_code == 200 and server.prompt == "False 7"
        switch = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048}
        fields = switch if name == "messages" else {"chat_template_kwargs": {"enable_thinking": True}}
        assert APIS[name].ask(server, **fields).status_code == 200 and server.prompt == "True 7"


def test_verbosity_reaches_a_template_that_has_it_and_is_named_elsewhere(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "verbosity": "low"}
    with running(template=ChatTemplate("{{ verbosity or 'medium' }}{% for m in messages %}{% endfor %}")) as short:
        for fields, prompt in (({}, "low"), ({"chat_template_kwargs": {"verbosity": "high"}}, "high")):
            answer = short.chat(**body, **fields, max_tokens=1)
            assert (short.prompt, "x-penstock-ignored" in answer.headers) == (prompt, False)
        assert bytes(short.post("/tokenize", body).json()["tokens"]) == b"low"
    for path in ("/v1/chat/completions", "/tokenize"):
        assert server.post(path, body).headers["x-penstock-ignored"] == "verbosity"
    assert server.prompt == "user: x\n>"


def test_fields_of_the_prompt_that_a_whole_answer_lacks_are_null(server: Running) -> None:
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


def test_embeddings_come_in_order_as_numbers_or_base64(client: Any) -> None:
    plain = {"encoding_format": "float", "extra_body": {"normalize": False}}
    answer = client.embeddings.create(model=MODEL, input=["a", "abc"], **plain)
    assert [item.embedding for item in answer.data] == [[1.0, 97.0, 2.0, 4.0], [3.0, 97.0, 2.0, 4.0]]
    assert answer.usage.prompt_tokens == 4
    decoded = client.embeddings.create(model=MODEL, input="a")  # the client asks for base64 by itself
    assert decoded.data[0].embedding == pytest.approx([value / 97.113 for value in (1, 97, 2, 4)], rel=1e-3)


def test_an_embedding_that_is_ended_early_is_a_503() -> None:
    engine = FakeEngine()
    engine.hold = True
    with running(engine) as server, ThreadPoolExecutor(1) as threads:
        asking = threads.submit(server.post, "/v1/embeddings", {"input": "a"})
        until(lambda: len(engine.answers) == 1)
        server.call(lambda: engine.abort(engine.answers))
        assert asking.result(60).status_code == 503


def test_pooling_is_the_server_s_unless_the_request_names_another() -> None:
    with running(pooling="mean") as server:
        server.post("/v1/embeddings", {"input": "a"})
        server.post("/v1/embeddings", {"input": "a", "pooling": "last"})
        assert [options["pooling"] for _, _, options in server.engine.submitted] == ["mean", "last"]


def test_a_text_is_tokenized_and_decoded_again(server: Running) -> None:
    tokens = server.post("/tokenize", {"prompt": "né"}).json()
    assert tokens == {"count": 3, "max_model_len": 1000, "tokens": [110, 195, 169], "token_strs": None}
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "né"}
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    texts = server.post("/tokenize", {"prompt": "abc", "add_special_tokens": False, "return_token_strs": True}).json()
    assert (texts["tokens"], texts["token_strs"]) == ([97, 98, 99], ["a", "b", "c"])
    messages = {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}
    assert bytes(server.post("/tokenize", messages).json()["tokens"]) == b"user: x\n"


def test_an_evaluation_harness_learns_the_tokenizer(server: Running) -> None:
    info = server.http.get("/tokenizer_info").json()
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert info["chat_template"] and set(byte_tokenizer().special_tokens) <= set(info)
