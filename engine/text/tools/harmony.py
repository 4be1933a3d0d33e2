"""Harmony, the output format of gpt-oss: an answer is a list of messages, each with a header that names its channel.

    <|channel|>analysis<|message|>…<|end|>                                             reasoning
    <|start|>assistant<|channel|>final<|message|>…<|return|>                           the text of the answer
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>   a call

The prompt ends with `<|start|>assistant`. The recipient of a message (`to=`) may also precede the channel. Commentary
without a recipient introduces calls and is part of the answer's text; so is a message to an unknown function. This
module treats the marks as text; tool_choice.py handles them as special tokens.
"""

from penstock.engine.text.tools.call_kinds import NamedCalls
from penstock.engine.text.tools.thinking import HARMONY as MARKS
from penstock.engine.text.tools.thinking import Thinking

NAME = "harmony"
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TOKENS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
# HarmonyReader (harmony_reader.py) parses whole answers in this format, instead of the class here.
FORM = NamedCalls(
    NAME,
    *("", "", f"{CHANNEL}commentary to=functions.", f" {CONSTRAIN}json{MESSAGE}", ""),
    found_by=((CHANNEL, MESSAGE),),
    extra=TOKENS,
    has_many=False,  # a call ends the turn
)


def after_prompt(prompt: str) -> Thinking:
    """Return how an answer begins after this prompt. A message begun in the prompt is the answer's first message."""
    begun = prompt[prompt.rindex(START) :].strip() if START in prompt else ""
    return Thinking(MARKS, begun="" if begun == f"{START}assistant" else begun)
