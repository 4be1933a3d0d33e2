"""Cases of the APIs: streams, counts, seeds, stop strings, Responses and Messages."""

from collections.abc import Sequence
from typing import Any

from .answers import AskResult
from .asker import CHAT_PATH, MESSAGES_PATH, PATH, RESPONSES_PATH
from .cases import CaseRun
from .questions import in_form_of
from .schema import FORMATTED


async def ask_both_ways(run: CaseRun, body: dict[str, Any], path: str = PATH) -> list[AskResult]:
    """Ask whole and streamed, expect one answer and return both."""
    whole = await run.ask_fresh(body, path)
    streamed = await run.ask_fresh({**body, "stream": True, "stream_options": {"include_usage": True}}, path)
    _expect_one_answer(run, whole, streamed, f"{path}, streamed", ("text", "reasoning", "calls", "finish"))
    return [whole, streamed]


def _expect_one_answer(run: CaseRun, whole: AskResult, other: AskResult, how: str, parts: Sequence[str]) -> None:
    """Compare parts of two answers. Nothing is compared where a tie may have been decided differently."""
    if not run.expect_same(whole, other, how):
        return
    for part in parts:
        ours, theirs = getattr(whole.first, part), getattr(other.first, part)
        run.expect(ours == theirs, "stream", f"{how}: {part} {theirs!r}, whole {ours!r}")
    if whole.usage and other.usage:
        run.expect(whole.usage == other.usage, "usage", f"{how}: {other.usage}, whole {whole.usage}")


async def stream_equals_whole(run: CaseRun) -> None:
    await ask_both_ways(run, run.body(run.draw(run.block + 5), 24))
    if "response_format" in run.abilities.supported:
        await ask_both_ways(run, run.body(run.draw(run.block), 40, response_format=FORMATTED))
    if "chat" in run.abilities.supported:
        await ask_both_ways(run, run.chat(), CHAT_PATH)


async def usage_counts(run: CaseRun) -> None:
    prompt = run.draw(2 * run.block + 3)
    for answer in (await run.ask(run.body(prompt)), await run.ask(run.body(prompt))):
        _expect_count(run, answer, "prompt_tokens", prompt)
        _expect_count(run, answer, "completion_tokens", answer.first.ids)
    if "chat" in run.abilities.supported:
        body = run.chat()
        _, reply = await run.proof.asker.fetch("POST", "/tokenize", {key: body[key] for key in ("model", "messages")})
        ids = reply.get("tokens") if isinstance(reply, dict) else []
        _expect_count(run, await run.ask(body, CHAT_PATH), "prompt_tokens", ids)


def _expect_count(run: CaseRun, answer: AskResult, name: str, ids: Any) -> None:
    """Compare a count of the usage with the number of ids, if these are ids."""
    if answer.is_done and ids and isinstance(ids[0], int):
        counted = answer.usage.get(name)
        run.expect(counted == len(ids), "usage", f"{name} {counted} for {len(ids)} token ids")


async def seed_repeats(run: CaseRun) -> None:
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


async def stop_at_chunk_border(run: CaseRun) -> None:
    prompt = run.draw(run.block + 3)
    plain = await run.ask_fresh(run.body(prompt, 24))
    text, tokens = plain.first.text, plain.first.tokens
    cuts = [len("".join(tokens[: number + 1])) for number in range(len(tokens) - 1)] or list(range(4, len(text), 4))
    for cut in cuts[2:14:4]:
        stop = text[cut - 2 : cut + 2]  # begins in one token and ends in the next
        if len(stop) < 4:
            continue
        expected = text[: text.index(stop)]
        for answer in await ask_both_ways(run, run.body(prompt, 24, stop=[stop])):
            found = answer.first.text
            # Another text that begins neither so nor with it took another token earlier, which is not this case's matter.
            is_related = found.startswith(expected) or expected.startswith(found)
            if answer.is_done and (is_related or stop in found):
                is_right = found == expected and answer.first.finish == "stop"
                run.expect(is_right, "stop", f"stop {stop!r}: {found!r} in place of {expected!r}")


async def apis_equal_chat(run: CaseRun) -> None:
    chat = run.chat()
    reference = await run.ask_fresh(chat, CHAT_PATH)
    for name, path in (("responses", RESPONSES_PATH), ("messages", MESSAGES_PATH)):
        for stream in (False, True) if name in run.abilities.supported else ():
            answer = await run.ask({**in_form_of(path, chat), "stream": stream}, path)
            how = f"{path}{', streamed' if stream else ''}, compared with a chat"
            _expect_one_answer(run, reference, answer, how, ("text", "finish"))
