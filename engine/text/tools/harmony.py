"""Harmony, in which gpt-oss writes: an answer is messages, each with a header that says which channel it is for.

    <|channel|>analysis<|message|>…<|end|>                                             reasoning
    <|start|>assistant<|channel|>final<|message|>…<|return|>                           the text of the answer
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>   a call

The prompt ends with `<|start|>assistant`. Whom a message is to (`to=`) may also stand before the channel. Text in the
commentary channel that is to no function introduces calls: it is part of the answer, as is what is to a function that
there is not. Knows the marks as text; that they are special tokens is tool_choice.py's.
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
    """Return whether a chat template is of this format."""
    return CHANNEL in source and MESSAGE in source


def after_prompt(prompt: str) -> Thinking:
    """Return how an answer begins behind the end of a prompt. What the prompt has begun belongs to the answer's first message."""
    begun = prompt[prompt.rindex(START) :].strip() if START in prompt else ""
    return Thinking(MARKS, begun="" if begun == f"{START}assistant" else begun)
