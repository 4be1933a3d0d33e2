"""Reads answers: whole bodies and stream events of completions, chats, Responses and Messages, in one form.

It does not judge. A response that is not an answer (an error status, an error event) is kept as text.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .tables import load_table

_TABLE = load_table("answers")
END_MARKS = _TABLE["end_marks"]  # like [DONE]
FINISHES: dict[str, str] = _TABLE["finishes"]  # the finish reasons of Responses and Messages, in the words of chats


def loads(data: bytes) -> Any:
    """Decode JSON; raise ValueError for anything else, NaN included, which is no JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(data, parse_constant=refuse)


@dataclass
class TextChoice:
    """One choice of an answer, as far as it has arrived."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)  # with their log-probabilities
    values: list[float] = field(default_factory=list)
    tops: list[dict[str, float]] = field(default_factory=list)
    finish: str | None = None
    num_prompt: int | None = None  # positions of the prompt with log-probabilities
    reasoning: str = ""
    penalty: float = 0.0  # the presence_penalty of its request
    calls: list[dict[str, str]] = field(default_factory=list)  # name and arguments of each tool call

    def add(self, choice: Mapping[str, Any]) -> None:
        said = choice.get("message") or choice.get("delta") or choice
        self.text += said.get("text") or said.get("content") or ""
        self.reasoning += said.get("reasoning_content") or said.get("reasoning") or ""
        for number, call in enumerate(said.get("tool_calls") or ()):
            at = call.get("index", number)
            self.calls += [{"name": "", "arguments": ""} for _ in range(at + 1 - len(self.calls))]
            for name, value in (call.get("function") or {}).items():
                self.calls[at][name] = self.calls[at].get(name, "") + (value or "")
        self.ids += choice.get("token_ids") or []
        logprobs = choice.get("logprobs") or {}
        self.tokens += logprobs.get("tokens") or []
        self.values += map(_number, logprobs.get("token_logprobs") or [])
        self.tops += [top or {} for top in logprobs.get("top_logprobs") or []]
        # The format of chats. llama.cpp uses it for completions too, with empty text where a stop string may begin.
        for token in logprobs.get("content") or []:
            if token["token"]:
                self.tokens.append(token["token"])
                self.values.append(_number(token["logprob"]))
                self.tops.append({top["token"]: top["logprob"] for top in token.get("top_logprobs") or []})
        self.finish = choice.get("finish_reason") or self.finish
        if choice.get("prompt_logprobs") is not None:
            self.num_prompt = len(choice["prompt_logprobs"])


@dataclass
class AskResult:
    """The outcome of a request. It ends in exactly one of: is_done, error, has_left, is_hung."""

    status: int = 0
    choices: dict[int, TextChoice] = field(default_factory=dict)
    error: str = ""
    is_done: bool = False
    has_left: bool = False  # our client closed the connection
    is_hung: bool = False
    usage: dict[str, int] = field(default_factory=dict)  # prompt_tokens, completion_tokens
    num_cached: int | None = None
    has_end_mark: bool = False  # of a stream
    first_s: float = 0.0  # until the first byte of the body

    @property
    def first(self) -> TextChoice:
        return self.choices.get(0) or TextChoice()

    def take(self, payload: bytes) -> None:
        """Add a complete body, or one event of a stream."""
        if payload == b"[DONE]":
            self.has_end_mark = True
            return
        try:
            body = loads(payload)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            self.error = f"not an object of JSON: {payload[:100]!r}"
        elif self.status != 200 or body.get("error"):
            self.error = f"{self.status}: {payload[:200].decode(errors='replace')}"
        else:
            self.has_end_mark |= body.get("type") in END_MARKS
            try:
                for choice in body["choices"] or () if "choices" in body else _choices(body):
                    self.choices.setdefault(choice.get("index", 0), TextChoice()).add(choice)
                self._count(body.get("usage") or (body.get("response") or {}).get("usage") or {})
            except (AttributeError, KeyError, TypeError) as error:
                self.error = f"an answer of another form ({error!r}): {payload[:200].decode(errors='replace')}"

    def _count(self, usage: Mapping[str, Any]) -> None:
        if "input_tokens" in usage:  # Responses and Messages; Messages counts cached tokens apart
            read = usage.get("cache_read_input_tokens") or 0
            written = usage.get("cache_creation_input_tokens") or 0
            prompt, completion = usage["input_tokens"] + read + written, usage["output_tokens"]
            self.usage = {"prompt_tokens": prompt, "completion_tokens": completion}
        elif "prompt_tokens" in usage:
            self.usage = {name: usage[name] for name in ("prompt_tokens", "completion_tokens") if name in usage}
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        self.num_cached = details.get("cached_tokens", usage.get("cache_read_input_tokens", self.num_cached))


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _choices(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a body or an event of the Responses or Messages API as the choices of a chat."""
    kind, delta = body.get("type") or body.get("object"), body.get("delta") or {}
    if kind == "response.output_text.delta":
        return [{"delta": {"content": delta}}]
    if kind in END_MARKS and "response" in body:  # repeats the text that the events had
        return [{"finish_reason": FINISHES.get(body["response"]["status"])}]
    if kind == "content_block_delta":
        return [{"delta": {"content": delta.get("text")}}]
    if kind == "message_delta":
        return [{"finish_reason": FINISHES.get(delta["stop_reason"])}]
    if kind == "response":
        parts = [part for item in body["output"] if item["type"] == "message" for part in item["content"]]
        return [_whole(parts, body["status"])]
    if kind == "message":
        return [_whole(body["content"], body["stop_reason"])]
    return []


def _whole(parts: list[dict[str, Any]], finish: str) -> dict[str, Any]:
    text = "".join(part.get("text") or "" for part in parts)
    return {"message": {"content": text}, "finish_reason": FINISHES.get(finish)}
