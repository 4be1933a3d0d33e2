"""Chats, Responses and Messages as their clients see them: how each is asked, and its answers in one form, `Seen`.

The readers assert what an API prescribes besides: the order and the numbers of its events, and how its ids begin.
"""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx

from tests.support.refusals import cases
from tests.support.running_server import MODEL, Running

Json = dict[str, Any]
# A token, its log probability and bytes, and the likeliest tokens with theirs.
Logprob = tuple[str, float, list[int], list[tuple[str, float]]]


class Seen(NamedTuple):
    reasoning: str
    text: str
    calls: list[tuple[str, Any]]
    finish: str
    usage: tuple[int, int, int]  # tokens read, of them cached, and written
    stop: str | None = None  # the stop string that ended the answer, where the API names it
    logprobs: tuple[Logprob, ...] = ()  # of the text; none in Messages


def logprobs_of(entries: list[Json]) -> tuple[Logprob, ...]:
    tops = [[(top["token"], top["logprob"]) for top in each["top_logprobs"]] for each in entries]
    return tuple((each["token"], each["logprob"], each["bytes"], top) for each, top in zip(entries, tops, strict=True))


def arguments_of(text: str) -> Any:
    """Read the arguments of a call; those that are cut off stay a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def tool(**function: Any) -> Json:
    return {"type": "function", "function": {"name": "f", **function}}


def chat_usage(usage: Json) -> tuple[int, int, int]:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]


def whole_chat(reply: Json) -> Seen:
    (choice,) = reply["choices"]
    message = choice["message"]
    assert reply["id"].startswith("chatcmpl-") and message["role"] == "assistant"
    calls = []
    for call in message.get("tool_calls", ()):
        assert re.fullmatch("call_[a-f0-9]{24}|[a-z0-9]{9}", call["id"])
        is_custom, function = call["type"] == "custom", call[call["type"]]
        calls.append((function["name"], function["input"] if is_custom else arguments_of(function["arguments"])))
    assert message["content"] != "", "an empty text is null"
    return Seen(
        message.get("reasoning_content", ""),
        message["content"] or "",
        calls,
        choice["finish_reason"],
        chat_usage(reply["usage"]),
        choice["stop_reason"],
        logprobs_of((choice["logprobs"] or {"content": []})["content"]),
    )


def streamed_chat(events: list[Json]) -> Seen:
    choices = [choice for event in events for choice in event["choices"]]
    deltas = [choice["delta"] for choice in choices]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    parts: list[list[str]] = []
    for call in [call for delta in deltas for call in delta.get("tool_calls", ())]:
        kind, field = ("custom", "input") if "custom" in call else ("function", "arguments")
        if "id" in call:
            assert (call["index"], call["type"], call[kind][field]) == (len(parts), kind, "")
            parts.append([call[kind]["name"], "", kind])
        else:
            assert "name" not in call[kind] and call[kind][field] and kind == parts[call["index"]][2]
        parts[call["index"]][1] += call[kind][field]
    assert [choice["finish_reason"] is None for choice in choices] == [True] * (len(choices) - 1) + [False]
    reasoning, text = ("".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "content"))
    calls = [(name, text if kind == "custom" else arguments_of(text)) for name, text, kind in parts]
    logprobs = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    end, usage = choices[-1], chat_usage(events[-1]["usage"])
    return Seen(reasoning, text, calls, end["finish_reason"], usage, end["stop_reason"], logprobs_of(logprobs))


# Type of an item → type of its text's events, and the field of the text.
TEXTS: dict[str, tuple[str, str]] = dict(cases(__file__, "texts of items"))


def whole_response(reply: Json) -> Seen:
    items = reply["output"]
    parts = {
        kind: [part for item in items if item["type"] == kind for part in item["content"]]
        for kind in ("reasoning", "message")
    }
    reasoning, text = ("".join(part["text"] for part in parts[kind]) for kind in ("reasoning", "message"))
    calls = [(item["name"], arguments_of(item["arguments"])) for item in items if item["type"] == "function_call"]
    calls += [(item["name"], item["input"]) for item in items if item["type"] == "custom_tool_call"]
    cut_off = {"reason": "max_output_tokens"} if reply["status"] == "incomplete" else None
    assert reply["incomplete_details"] == cut_off
    usage = reply["usage"]
    read, written = usage["input_tokens"], usage["output_tokens"]
    assert usage["total_tokens"] == read + written
    cached = usage["input_tokens_details"]["cached_tokens"]
    finish = {"completed": "tool_calls" if calls else "stop", "incomplete": "length"}[reply["status"]]
    logprobs = logprobs_of([entry for part in parts["message"] for entry in part["logprobs"]])
    return Seen(reasoning, text, calls, finish, (read, cached, written), None, logprobs)


def streamed_response(events: list[Json]) -> Seen:
    """Read the deltas; the response in the last event must be the same."""
    reply = events[-1]["response"]
    ends = ["response.created", "response.in_progress", f"response.{reply['status']}"]
    assert [event["type"] for event in (*events[:2], events[-1])] == ends
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    for index, item in enumerate(reply["output"]):
        about = [event for event in events if event.get("output_index") == index]
        kind, field = TEXTS[item["type"]]
        text = item[field] if field in item else "".join(part["text"] for part in item["content"])
        part = ["content_part"] if "content" in item else []
        expected = [f"{each}.added" for each in ("output_item", *part)]
        expected += [f"{kind}.delta"] * (len(about) - 2 * len(expected) - 1)
        expected += [f"{each}.done" for each in (kind, *part, "output_item")]
        assert [event["type"].removeprefix("response.") for event in about] == expected
        deltas, done = about[1 + len(part) : -2 - len(part)], about[-2 - len(part)]
        assert "".join(event["delta"] for event in deltas) == done[field] == text
        if item["type"] == "message":
            logprobs = [entry for event in deltas for entry in event["logprobs"]]
            assert logprobs == done["logprobs"] == item["content"][0]["logprobs"]
        assert about[0]["item"] == {**item, "status": "in_progress", "content" if part else field: [] if part else ""}
        assert about[-1]["item"] == item
    return whole_response(reply)


def message_usage(usage: dict[str, int]) -> tuple[int, int, int]:
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached, usage["output_tokens"]


FINISHES = {"tool_use": "tool_calls", "end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}


def whole_message(reply: Json) -> Seen:
    blocks = reply["content"]
    texts = {kind: "".join(block[kind] for block in blocks if block["type"] == kind) for kind in ("thinking", "text")}
    calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    assert (reply["stop_reason"] == "stop_sequence") == (reply["stop_sequence"] is not None)
    finish = FINISHES[reply["stop_reason"]]
    usage, stop = message_usage(reply["usage"]), reply["stop_sequence"]
    return Seen(texts["thinking"], texts["text"], calls, finish, usage, stop)


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def streamed_message(events: list[Json]) -> Seen:
    """Join the blocks, of which one is open at a time. A call without complete arguments is none, as in a whole answer."""
    start, ping, *about, last, stop = events
    kinds = [event["type"] for event in (start, ping, last, stop)]
    assert kinds == ["message_start", "ping", "message_delta", "message_stop"]
    assert start["message"]["content"] == []
    assert start["message"]["usage"]["output_tokens"] <= last["usage"]["output_tokens"]
    blocks: list[Json] = []
    for event in about:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            blocks.append({**event["content_block"], "json": "", "is_open": True})
        assert event["index"] == len(blocks) - 1 and blocks[-1]["is_open"]
        if kind == "delta":
            delta = event["delta"]
            field = {"input_json_delta": "json"}.get(delta["type"], delta["type"].removesuffix("_delta"))
            blocks[-1][field] += delta["partial_json" if field == "json" else field]
        blocks[-1]["is_open"] = kind != "stop"
    assert not any(block["is_open"] for block in blocks)
    content = []
    for block in blocks:
        try:
            content.append({**block, "input": json.loads(block["json"] or "{}", parse_constant=refuse)})
        except ValueError:
            assert block["type"] == "tool_use"
    return whole_message({"content": content, "usage": last["usage"], **last["delta"]})


class Api(NamedTuple):
    path: str
    prompt: str  # the field of the conversation
    limit: str  # the field of the length
    stream: Json
    whole: Callable[[Json], Seen]
    streamed: Callable[[list[Json]], Seen]
    tool: Callable[[str, Json], Json]  # how it declares a function

    def ask(self, server: Running, **fields: Any) -> httpx.Response:
        return server.post(self.path, {"model": MODEL, self.prompt: HI, self.limit: 700, **fields})


HI = [{"role": "user", "content": "Hi, how is the weather?"}]
SCHEMA: Json = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
APIS: dict[str, Api] = dict(cases(__file__, "APIs", **globals()))
