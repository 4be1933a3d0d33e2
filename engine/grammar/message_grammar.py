"""The grammar that holds gpt-oss to its messages (engine/text/tools/harmony.py): reasoning and introductions as it likes,
then a call, or an answer, which may have a form of its own."""

from collections.abc import Mapping

from penstock.engine.grammar.tool_calls import Rules
from penstock.engine.sampling_params import StructuredOutputs
from penstock.engine.text.tools.formats import Calls
from penstock.engine.text.tools.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START


def grammar(special_ids: Mapping[str, int], calls: Calls | None, answer: StructuredOutputs | None) -> str:
    """Lark for an answer behind a prompt that ends with `<|start|>assistant`. A call that must be is the only end."""
    rules = Rules(special_ids)
    text = rules.text
    rules.until("body", END)
    again = f"body {text(f'{START}assistant')}"
    lead = [f"{text(f'{CHANNEL}analysis{MESSAGE}')} {again}"]
    ends = []
    if calls is not None:
        lead.append(f"{text(f'{CHANNEL}commentary{MESSAGE}')} {again}")
        constrain = f'(" "? {text(CONSTRAIN)} "json" | " json")? {text(MESSAGE)}'
        for index, function in enumerate(calls.functions):
            to, arguments = f"to=functions.{function.name}", rules.arguments(index, function)
            ends.append(f"{text(f'{CHANNEL}commentary {to}')} {constrain} {arguments}")
            ends.append(f"{text(f' {to}{CHANNEL}commentary')} {constrain} {arguments}")
    if calls is None or not calls.must:
        ends.append(f"{text(f'{CHANNEL}final{MESSAGE}')} {'TEXT' if answer is None else rules.answer(answer)}")
    rules.lines.insert(0, f"start: ({' | '.join(lead)})* ({' | '.join(ends)})")
    return rules.lark()
