"""Harmony, the output format of gpt-oss: an answer is a list of messages, each with a header that names its channel.

    <|channel|>analysis<|message|>…<|end|>                                             reasoning
    <|start|>assistant<|channel|>final<|message|>…<|return|>                           the text of the answer
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>   a call

The prompt ends with `<|start|>assistant`. The recipient of a message (`to=`) may also precede the channel. Commentary
without a recipient introduces calls and is part of the answer's text; so is a message to an unknown function. This
module treats the marks as text; tool_choice.py handles them as special tokens.
"""

from penstock.engine.text.tools.formats import ToolFormat, Written
from penstock.engine.text.tools.thinking import HARMONY as MARKS
from penstock.engine.text.tools.thinking import Thinking

NAME = "harmony"
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TOKENS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
FORM = ToolFormat(
    NAME,
    (),
    Written("", f"{CHANNEL}commentary to=functions.", f" {CONSTRAIN}json{MESSAGE}", "", "", ""),
    {},
    extra=TOKENS,
    has_many=False,  # a call ends the turn
)


def is_written(source: str) -> bool:
    """Return whether a chat template uses this format."""
    return CHANNEL in source and MESSAGE in source


def after_prompt(prompt: str) -> Thinking:
    """Return how an answer begins after this prompt. A message begun in the prompt is the answer's first message."""
    begun = prompt[prompt.rindex(START) :].strip() if START in prompt else ""
    return Thinking(MARKS, begun="" if begun == f"{START}assistant" else begun)
