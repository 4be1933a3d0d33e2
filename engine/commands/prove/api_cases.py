"""Cases of the APIs: streams, tools, counts, seeds, stop strings, Responses and Messages."""

from typing import Any

from .answers import AskResult
from .asker import CHAT_PATH, MESSAGES_PATH, PATH, RESPONSES_PATH
from .cases import Case, CaseRun
from .questions import FORMATTED
from .schema import errors_of

TOOL_TOKENS = 160
ALL_PARTS = ("text", "reasoning", "calls", "finish")


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


_WORD, _COUNT = {"type": "string", "maxLength": 8}, {"type": "integer", "minimum": 0, "maximum": 999}
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": _object(city=_WORD, unit={"enum": ["celsius", "fahrenheit"]}, days=_COUNT),
    "order_parts": _object(
        parts={"type": "array", "items": _object(name=_WORD, count=_COUNT), "minItems": 1, "maxItems": 2},
        is_urgent={"type": "boolean"},
        note={"anyOf": [_WORD, {"type": "null"}]},
    ),
    "move_file": {
        **_object(source={"$ref": "#/$defs/place"}, target={"$ref": "#/$defs/place"}, mode={"enum": ["copy", "move"]}),
        "$defs": {"place": _object(disk=_COUNT, path=_WORD)},
    },
}


def _forced(name: str) -> dict[str, Any]:
    function = {"name": name, "description": f"Use it to {name.replace('_', ' ')}.", "parameters": TOOLS[name]}
    choice = {"type": "function", "function": {"name": name}}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": choice}


async def _streams(run: CaseRun) -> None:
    """Ask for completions, a chat and a call, whole and streamed. Finding: a chunk, a call or a count is lost."""
    requests = [(PATH, run.body(run.draw(run.block + 5), 24))]
    if "chat" in run.abilities.known:
        requests.append((CHAT_PATH, run.chat()))
    if "tools" in run.abilities.known:
        requests.append((CHAT_PATH, run.chat(max_tokens=TOOL_TOKENS, **_forced("get_weather"))))
    if "response_format" in run.abilities.known:
        requests.append((PATH, run.body(run.draw(run.block), 40, response_format=FORMATTED)))
    for path, body in requests:
        whole = await run.ask_fresh(body, path)
        streamed = await run.ask_fresh({**body, "stream": True, "stream_options": {"include_usage": True}}, path)
        _expect_one_answer(run, whole, streamed, f"{path}, streamed")


def _expect_one_answer(
    run: CaseRun, whole: AskResult, other: AskResult, how: str, parts: tuple[str, ...] = ALL_PARTS
) -> None:
    """Compare parts of two answers. Nothing is compared where a tie may have been decided differently."""
    if not run.expect_same(whole, other, how):
        return
    for part in parts:
        ours, theirs = getattr(whole.first, part), getattr(other.first, part)
        run.expect(ours == theirs, "stream", f"{how}: {part} {theirs!r}, whole {ours!r}")
    if whole.usage and other.usage:
        run.expect(whole.usage == other.usage, "usage", f"{how}: {other.usage}, whole {whole.usage}")


async def _tool_arguments(run: CaseRun) -> None:
    """Force calls of three tools. Finding: the arguments do not conform to the schema."""
    for name, schema in TOOLS.items():
        for stream in (False, True):
            answer = await run.ask(run.chat(max_tokens=TOOL_TOKENS, stream=stream, **_forced(name)), CHAT_PATH)
            if not answer.is_done or answer.first.finish == "length":
                continue
            names = [call["name"] for call in answer.first.calls]
            run.expect(names and {*names} == {name}, "schema", f"calls of {names}, but {name} was forced")
            for call in answer.first.calls:
                wrong = errors_of(call["arguments"], schema)
                run.expect(not wrong, "schema", f"{name}: {wrong}: {call['arguments']!r}")


async def _usage(run: CaseRun) -> None:
    """Compare token counts with ids and with /tokenize. Finding: the usage is wrong."""
    prompt = run.draw(2 * run.block + 3)
    for answer in (await run.ask(run.body(prompt)), await run.ask(run.body(prompt))):
        for name, known in (("prompt_tokens", prompt), ("completion_tokens", answer.first.ids)):
            counted = answer.usage.get(name, 0)
            if answer.is_done and known and isinstance(known[0], int):
                run.expect(counted == len(known), "usage", f"{name} {counted} for {len(known)} token ids")
    if "chat" in run.abilities.known:
        body = run.chat()
        status, reply = await run.proof.asker.fetch(
            "POST", "/tokenize", {"model": body["model"], "messages": body["messages"]}
        )
        if status == 200 and isinstance(reply, dict) and isinstance(reply.get("tokens"), list):
            counted = (await run.ask(body, CHAT_PATH)).usage.get("prompt_tokens", 0)
            length = len(reply["tokens"])
            run.expect(
                counted == length, "usage", f"chat: prompt_tokens {counted}, but /tokenize gives {length} tokens"
            )


async def _seeds(run: CaseRun) -> None:
    """Send six seeds alone, then at once. Finding: a seed is ignored, or depends on the batch."""
    prompt = run.draw(run.block + 3)
    bodies = [run.body(prompt, 16, temperature=1.0, seed=seed, logprobs=None) for seed in range(6)]
    alone = [await run.ask(body) for body in bodies]
    again = await run.ask_together(bodies)
    pairs = [(one, two) for one, two in zip(alone, again, strict=True) if one.is_done and two.is_done]
    changed = sum(one.first.text != two.first.text for one, two in pairs)
    # A choice close to a border may change with the numbers of another batch; most must not.
    run.expect(changed <= len(pairs) / 2, "seed", f"{changed} of {len(pairs)} seeded outputs changed when repeated")
    texts = {one.first.text for one, _ in pairs}
    run.expect(len(pairs) < len(bodies) or len(texts) > 1, "seed", "six seeds give the same output")


async def _stop_strings(run: CaseRun) -> None:
    """Stop at strings across two tokens. Finding: a part of the stop string is sent, or text is lost."""
    prompt = run.draw(run.block + 3)
    plain = await run.ask_fresh(run.body(prompt, 24))
    text, tokens = plain.first.text, plain.first.tokens
    cuts = [len("".join(tokens[: number + 1])) for number in range(len(tokens) - 1)] or list(range(4, len(text), 4))
    for cut in cuts[2:14:4]:
        stop = text[cut - 2 : cut + 2]  # begins in one token and ends in the next
        if len(stop) < 4:
            continue
        expected = text[: text.index(stop)]
        for stream in (False, True):
            body = run.body(prompt, 24, stop=[stop], stream=stream)
            answer = await run.ask_fresh(body)
            found = answer.first.text
            # Another text that begins neither so nor with it took another token earlier, which is not this case's matter.
            is_related = found.startswith(expected) or expected.startswith(found)
            is_right = found == expected and answer.first.finish == "stop"
            if answer.is_done and (is_related or stop in found):
                how = "streamed" if stream else "whole"
                run.expect(is_right, "stop", f"stop {stop!r}, {how}: {found!r} in place of {expected!r}")


async def _other_api(run: CaseRun, path: str) -> None:
    chat = run.chat(num_words=8)
    reference = await run.ask_fresh(chat, CHAT_PATH)
    instructions, user = (message["content"] for message in chat["messages"])
    shown = {"model": chat["model"], "temperature": 0}
    if path == RESPONSES_PATH:
        body = {**shown, "instructions": instructions, "input": user, "max_output_tokens": chat["max_tokens"]}
    else:
        messages = [{"role": "user", "content": user}]
        body = {**shown, "system": instructions, "messages": messages, "max_tokens": chat["max_tokens"]}
    for stream in (False, True):
        answer = await run.ask({**body, "stream": stream}, path)
        how = f"{path}{', streamed' if stream else ''}, compared with a chat"
        _expect_one_answer(run, reference, answer, how, ("text", "finish"))


async def _responses(run: CaseRun) -> None:
    """Send a chat over the Responses API. Finding: the prompt or the answer differs."""
    await _other_api(run, RESPONSES_PATH)


async def _messages(run: CaseRun) -> None:
    """Send a chat over the Messages API. Finding: the prompt or the answer differs."""
    await _other_api(run, MESSAGES_PATH)


API_CASES = {
    "stream-equals-whole": Case(_streams),
    "tool-arguments": Case(_tool_arguments, ("tools",)),
    "usage-counts": Case(_usage),
    "seed-repeats": Case(_seeds, ("seed",)),
    "stop-at-chunk-border": Case(_stop_strings, ("stop",)),
    "responses-equal-chat": Case(_responses, ("chat", "responses")),
    "messages-equal-chat": Case(_messages, ("chat", "messages")),
}
