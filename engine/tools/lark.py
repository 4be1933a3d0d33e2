"""The grammar that holds a model to its format of calls, in llguidance's dialect of Lark.

    answer must be a call      start: calls
    may be one                 start: (lead call)* TEXT      the text is free up to the mark, then the call is forced
    or a given form            start: answer | calls
    behind reasoning           start: think …                everything above holds from the closing mark on

A mark that is a special token of the model is matched as that token (`<[id]>`), any other as text, and a lazy rule
ends free text at the first place where the mark stands.
"""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from penstock.engine.grammar.source import WHITESPACE
from penstock.engine.sampling_params import InvalidRequest, StructuredOutputs
from penstock.engine.tools.formats import Calls, Format
from penstock.engine.tools.thinking import Thinking

# One space behind comma and colon, as templates print JSON: nothing is left open that says nothing, and what is
# forced need not be sampled.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY = r"(.|\n)*"
_BLANK = r"[ \t\r\n]*"


def grammar(
    special_ids: Mapping[str, int],
    calls: Calls | None = None,
    answer: StructuredOutputs | None = None,
    thinking: Thinking | None = None,
) -> str:
    """Lark for an answer that is `answer` or calls, behind reasoning. One of the two is given."""
    assert calls is not None or answer is not None, "there is nothing to hold an answer to"
    rules = _Rules(special_ids)
    lead = rules.thinking(thinking) if thinking is not None else ""
    parts = []
    if answer is not None:
        parts.append(rules.answer(answer))
    if calls is not None:
        parts.append(rules.calls(calls) if calls.must or answer is not None else rules.maybe_calls(calls, thinking))
    rules.lines.insert(0, f"start: {lead}({' | '.join(parts)})")
    return "\n".join(["%llguidance {}", *rules.lines, f"TEXT: /{_ANY}/"])


class _Rules:
    """The rules so far."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self.lines: list[str] = []
        self._special_ids = special_ids

    def thinking(self, thinking: Thinking) -> str:
        marks = thinking.marks
        self._until("thoughts", marks.close)
        self.lines.append(f"BLANK: /{_BLANK}/")
        return "thoughts BLANK " if thinking.is_open else f"({self._text(marks.open, marks)} thoughts)? BLANK "

    def answer(self, wanted: StructuredOutputs) -> str:
        kind = wanted.kind
        value = getattr(wanted, kind)
        if kind in ("json", "json_object"):
            schema = {"type": "object"} if kind == "json_object" else _loaded(value)
            body = f"%json {_schema(schema, {'whitespace_pattern': WHITESPACE})}"
        elif kind == "regex":
            body = "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", value) + "/"
        elif kind == "choice":
            body = " | ".join(json.dumps(text) for text in dict.fromkeys(value))
        elif kind == "grammar":
            body = f"%lark {{\n{value}\n}}"
        else:
            raise InvalidRequest("structured_outputs.structural_tag", "cannot be combined with tools")
        name = "ANSWER" if kind == "regex" else "answer"
        self.lines.append(f"{name}: {body}")
        return name

    def calls(self, calls: Calls) -> str:
        """Calls from the first character on."""
        written, marks = calls.form.written, _marks(calls.form)
        call = self._call(calls)
        more = f"({self._text(written.join, marks)} {call})*" if calls.many else ""
        parts = [self._text(written.start, marks), call, more, self._text(written.end, marks)]
        return " ".join(part for part in parts if part)

    def maybe_calls(self, calls: Calls, thinking: Thinking | None) -> str:
        """Text, and calls where a mark stands."""
        form, written = calls.form, calls.form.written
        marks, mark = _marks(form), calls.form.marks[0]
        call = self._call(calls)
        self._free_text(calls, thinking)
        self._until("lead", mark, "FIRST")
        rest = self._text(written.start.removeprefix(mark), marks)
        more = f"({self._text(written.join, marks)} {call})*" if calls.many and mark not in written.join else ""
        body = " ".join(part for part in (rest, call, more, self._text(written.end, marks)) if part)
        if form.is_bare:
            return f"FIRST | {body} | lead {body}"
        if not calls.many:
            return f"FIRST | lead {body}"
        self._until("next", mark, "FREE")
        return f"FIRST | lead {body} (next {body})* FREE"

    def _free_text(self, calls: Calls, thinking: Thinking | None) -> None:
        """FREE, what text between calls may be, and FIRST, the same at the beginning of an answer. The lexer takes the
        longest match, so FIRST must not begin like anything else that may stand there: the blanks behind reasoning,
        reasoning itself, a bare call. And the reader takes a mark for one that is only spelled out, so neither has it."""
        spelled = [f"{_ANY}{_escaped(mark)}" for mark in calls.form.marks if mark in self._special_ids]
        begin, others = _ANY, list(spelled)
        if thinking is not None:
            begin = rf"([^ \t\r\n]{_ANY})?"
            others += [] if thinking.is_open else [_escaped(thinking.marks.open)]
        if calls.form.is_bare:
            names = "|".join(_escaped(function.name) for function in calls.functions)
            others.append(rf'{_BLANK}\{{{_BLANK}"name"{_BLANK}:{_BLANK}"({names})"')
        for name, pattern, excluded in (("FIRST", begin, others), ("FREE", _ANY, spelled)):
            self.lines.append(f"{name}: /{pattern}/" + "".join(f" & ~/{other}{_ANY}/" for other in excluded))

    def _call(self, calls: Calls) -> str:
        written, marks = calls.form.written, _marks(calls.form)
        for index, function in enumerate(calls.functions):
            # One piece of text up to the arguments: where text that is no call could go on as well, the lexer would
            # not see the end of a shorter one.
            head = self._text(written.before_name + function.name + written.before_arguments, marks)
            rule = f"function_{index}: {head} arguments_{index} {self._text(written.after_arguments, marks)}"
            options = _SPACING if function.is_strict else {**_SPACING, "lenient": True}
            schema = _schema({"type": "object", **function.parameters}, options)
            self.lines += [rule.rstrip(), f"arguments_{index}: %json {schema}"]
        self.lines.append("call: " + " | ".join(f"function_{index}" for index in range(len(calls.functions))))
        return "call"

    def _until(self, rule: str, mark: str, text: str = "TEXT") -> None:
        """A rule: free text up to a mark and with it."""
        token = self._special_ids.get(mark)
        self.lines.append(
            f"{rule}[lazy]: {text} {json.dumps(mark)}" if token is None else f"{rule}: {text} <[{token}]>"
        )

    def _text(self, text: str, marks: Collection[str]) -> str:
        """Fixed text as Lark, the special tokens in it as tokens."""
        parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text)
        return " ".join(
            f"<[{self._special_ids[part]}]>" if part in self._special_ids else json.dumps(part)
            for part in parts
            if part
        )


def _marks(form: Format) -> tuple[str, ...]:
    return form.marks + form.punctuation


def _loaded(schema: str | dict[str, Any] | bool) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("structured_outputs.json", f"not valid JSON: {error}") from None


def _schema(schema: Any, options: dict[str, Any]) -> str:
    """The schema's text, with what llguidance is told about it."""
    text = json.dumps({**schema, "x-guidance": options} if isinstance(schema, dict) else schema, ensure_ascii=False)
    return text.replace("::=", ":\\u003a=")  # which in a grammar is taken for another dialect


def _escaped(text: str) -> str:
    """As a regular expression of Lark, between slashes."""
    return re.sub(r"([\\/.+*?()|\[\]{}^$#&~-])", r"\\\1", text)
