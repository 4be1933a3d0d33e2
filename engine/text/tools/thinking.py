"""Reasoning in an answer: the text between two marks at its beginning, or from its beginning on where the prompt has
opened it already."""

from typing import NamedTuple


class Marks(NamedTuple):
    open: str
    close: str


THINK = Marks("<think>", "</think>")
MISTRAL = Marks("[THINK]", "[/THINK]")
HARMONY = Marks("<|channel|>analysis", "<|channel|>final")  # read by a reader of its own (harmony.py)
# The names that other servers give to the same thing are accepted.
NAMES = {"think": THINK, "deepseek_r1": THINK, "qwen3": THINK, "mistral": MISTRAL, "harmony": HARMONY}


def detect(source: str) -> Marks | None:
    """The marks that a chat template knows; None: its model does not reason aloud."""
    return next((marks for marks in (THINK, MISTRAL, HARMONY) if marks.open in source or marks.close in source), None)


class Thinking(NamedTuple):
    """How an answer may begin: within reasoning (`is_open`), or with it unless the prompt has closed it (`is_over`),
    which asks the model not to think."""

    marks: Marks
    is_open: bool = False
    is_over: bool = False
    begun: str = ""  # harmony: what the prompt has of the message that goes on


def thinking_after(marks: Marks, prompt: str) -> Thinking:
    end = prompt.rstrip()
    return Thinking(marks, end.endswith(marks.open), end.endswith(marks.close))
