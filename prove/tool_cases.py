"""Cases of tool calls and reasoning in chats: what a client would execute or show."""

from typing import Any

from .answers import AskResult
from .api_cases import ask_both_ways
from .asker import CHAT_PATH
from .cases import CaseRun
from .schema import FORCED, TOOLS, errors_of
from .tables import load_table

CUTS = (2, 6, 24)  # tokens after which a call is cut
MOST_CONTEXT, LEFT_TOKENS = 4096, 12  # contexts that are filled until so many tokens are left
MARKED_TOKENS = 48
_MARKS: dict[str, list[str]] = load_table("answers")["marks"]


async def tool_arguments(run: CaseRun) -> None:
    for name, schema in TOOLS.items():
        for answer in await ask_both_ways(run, run.chat(**FORCED[name]), CHAT_PATH):
            if not answer.is_done or answer.first.finish == "length":
                continue
            names = [call["name"] for call in answer.first.calls]
            run.expect({*names} == {name}, "schema", f"calls of {names}, but {name} was forced")
            for call in answer.first.calls:
                wrong = errors_of(call["arguments"], schema)
                run.expect(not wrong, "schema", f"{name}: {wrong}: {call['arguments']!r}")


async def vllm_42400(run: CaseRun) -> None:
    chat = run.chat(**FORCED["order_parts"])
    if not (await run.ask_fresh(chat, CHAT_PATH)).is_done:
        return
    for most in CUTS:
        for answer in await ask_both_ways(run, {**chat, "max_tokens": most}, CHAT_PATH):
            run.expect(answer.is_done, "error", f"a call that is cut after {most} tokens is refused: {answer.error}")
            _expect_honest_finish(run, answer, f"cut after {most} tokens")
    if 0 < run.abilities.context <= MOST_CONTEXT:
        for answer in await ask_both_ways(run, await _fill_context(run, chat), CHAT_PATH):
            _expect_honest_finish(run, answer, "at the end of the context")


async def _fill_context(run: CaseRun, chat: dict[str, Any]) -> dict[str, Any]:
    """Return the chat with so many words that few tokens of the context are left for the answer."""
    system, user = chat["messages"]

    def of_words(number: int) -> dict[str, Any]:
        return {**chat, "messages": [system, {**user, "content": " the" * number}]}

    short, long = [
        (await run.ask({**of_words(number), "max_tokens": 1}, CHAT_PATH)).usage.get("prompt_tokens", 0)
        for number in (32, 64)
    ]
    word = max(1.0, (long - short) / 32)
    filled = of_words(int((run.abilities.context - LEFT_TOKENS - long) / word) + 64)
    return {name: value for name, value in filled.items() if name != "max_tokens"}


async def stop_in_call(run: CaseRun) -> None:
    chat = run.chat(**FORCED["say"])
    calls = (await run.ask_fresh(chat, CHAT_PATH)).first.calls
    for at in (2, len(calls[0]["arguments"]) // 2) if calls else ():
        stop = calls[0]["arguments"][at : at + 3]
        for answer in await ask_both_ways(run, {**chat, "stop": [stop]}, CHAT_PATH):
            _expect_honest_finish(run, answer, f"with the stop string {stop!r}", ("length", "stop"))


def _expect_honest_finish(run: CaseRun, answer: AskResult, when: str, finishes: tuple[str, ...] = ("length",)) -> None:
    """Expect that an answer whose call is cut, or missing, does not end as one that has a whole call."""
    texts = [call["arguments"] for call in answer.first.calls]
    is_whole = bool(texts) and not any(errors_of(text, {}) for text in texts)
    if answer.is_done and not is_whole:
        finish = answer.first.finish
        run.expect(finish in finishes, "schema", f"{when}: finish_reason {finish!r}, but the calls are {texts}")


async def vllm_46042(run: CaseRun) -> None:
    chat = run.chat(MARKED_TOKENS)
    bodies, has_tools = [chat], "tools" in run.abilities.supported
    if has_tools:
        forced = {**chat, **FORCED["get_weather"]}
        free = {name: value for name, value in forced.items() if name != "tool_choice"}
        bodies += [forced, {**free, "max_tokens": MARKED_TOKENS}, {**forced, "max_tokens": CUTS[1]}]
    answers = [answer for body in bodies for answer in await ask_both_ways(run, body, CHAT_PATH)]
    # A server that does not separate reasoning, or calls, leaves their marks where they are.
    has_reasoning = any(answer.first.reasoning for answer in answers)
    marks = (_MARKS["reasoning"] if has_reasoning else []) + (_MARKS["calls"] if has_tools else [])
    for answer in answers:
        left = [mark for mark in marks if mark in answer.first.text]
        run.expect(not left, "marks", f"{left} in the content: {answer.first.text[:80]!r}")
