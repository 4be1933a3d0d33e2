"""Collects the rules of one grammar in llguidance's dialect of Lark.

A special token of the model inside fixed text is matched as that token (`<[id]>`), all other text as text. A lazy rule
ends free text at the first occurrence of a mark.
"""

import json
import re
from collections.abc import Mapping

from penstock.engine.grammar.json_schema import WHITESPACE, guided_json, prepared
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.sampling_params import MAX_GRAMMAR_CHARS, StructuredOutputs
from penstock.engine.text.tools.thinking import Thinking

ANY = r"(.|\n)*"
BLANK = r"[ \t\r\n]*"


def schema_json(outputs: StructuredOutputs) -> str:
    """Return the schema of the request's structured_outputs as JSON text for llguidance."""
    schema = prepared({"type": "object"} if outputs.kind == "json_object" else outputs.json, "structured_outputs.json")
    return guided_json(schema, coerce_one_of=outputs.coerce_one_of, whitespace_pattern=WHITESPACE)


def grammar_source(outputs: StructuredOutputs) -> str:
    """Return the text of the grammar for an output format that has been checked."""
    if outputs.kind in ("json", "json_object"):  # not in Lark, within which llguidance takes 1 ms longer to compile it
        return f'{{"grammars": [{{"json_schema": {schema_json(outputs)}}}]}}'
    if outputs.grammar is not None:
        return outputs.grammar
    rules = Rules({})
    return rules.lark(rules.answer(outputs))


class Rules:
    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self.lines: list[str] = []
        self._shared: dict[str, str] = {}  # body → name of its rule
        self._special_ids = special_ids
        longest = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest))})") if longest else None

    def lark(self, start: str) -> str:
        """Return the whole grammar; raise InvalidRequest if calls make it too large."""
        text = "\n".join(["%llguidance {}", f"start: {start}", *self.lines, f"TEXT: /{ANY}/", f"BLANK: /{BLANK}/"])
        if self._shared and len(text) > MAX_GRAMMAR_CHARS:
            what = f"their grammar would have {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are allowed"
            raise InvalidRequest("tools", what)
        return text

    def shared(self, body: str, *, is_terminal: bool = False, is_lazy: bool = False) -> str:
        """Return the name of a rule with this body, adding it if it is new. Functions share equal rules: with a hundred
        functions, separate terminals would exceed the limits of llguidance's lexer."""
        key = f"{is_terminal} {is_lazy} {body}"
        if key not in self._shared:
            name = f"{'SHARED' if is_terminal else 'shared'}_{len(self._shared)}"
            self.lines.append(f"{name}{'[lazy]' if is_lazy else ''}: {body}")
            self._shared[key] = name
        return self._shared[key]

    def text(self, text: str) -> str:
        """Return the Lark expression for fixed text, with special tokens matched as tokens."""
        ids, parts = self._special_ids, self._parts(text)
        return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part, ensure_ascii=False) for part in parts)

    def until(self, rule: str, mark: str, text: str = "TEXT") -> None:
        """Add a rule for free text up to and including a mark."""
        before, *rest = self._parts(mark)
        if not rest and before not in self._special_ids:
            self.lines.append(f"{rule}[lazy]: {text} {json.dumps(mark)}")
            return
        if before not in self._special_ids:
            self.lines.append(f"{rule.upper()}_UP_TO: {text} {json.dumps(before)}")
            text, mark = f"{rule.upper()}_UP_TO", mark.removeprefix(before)
        self.lines.append(f"{rule}: {text} {self.text(mark)}")

    def until_each(self, rule: str, blocks: Mapping[str, str], text: str = "TEXT") -> str:
        """Add rules for free text up to a mark. Return the Lark expression for one of them and the block of its mark."""
        for number, mark in enumerate(blocks):
            self.until(f"{rule}_{number}", mark, text)
        return f"({' | '.join(f'{rule}_{number} {block}' for number, block in enumerate(blocks.values()))})"

    def free_text(self, *marks: str) -> str:
        """Return the Lark terminal for free text in which no mark that is a special token is spelled out: the parsers work
        on text, so they would take it for the mark."""
        spelled = [mark for mark in marks if any(part in self._special_ids for part in self._parts(mark))]
        return f"/{ANY}/" + "".join(f" & ~/{ANY}{escaped(mark)}{ANY}/" for mark in spelled)

    def thinking(self, thinking: Thinking | None) -> str:
        """Return the Lark expression for the reasoning before the answer, with the blanks after it, plus a space; empty
        if there is none."""
        if thinking is None:
            return ""
        marks = thinking.marks
        self.lines.append(f"THOUGHT: {self.free_text(marks.close)}")
        self.until("thoughts", marks.close, "THOUGHT")
        opening = self.text(marks.open)
        if marks.is_implied and not thinking.is_open:
            return f"({opening})? thoughts BLANK "
        return "thoughts BLANK " if thinking.is_open else f"({opening} thoughts BLANK)? "

    def answer(self, outputs: StructuredOutputs, thinking: Thinking | None = None) -> str:
        """Add a rule for an answer that follows the request's structured_outputs and return its name."""
        kind = outputs.kind
        value = getattr(outputs, kind)
        if kind in ("json", "json_object"):
            body = f"%json {schema_json(outputs)}"
        elif kind == "regex":
            pattern = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", value)  # a slash would end the expression
            body = f"/{pattern}/"
            if thinking is not None and not (thinking.is_open or thinking.marks.is_implied):
                body += f" & ~/(?s:{BLANK}{re.escape(thinking.marks.open)}.*)/"  # this is reasoning, not the answer
        elif kind == "choice":
            body = " | ".join(json.dumps(text) for text in dict.fromkeys(value))
        else:
            body = f"%lark {{\n{value}\n}}"
        name = "ANSWER" if kind == "regex" else "answer"
        self.lines.append(f"{name}: {body}")
        return name

    def _parts(self, text: str) -> list[str]:
        return [part for part in (self._special.split(text) if self._special else [text]) if part]


def escaped(text: str) -> str:
    """Return fixed text escaped as a regular expression, for use between two slashes."""
    return re.sub(r"([\\/.+*?()|\[\]{}^$#&~-])", r"\\\1", text).replace("\n", "\\n")
