"""Builds the grammar that enforces a model's tool call format, in llguidance's dialect of Lark.

    calls are required       start: calls
    calls are optional       start: (text mark calls)* text    text is free up to a mark; after it, a call is forced
    a constrained answer     start: answer | calls
    after reasoning          start: reasoning …                the rules above apply after the closing mark

The grammar allows only one spelling of a call, that of the model's chat template. The parsers in engine/text/tools
accept more spellings, for calls that are not constrained by a grammar.
"""

from collections.abc import Mapping

from penstock.engine.grammar.argument_rules import argument_rules
from penstock.engine.grammar.rules import ANY, BLANK, Rules, escaped
from penstock.engine.sampling_params import StructuredOutputs
from penstock.engine.text.tools import harmony
from penstock.engine.text.tools.call_kinds import Calls
from penstock.engine.text.tools.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START
from penstock.engine.text.tools.thinking import Thinking


def grammar(
    special_ids: Mapping[str, int],
    calls: Calls | None = None,
    answer: StructuredOutputs | None = None,
    thinking: Thinking | None = None,
) -> str:
    """Return the Lark grammar for optional reasoning followed by `answer` or calls; at least one of them is given."""
    assert calls is not None or answer is not None, "there is nothing to hold an answer to"
    rules = Rules(special_ids)
    lead = rules.thinking(thinking)
    if calls is not None and not calls.must and answer is None:
        return rules.lark(lead + _optional(rules, calls, thinking))
    ways = [rules.answer(answer, thinking)] if answer is not None else []
    if calls is not None:
        ways.append(f"{rules.text(calls.form.start)} {_block(rules, calls, calls.form.before_name)}")
    return rules.lark(f"{lead}({' | '.join(ways)})")


def messages_grammar(
    special_ids: Mapping[str, int],
    calls: Calls | None = None,
    answer: StructuredOutputs | None = None,
    thinking: Thinking | None = None,
) -> str:
    """Return the Lark grammar for gpt-oss's messages after a prompt that ends with `<|start|>assistant` or within a message:
    any number of reasoning and commentary messages, then a call or the answer. If calls are required, only a call ends
    the turn."""
    rules = Rules(special_ids)
    text = rules.text
    rules.lines.append(f"BODY: {rules.free_text(*harmony.ENDS)}")
    rules.until("body", END, "BODY")
    again = f"body {text(f'{START}assistant')}"
    lead = [f"{text(f'{CHANNEL}analysis{MESSAGE}')} {again}"]
    ends = []
    if calls is not None:
        lead.append(f"{text(f'{CHANNEL}commentary{MESSAGE}')} {again}")
        constrain = f'(" "? {text(CONSTRAIN)} "json" | " json")? {text(MESSAGE)}'
        for function in calls.functions:
            to, arguments = f"to=functions.{function.name}", argument_rules(rules, harmony.FORM, function)
            ends.append(f"{text(f'{CHANNEL}commentary {to}')} {constrain} {arguments}")
            ends.append(f"{text(f' {to}{CHANNEL}commentary')} {constrain} {arguments}")
    open_channel = harmony.HarmonyReader(calls, thinking, is_certain=True).channel
    if calls is None or not calls.must:
        final = "TEXT" if answer is None else rules.answer(answer)
        ends.append(f"{text(f'{CHANNEL}final{MESSAGE}')} {final}")
        if open_channel == "final":
            return rules.lark(final)
    return rules.lark(f"{'' if open_channel is None else again} ({' | '.join(lead)})* ({' | '.join(ends)})")


def _block(rules: Rules, calls: Calls, before: str, *, is_optional: bool = False) -> str:
    """Return the Lark expression for one or more calls with their closing text. `before` precedes the first name."""
    form, name = calls.form, f"call_{len(rules.lines)}"
    first: list[str] = []
    later: list[str] = []
    for function in calls.functions:
        arguments = argument_rules(rules, calls.form, function)
        behind = f"{arguments} {rules.text(form.after_arguments)}"
        # The text up to the arguments is a single terminal: next to a free-text terminal, the lexer would miss the end
        # of a shorter one.
        for heads, head in ((first, before), (later, form.join + form.before_name)):
            heads.append(f"{rules.text(head + function.name + form.before_arguments)} {behind}")
    rules.lines.append(f"{name}: {' | '.join(first)}")
    # If each call has its own marks, the next call in free text begins with the next mark.
    if not calls.many or (is_optional and form.start and form.join.endswith(form.start)):
        return f"{name} {rules.text(form.end)}"
    rules.lines.append(f"{name}_later: {' | '.join(later)}")
    return f"{name} ({name}_later)* {rules.text(form.end)}"


def _optional(rules: Rules, calls: Calls, thinking: Thinking | None) -> str:
    """Return the Lark expression for free text in which a mark forces a call.

    For calls without a mark, the whole text up to a function's arguments is the mark: a shorter text could not tell a
    call from an example.
    """
    form, end = calls.form, rules.text(calls.form.end)
    triggers = {mark: _block(rules, calls, form.opening(mark), is_optional=True) for mark in form.triggers}
    for function in calls.functions if form.is_bare else ():
        arguments = argument_rules(rules, form, function)
        head = form.before_name + function.name + form.before_arguments
        triggers[head] = f"{arguments} {rules.text(form.after_arguments)} {f'({end})?' if end else ''}"
    free_text = rules.free_text(*form.triggers)
    no_reasoning = "" if thinking is None else f" & ~/{BLANK}{escaped(thinking.marks.open)}{ANY}/"
    rules.lines += [f"FREE: {free_text}", f"FIRST: {free_text}{no_reasoning}"]
    rules.lines += [f"block_{number}: {block}" for number, block in enumerate(triggers.values())]
    names = {mark: f"block_{number}" for number, mark in enumerate(triggers)}
    first, free = rules.until_each("first", names, "FIRST"), rules.until_each("free", names, "FREE")
    return f"(FIRST | {first} {f'{free}* FREE' if calls.many else ''})"
