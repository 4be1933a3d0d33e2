"""Reasoning in an answer: the text between two marks at its beginning, or from its beginning on where the prompt has
opened it already."""

from typing import NamedTuple


class Marks(NamedTuple):
    """`is_implied`: the answer begins with reasoning, with or without the opening mark, unless the prompt closes it."""

    open: str
    close: str
    is_implied: bool = False


THINK = Marks("<think>", "</think>")
MISTRAL = Marks("[THINK]", "[/THINK]")
SEED = Marks("<seed:think>", "</seed:think>")
GEMMA = Marks("<|channel>thought", "<channel|>")
HARMONY = Marks("<|channel|>analysis", "<|channel|>final")  # read by a reader of its own (harmony.py)
IMPLIED = THINK._replace(is_implied=True)
# The names that other servers give to the same thing are accepted.
NAMES = {
    **dict.fromkeys(("think", "qwen3", "deepseek_v3", "glm45", "glm47", "hunyuan_a13b", "olmo3"), THINK),
    **dict.fromkeys(("deepseek_r1", "minimax_m2"), IMPLIED),
    "mistral": MISTRAL,
    "seed_oss": SEED,
    "gemma4": GEMMA,
    **dict.fromkeys(("harmony", "openai_gptoss"), HARMONY),
}


def detect(source: str) -> Marks | None:
    """Return the marks that a chat template knows; None if its model does not reason aloud."""
    known = (THINK, MISTRAL, SEED, GEMMA, HARMONY)
    return next((marks for marks in known if marks.open in source or marks.close in source), None)


class Thinking(NamedTuple):
    """Says how an answer may begin: within reasoning (`is_open`), or with it unless the prompt has closed it (`is_over`),
    which asks the model not to think."""

    marks: Marks
    is_open: bool = False
    is_over: bool = False
    begun: str = ""  # harmony: what the prompt has of the message that goes on


def thinking_after(marks: Marks, prompt: str, begun: str = "") -> Thinking:
    """Return how an answer begins behind a prompt. `begun`: the end of the prompt that the answer continues, reasoning included."""
    before = prompt[: -len(begun)].rstrip() if begun else prompt.rstrip()
    if not begun.strip():
        return Thinking(marks, before.endswith(marks.open), before.endswith(marks.close))
    opened, closed = begun.rfind(marks.open), begun.rfind(marks.close)
    is_open = opened > closed or (opened == closed and before.endswith(marks.open))
    return Thinking(marks, is_open, not is_open)
