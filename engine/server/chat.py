"""POST /v1/chat/completions: answers a conversation, whole or streamed. The agents' APIs also submit through `ask`."""

from collections.abc import AsyncGenerator, Collection
from typing import Any

from penstock.engine.front.answer import Update
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.server.answer_writer import Json, respond
from penstock.engine.server.answers import ChoicesWriter, sampling_params, token_fields
from penstock.engine.server.call import Call
from penstock.engine.server.conversation import Conversation
from penstock.engine.server.custom_tools import InputDecoder, check_regexes
from penstock.engine.server.logprobs import chat_logprobs, prompt_logprobs
from penstock.engine.server.prompts import apply_verbosity, check_prompt_logprobs, given_ids, render, to_ids
from penstock.engine.server.requests import ChatRequest
from penstock.engine.server.service import Service
from penstock.engine.server.tool_choice import Reading, ReadingPlan
from penstock.engine.text.tools.reader import Arguments, Content, Piece, Reasoning


async def chat(service: Service, call: Call, body: bytes) -> Json | AsyncGenerator[bytes, None]:
    """Answer the conversation, n times."""
    request, plan = await submit(service, call, body)
    return await respond(service, call, ChatWriter(service, call, request, plan))


async def submit(service: Service, call: Call, body: bytes) -> tuple[ChatRequest, ReadingPlan]:
    """Check the request and submit it to the engine; return it and the plan for parsing its answers."""
    request = service.accept(call, body, ChatRequest)
    # For error messages: the engine's name of a field may differ from the client's name.
    names = (("max_tokens", "max_completion_tokens"), ("logprobs", "top_logprobs"))
    call.paths |= {name: other for name, other in names if getattr(request, other) is not None}
    custom = {
        f"tools[{place}]": tool.custom for place, tool in enumerate(request.tools or ()) if tool.custom is not None
    }
    call.paths |= {f"{path}.function": f"{path}.custom" for path in custom}
    await check_regexes({f"{path}.custom.format.grammar.definition": tool.grammar for path, tool in custom.items()})
    apply_verbosity(request, service, call.ignored)
    conversation = Conversation(len(body), call.paths)
    prompt_ids = given_ids(call, "messages", request.messages)
    if prompt_ids is None:
        conversation.read(request.messages, service.info, call.ignored)
    return request, await ask(service, call, request, conversation, prompt_ids)


async def ask(
    service: Service, call: Call, request: ChatRequest, conversation: Conversation, prompt_ids: list[int] | None = None
) -> ReadingPlan:
    """Check the request and submit it to the engine; return the plan for parsing its answers. `prompt_ids` replace the
    conversation's messages."""
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs", "needs logprobs to be true")
    max_tokens = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    if max_tokens == 0:
        raise InvalidRequest("max_tokens", "0 is out of range; it must be at least 1")
    calls = service.tools.calls(request)
    special: dict[str, Any] = {"logprobs": (request.top_logprobs or 0) if request.logprobs else None}
    if max_tokens is not None or "max_tokens" not in service.config.default_sampling:
        special["max_tokens"] = max_tokens  # None: limited by the context only
    params = sampling_params(service, call, request, **special)
    wanted = params.structured_outputs
    with service.admit(params.n, "n"):
        given = prompt_ids if prompt_ids is not None else await render(request, conversation, service)
        (prompt,) = await to_ids("messages", [given], service, request)
        check_prompt_logprobs("prompt_logprobs", [prompt], params.prompt_logprobs, num_copies=1)
        begun = conversation.last_text if request.continue_final_message else ""
        plan, grammar = await service.tools.plan(request, begun, calls, prompt, wanted)
        # Not admitted again: a server that has begun to drain meanwhile still answers this call.
        service.generate(
            call,
            request,
            [prompt],
            params,
            grammar=grammar,
            kv_transfer=request.kv_transfer_params,
            shown_ids=plan.shown_ids,
            stop_condition=plan.stop_condition if plan.is_certain or plan.has_headers else None,
            is_continuation=bool(request.continue_final_message),
        )
    await service.compiled(call, "tools" if plan.is_certain else None if wanted is None else wanted.field)
    return plan


class ChatWriter(ChoicesWriter):
    """Writes the answer to a chat. In a stream, the first chunk of each choice has the role."""

    PREFIX, KIND, CHUNK_KIND = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, call: Call, request: ChatRequest, plan: ReadingPlan) -> None:
        super().__init__(service, call, request)
        self._request, self._plan = request, plan
        self._begun: dict[int, tuple[Reading, _Deltas]] = {}  # choice → its parser and formatter
        self._custom_tools = {tool.function.name for tool in request.tools or () if tool.custom is not None}

    def _whole(self, choices: list[list[Update]]) -> Json:
        request, (answer,) = self._request, self._call.answers
        reply = self._named([self._choice(update) for update in choices[0]])
        reply["prompt_token_ids"] = answer.prompt_token_ids if request.return_token_ids else None
        has_logprobs = request.prompt_logprobs is not None
        reply["prompt_logprobs"] = prompt_logprobs(self._tokenizer, answer.prompt_logprobs) if has_logprobs else None
        return reply

    def _choice(self, update: Update) -> Json:
        reading = self._plan.begin()
        return {
            "index": update.index,
            "message": _message(
                _Deltas(self._custom_tools).of(reading.pieces(update.text, is_last=True), is_last=True)
            ),
            "logprobs": self._logprobs(update),
            "finish_reason": reading.finish_reason(update.finish_reason),
            "stop_reason": update.stop_reason,
            **token_fields(self._request, update),
        }

    def _logprobs(self, update: Update) -> Json | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(self._tokenizer, update.logprobs or (), self._request.return_tokens_as_token_ids)

    def _chunks(self, _index: int, update: Update) -> list[Json]:
        request = self._request
        is_first = update.index not in self._begun
        if is_first:
            self._begun[update.index] = self._plan.begin(), _Deltas(self._custom_tools)
        reading, formatter = self._begun[update.index]
        reason = update.finish_reason
        is_last = reason is not None
        deltas = formatter.of(reading.pieces(update.text, is_last=is_last), is_last=is_last)
        shows_tokens = request.return_token_ids or request.logprobs
        if not deltas and (is_first or reason or (shows_tokens and update.token_ids)):
            deltas = [{"content": ""} if self._plan.is_plain else {}]
        if not deltas:
            return []  # text is held back: part of a character, or of a possible stop string, call or mark
        choices: list[Json] = [
            {"index": update.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        chunks = [self._named([choice]) for choice in choices]
        if is_first:
            deltas[0]["role"] = "assistant"
            if request.return_token_ids:
                chunks[0]["prompt_token_ids"] = self._call.answers[0].prompt_token_ids
        # The last chunk of an update carries its other fields.
        choices[-1] |= {"logprobs": self._logprobs(update), **token_fields(request, update)}
        if reason is not None:
            choices[-1] |= {"finish_reason": reading.finish_reason(reason), "stop_reason": update.stop_reason}
        return chunks


CALL_FIELDS = {"function": "arguments", "custom": "input"}  # kind of a call → field of its text


class _Deltas:
    """Formats the pieces of one choice as deltas of a message. The call of a custom tool has its input as text."""

    def __init__(self, custom_tools: Collection[str]) -> None:
        self._custom_tools = custom_tools
        self._num_calls = 0
        self._input: InputDecoder | None = None  # of the newest call, if it is a custom tool's

    def of(self, pieces: list[Piece], *, is_last: bool) -> list[Json]:
        deltas: list[Json] = []
        for piece in pieces:
            if isinstance(piece, Content):
                deltas.append({"content": piece.text})
            elif isinstance(piece, Reasoning):
                deltas.append({"reasoning_content": piece.text})
            elif isinstance(piece, Arguments):
                deltas += self._arguments_delta(piece.text)
            else:
                deltas += self._arguments_delta("", is_last=True)
                self._num_calls += 1
                is_custom = piece.name in self._custom_tools
                self._input = InputDecoder() if is_custom else None
                kind = "custom" if is_custom else "function"
                tool = {"name": piece.name, CALL_FIELDS[kind]: ""}
                deltas.append({"tool_calls": [{"index": piece.call, "id": piece.id, "type": kind, kind: tool}]})
        return deltas + (self._arguments_delta("", is_last=True) if is_last else [])

    def _arguments_delta(self, arguments: str, *, is_last: bool = False) -> list[Json]:
        """Return the delta with which the newest call grows, if it does."""
        text = arguments if self._input is None else self._input.feed(arguments, is_last=is_last)
        kind = "function" if self._input is None else "custom"
        return [{"tool_calls": [{"index": self._num_calls - 1, kind: {CALL_FIELDS[kind]: text}}]}] if text else []


def _message(deltas: list[Json]) -> Json:
    """Join the deltas of a whole answer."""
    content, reasoning = ("".join(delta.get(name, "") for delta in deltas) for name in ("content", "reasoning_content"))
    calls: list[Json] = []
    for part in [part for delta in deltas for part in delta.get("tool_calls", ())]:
        if "id" in part:
            calls.append({name: value for name, value in part.items() if name != "index"})
        else:
            kind = "custom" if "custom" in part else "function"
            field = CALL_FIELDS[kind]
            calls[part["index"]][kind][field] += part[kind][field]
    given = content or (None if calls or reasoning else "")
    message: Json = {"role": "assistant", "content": given, "refusal": None}
    return message | {name: value for name, value in (("reasoning_content", reasoning), ("tool_calls", calls)) if value}
