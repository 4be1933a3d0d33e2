"""The reasoning of an answer: text between two marks at its beginning, or from its beginning on if the prompt ends with
the opening mark."""

from typing import NamedTuple


class Marks(NamedTuple):
    """The marks around reasoning. `is_implied`: reasoning needs no opening mark unless the prompt has closed it."""

    open: str
    close: str
    is_implied: bool = False


THINK = Marks("<think>", "</think>")
MISTRAL = Marks("[THINK]", "[/THINK]")
SEED = Marks("<seed:think>", "</seed:think>")
GEMMA = Marks("<|channel>thought", "<channel|>")
HARMONY = Marks("<|channel|>analysis", "<|channel|>final")  # has a separate parser (harmony.py)
IMPLIED = THINK._replace(is_implied=True)
# Includes the names that other servers use for the same marks. `detect` takes the first that fit: THINK before IMPLIED.
NAMES = {
    **dict.fromkeys(("think", "qwen3", "deepseek_v3", "glm45", "glm47", "hunyuan_a13b", "olmo3"), THINK),
    **dict.fromkeys(("deepseek_r1", "minimax_m2"), IMPLIED),
    "mistral": MISTRAL,
    "seed_oss": SEED,
    "gemma4": GEMMA,
    **dict.fromkeys(("harmony", "openai_gptoss"), HARMONY),
}


def detect(source: str) -> Marks | None:
    """Return the reasoning marks in a chat template; None if there are none."""
    return next((marks for marks in NAMES.values() if marks.open in source or marks.close in source), None)


class Thinking(NamedTuple):
    """How an answer begins: within reasoning if the prompt has opened it (`is_open`), or without reasoning if the
    prompt has closed it (`is_over`), which tells the model not to think."""

    marks: Marks
    is_open: bool = False
    is_over: bool = False
    begun: str = ""  # harmony: the beginning of the answer's first message, if it is in the prompt


def thinking_after(marks: Marks, prompt: str, begun: str = "") -> Thinking:
    """Return how an answer begins after a prompt. `begun`: the end of the prompt that the answer continues."""
    before = prompt[: -len(begun)].rstrip() if begun else prompt.rstrip()
    if not begun.strip():
        return Thinking(marks, before.endswith(marks.open), before.endswith(marks.close))
    opened, closed = begun.rfind(marks.open), begun.rfind(marks.close)
    is_open = opened > closed or (opened == closed and before.endswith(marks.open))
    return Thinking(marks, is_open, not is_open)
