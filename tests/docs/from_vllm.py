"""Writes the tables of docs/from-vllm.md: the names of vLLM's, and what the command line and the classes make of each.

python -m tests.docs.from_vllm
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from penstock.engine.commands import serve
from penstock.engine.config import option_names
from penstock.engine.sampling_params import UNSERVED, UNSERVED_HERE, SamplingParams
from penstock.engine.vllm_options import FATES, OF_A_SERVER, Fate
from tests.docs import vllm_names

PAGE = Path(__file__).parents[2] / "docs" / "from-vllm.md"
MARK = "<!-- what follows is written by python -m tests.docs.from_vllm -->"
OF_THE_CLASS = ("skip_tokenizer", "max_logprobs", "revision", "chat_template")  # of LLM itself


def flags() -> Iterator[str]:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    ours = {word: action for action in parser._actions for word in action.option_strings}
    for name in sorted(vllm_names.FLAGS):
        fate = FATES.get(name.replace("-", "_"))
        if fate is None:
            action = ours[f"--{name}"]
            first = action.option_strings[0] if action.help == argparse.SUPPRESS else first_word(parser, action.dest)
            yield row(f"`--{name}`", "same name" if first == f"--{name}" else f"taken for `{first}`", "")
        else:
            yield row(f"`--{name}`", *said(fate))


def first_word(parser: argparse.ArgumentParser, dest: str) -> str:
    return next(action.option_strings[0] for action in parser._actions if action.dest == dest)


def said(fate: Fate) -> tuple[str, str]:
    if fate.sets is not None:
        return "taken for `--" + fate.sets[0].replace("_", "-") + " " + fate.sets[1] + "`", fate.why
    if not fate.taken:
        return "refused", fate.why
    if "ANY" in fate.taken or fate.taken == {"true", "false"}:
        return "not needed", fate.why
    return "not needed: " + ", ".join(f"`{value}`" for value in sorted(fate.taken)) + "; else refused", fate.why


def keywords() -> Iterator[str]:
    known = {*option_names(), *OF_THE_CLASS}
    for name in vllm_names.KEYWORDS:
        if name in OF_A_SERVER:
            yield row(f"`{name}`", "refused", OF_A_SERVER[name])
        elif name not in known and name.replace("_", "-") not in vllm_names.FLAGS:
            yield row(f"`{name}`", *said(FATES[name]))


def sampling() -> Iterator[str]:
    for name in vllm_names.SAMPLING:
        found = UNSERVED.get(name) or UNSERVED_HERE.get(name)
        if name in SamplingParams.__struct_fields__:
            yield row(f"`{name}`", "same name", "")
        else:
            assert found is not None, name
            neutral = ", ".join(f"`{value}`" for value in found.neutral)
            yield row(f"`{name}`", f"{neutral} taken; else refused" if neutral else "refused", found.reason)


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page(text: str) -> str:
    head, mark, _ = text.partition(MARK)
    assert mark, f"{PAGE.name} has lost its mark"
    lines = [MARK, "", "## `vllm serve`", "", "| flag | here | |", "|---|---|---|", *flags(), "", "## `LLM(...)`", ""]
    lines += ["A flag of the engine is a keyword too, with underscores, and meets the same fate, but for these:", ""]
    lines += ["| keyword | here | |", "|---|---|---|", *keywords(), ""]
    lines += ["## `SamplingParams(...)`", "", "| keyword | here | |", "|---|---|---|", *sampling()]
    return head + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    print(f"{PAGE.name} is written")
