"""POST /v1/completions: completes one or more prompts, whole or streamed."""

from collections.abc import AsyncGenerator, Sequence

from penstock.engine.front.answer import Update
from penstock.engine.grammar.rules import grammar_source
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.server.answer_writer import Json, respond
from penstock.engine.server.answers import ChoicesWriter, sampling_params, token_fields
from penstock.engine.server.call import Call
from penstock.engine.server.logprobs import begins_characters, completion_logprobs, prompt_logprobs
from penstock.engine.server.prompts import check_prompt_logprobs, decode_inputs, given_ids, to_ids
from penstock.engine.server.requests import CompletionRequest
from penstock.engine.server.service import MAX_SEQUENCES, Service


async def completions(service: Service, call: Call, body: bytes) -> Json | AsyncGenerator[bytes, None]:
    """Complete the prompt or prompts, n times each."""
    request, inputs = await submit(service, call, body)
    return await respond(service, call, CompletionWriter(service, call, request, inputs))


async def submit(service: Service, call: Call, body: bytes) -> tuple[CompletionRequest, Sequence[str | list[int]]]:
    """Check the request and submit it to the engine; return it and its prompts as the client gave them."""
    request = service.accept(call, body, CompletionRequest)
    # An echoed prompt includes its log-probabilities.
    counts = [request.prompt_logprobs, request.logprobs if request.echo else None]
    most = max((value for value in counts if value is not None), default=None)
    params = sampling_params(service, call, request, logprobs=request.logprobs, prompt_logprobs=most)
    wanted = params.structured_outputs
    grammar = None if wanted is None else grammar_source(wanted)
    ids = given_ids(call, "prompt", request.prompt)
    inputs = [ids] if ids is not None else decode_inputs("prompt", request.prompt, MAX_SEQUENCES, service.info)
    num_sequences = len(inputs) * params.n
    if num_sequences > MAX_SEQUENCES:
        reason = f"{len(inputs)} prompts × {params.n} choices; at most {MAX_SEQUENCES} are allowed"
        raise InvalidRequest("n", reason)
    with service.admit(num_sequences):
        prompts = await to_ids("prompt", inputs, service, request, num_answered=int(params.max_tokens != 0))
        field = "prompt_logprobs" if request.prompt_logprobs == params.prompt_logprobs else "logprobs"
        check_prompt_logprobs(field, prompts, params.prompt_logprobs, params.n)
        service.generate(
            call,
            request,
            prompts,
            params,
            grammar=grammar,
            is_continuation=True,
            kv_transfer=request.kv_transfer_params,
        )
    await service.compiled(call, None if wanted is None else wanted.field)
    return request, inputs


class CompletionWriter(ChoicesWriter):
    """Writes the completions; tracks for each streamed choice whether it has begun and its text offset."""

    PREFIX, KIND, CHUNK_KIND = "cmpl-", "text_completion", "text_completion"

    def __init__(
        self, service: Service, call: Call, request: CompletionRequest, inputs: Sequence[str | list[int]]
    ) -> None:
        super().__init__(service, call, request)
        self._request, self._inputs = request, inputs
        self._offsets: dict[int, int] = {}  # choice → offset of its next token's text

    def _whole(self, choices: list[list[Update]]) -> Json:
        indexed = [(index, update) for index, updates in enumerate(choices) for update in updates]
        return self._named([self._choice(index, update, is_first=True) for index, update in indexed])

    def _chunks(self, prompt_index: int, update: Update) -> list[Json]:
        index = self._index(prompt_index, update)
        is_first = index not in self._offsets
        shows_tokens = self._request.return_token_ids or self._request.logprobs is not None
        if not (is_first or update.text or update.finish_reason or (shows_tokens and update.token_ids)):
            return []  # text is held back: part of a character or of a possible stop string
        return [self._named([self._choice(prompt_index, update, is_first)])]

    def _choice(self, prompt_index: int, update: Update, is_first: bool) -> Json:
        """Return an update as a choice. With `echo`, the first one begins with the prompt."""
        request, index = self._request, self._index(prompt_index, update)
        choice: Json = {
            "index": index,
            "text": update.text,
            "logprobs": self._logprobs(prompt_index, update, index, is_first),
            "finish_reason": update.finish_reason,
            "stop_reason": update.stop_reason,
            **token_fields(request, update),
        }
        if is_first and request.echo:
            choice["text"] = self._echo(prompt_index) + update.text
        answer, is_whole = self._call.answers[prompt_index], not request.stream
        if is_whole or (is_first and request.return_token_ids):
            choice["prompt_token_ids"] = answer.prompt_token_ids if request.return_token_ids else None
        if is_whole:
            has_logprobs = request.prompt_logprobs is not None
            found = prompt_logprobs(self._tokenizer, answer.prompt_logprobs) if has_logprobs else None
            choice["prompt_logprobs"] = found
        return choice

    def _index(self, prompt_index: int, update: Update) -> int:
        return prompt_index * len(self._call.answers[prompt_index].choices) + update.index

    def _logprobs(self, prompt_index: int, update: Update, index: int, is_first: bool) -> Json | None:
        offset = self._offsets.setdefault(index, 0)
        if self._request.logprobs is None:
            return None
        tokens, first_id = update.logprobs or [], None
        if is_first and self._request.echo:
            answer = self._call.answers[prompt_index]
            tokens, first_id = [*(answer.prompt_logprobs or ()), *tokens], answer.prompt_token_ids[0]
            # The text lacks tokens that the tokenizer adds before it, and the first space of some vocabularies.
            num_chars = sum(sum(begins_characters(self._tokenizer, id_)) for id_ in answer.prompt_token_ids)
            offset = min(len(self._echo(prompt_index)) - num_chars, 0)
        as_ids = self._request.return_tokens_as_token_ids
        reply, self._offsets[index] = completion_logprobs(self._tokenizer, tokens, offset, first_id, as_ids)
        return reply

    def _echo(self, prompt_index: int) -> str:
        """Return the client's prompt text if it is the model's input unchanged, else the decoded prompt."""
        prompt = self._inputs[prompt_index]
        if isinstance(prompt, str) and self._request.truncate_prompt_tokens is None:
            return prompt
        return self._tokenizer.decode(self._call.answers[prompt_index].prompt_token_ids, skip_special_tokens=False)
