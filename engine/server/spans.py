"""The trace spans of a request: one for the request, with child spans queue, prefill and decode for every prompt.

Attributes follow OpenTelemetry's conventions for GenAI and HTTP; none contains text of the conversation.
"""

import time
from collections.abc import Mapping
from typing import Any

from penstock.engine.front.answer import Answer
from penstock.engine.http.telemetry import Telemetry
from penstock.engine.http.tracing import Trace, Tracing, Value
from penstock.engine.server.call import Call, NoSpans

MAX_PROMPTS = 16  # prompts of one request that get child spans
# Route → name of the operation, and prefix of the answer's id.
OPERATIONS = {
    "/v1/chat/completions": ("chat", "chatcmpl-"),
    "/v1/responses": ("chat", "resp_"),
    "/v1/messages": ("chat", "msg_"),
    "/v1/completions": ("text_completion", "cmpl-"),
    "/v1/embeddings": ("embeddings", "embd-"),
}


class RequestSpans(NoSpans):
    def __init__(self, telemetry: Telemetry) -> None:
        self._tracing = Tracing(telemetry, "penstock")
        self._traces: dict[Call, Trace] = {}

    def close(self) -> None:
        self._tracing.close()

    def begin(self, call: Call, scope: Mapping[str, Any]) -> None:
        """Begin the span of a POST request; GET requests, such as probes and endless streams, have none."""
        if scope["method"] == "POST":
            self._traces[call] = trace = self._tracing.begin(scope["headers"], "POST", call.begun_s)
            call.trace_id = trace.trace_id

    def phases(self, call: Call) -> None:
        """Record the phases of every prompt; called when the answers are released."""
        if (trace := self._traces.get(call)) is not None and trace.is_recorded:
            for index, answer in enumerate(call.answers[:MAX_PROMPTS]):
                self._phases(trace, answer, index if len(call.answers) > 1 else None)

    def _phases(self, trace: Trace, answer: Answer, index: int | None) -> None:
        """Record queue, prefill and decode; nothing without a first token, since the phase reached is not known."""
        times, begun_s = answer.metrics, answer.started_s
        if times.first_token_s is None and answer.embedding is None:
            return
        ended_s = time.monotonic() if times.finished_s is None else begun_s + times.finished_s
        first_s = ended_s if times.first_token_s is None else begun_s + times.first_token_s
        queued_s = min(begun_s + (times.queued_s or 0.0), first_s)
        prompt: dict[str, Value] = {"penstock.prompt.index": index}
        input_usage: dict[str, Value] = {
            "gen_ai.usage.input_tokens": answer.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": answer.num_cached_tokens,
        }
        output_usage: dict[str, Value] = {
            "gen_ai.usage.output_tokens": answer.num_tokens,
            "penstock.preemptions": times.num_preemptions or None,
        }
        trace.record("queue", begun_s, queued_s, prompt)
        trace.record("prefill", queued_s, first_s, prompt | input_usage)
        if times.first_token_s is not None:
            trace.record("decode", first_s, ended_s, prompt | output_usage)

    def end(self, call: Call, route: str, status: int) -> None:
        """End the request's span; called when the response is complete or the client has disconnected."""
        trace = self._traces.pop(call, None)
        if trace is None or not trace.is_recorded:
            return
        operation, prefix = OPERATIONS.get(route, (None, ""))
        is_failed = status >= 500 or "error" in call.finish_reasons
        attributes: dict[str, Value] = {
            "http.request.method": "POST",
            "http.route": route,
            "http.response.status_code": status,
            "http.request.header.x-request-id": [call.client_id] if call.client_id else None,
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "penstock",
            "gen_ai.request.model": call.model or None,
            "gen_ai.response.id": prefix + call.id,
            "error.type": str(status) if status >= 400 else "error" if is_failed else None,
        }
        if call.answers:
            attributes |= _answer_attributes(call)
        trace.span.update_name(f"{operation} {call.model}" if operation and call.model else f"POST {route}")
        trace.end(trace.span, time.monotonic(), attributes, is_failed)


def _answer_attributes(call: Call) -> dict[str, Value]:
    first, message = call.answers[0], call.answers[0].messages[0]
    attributes: dict[str, Value] = {
        "gen_ai.response.model": call.model,
        "gen_ai.usage.input_tokens": call.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": call.num_cached_tokens,
        "penstock.prompts": len(call.answers) if len(call.answers) > 1 else None,
    }
    if message.pooling is not None:
        return attributes
    sampling, first_s = message.sampling, first.metrics.first_token_s
    if call.is_stream and first_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = first.started_s + first_s - call.begun_s
    return attributes | {
        "gen_ai.usage.output_tokens": call.num_tokens,
        "gen_ai.response.finish_reasons": call.finish_reasons,
        "gen_ai.request.stream": call.is_stream or None,
        "gen_ai.request.choice.count": len(first.choices) if len(first.choices) > 1 else None,
        "gen_ai.request.max_tokens": message.max_tokens,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.frequency_penalty": float(sampling.frequency_penalty) or None,
        "gen_ai.request.presence_penalty": float(sampling.presence_penalty) or None,
    }
