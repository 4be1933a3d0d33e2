"""The grammar that holds a model to its format of calls, in llguidance's dialect of Lark.

    answer must be a call      start: calls
    may be one                 start: (text call)* text      the text is free up to the mark, then a call is forced
    or a given form            start: answer | calls
    behind reasoning           start: think …                everything above holds from the closing mark on

A call that must be is written in one way; one that may be is written in the model's own: blanks, both names of the
arguments, keys in any order, several in a list or behind one mark. What the grammar takes for a call is what reader.py
reads as one. A mark that is a special token of the model is matched as that token (`<[id]>`), any other as text, and
a lazy rule ends free text at the first place where the mark stands.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.engine.grammar.json_schema import WHITESPACE, lark_json
from penstock.engine.grammar.parameters import ANY, ParameterRules, escaped
from penstock.engine.grammar.source import parsed
from penstock.engine.sampling_params import InvalidRequest, StructuredOutputs
from penstock.engine.text.tools.formats import Calls, Format, ToolSpec
from penstock.engine.text.tools.thinking import Thinking

# One space behind comma and colon, as templates print JSON: nothing is left open that says nothing, and what is
# forced need not be sampled.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OWN_SPACING = {"whitespace_pattern": WHITESPACE}
_BLANK = r"[ \t\r\n]*"
# A bounded number of blanks: a hot model could go on with them until its tokens are used up.
_GAP = r"[ \t\r\n]{1,34}"
# What begins a call without a mark, up to the name: nothing else in free text is held.
_OPENING = rf'\{{{_BLANK}("type"{_BLANK}:{_BLANK}"function"{_BLANK},{_BLANK})?"name"{_BLANK}:{_BLANK}"'
# An object that is a call. `plain` ones begin with their name and have arguments, as they must without a mark.
_OBJECT = r"""
colon: gap ":" gap
separator: gap (/[;,]/ gap)?
key: "\"arguments\"" | "\"parameters\""
name: "\"name\"" colon
id: "\"id\"" colon /"[A-Za-z0-9_-]{0,64}"/
type: "\"type\"" colon "\"function\""
close: (comma id)? (comma type)? gap "}"
plain: "{" gap (type comma)? name "\"" named close
"""
_NUMBER = '":" /[0-9]{1,4}/'
# Which schema holds arguments that stand before the name is known at the name only: all are followed until then.
_MAX_REVERSED = 16


def grammar(
    special_ids: Mapping[str, int],
    calls: Calls | None = None,
    answer: StructuredOutputs | None = None,
    thinking: Thinking | None = None,
) -> str:
    """Lark for an answer that is `answer` or calls, behind reasoning. One of the two is given."""
    assert calls is not None or answer is not None, "there is nothing to hold an answer to"
    rules = Rules(special_ids)
    lead = rules.thinking(thinking) if thinking is not None else ""
    parts = []
    if answer is not None:
        parts.append(rules.answer(answer, thinking))
    if calls is not None:
        parts.append(rules.calls(calls) if calls.must or answer is not None else rules.maybe_calls(calls, thinking))
    rules.lines.insert(0, f"start: {lead}({' | '.join(parts)})")
    return rules.lark()


class Rules:
    """The rules so far."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self.lines: list[str] = []
        self._shared: dict[str, str] = {}  # names of rules of arguments by their bodies
        self._special_ids = special_ids
        longest = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest))})") if longest else None

    def lark(self) -> str:
        return "\n".join(["%llguidance {}", *self.lines, f"TEXT: /{ANY}/"])

    def thinking(self, thinking: Thinking) -> str:
        marks = thinking.marks
        self.until("thoughts", marks.close)
        self.lines.append(f"BLANK: /{_BLANK}/")
        opening = self.text(marks.open)
        if marks.is_implied and not thinking.is_open:
            return f"({opening})? thoughts BLANK "
        return "thoughts BLANK " if thinking.is_open else f"({opening} thoughts)? BLANK "

    def answer(self, wanted: StructuredOutputs, thinking: Thinking | None = None) -> str:
        kind = wanted.kind
        value = getattr(wanted, kind)
        if kind in ("json", "json_object"):
            coerce_one_of, field = wanted.coerce_one_of, "structured_outputs.json"
            schema = {"type": "object"} if kind == "json_object" else parsed(value, field)
            body = lark_json(schema, field, coerce_one_of=coerce_one_of, whitespace_pattern=WHITESPACE)
        elif kind == "regex":
            body = "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", value) + "/"
            if thinking is not None and not (thinking.is_open or thinking.marks.is_implied):
                body += f" & ~/(?s:{_BLANK}{re.escape(thinking.marks.open)}.*)/"  # that is reasoning, and no answer
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
        written = calls.form.written
        call, later = self._call(calls)
        parts = [self.text(written.start), call, f"({later})*" if calls.many else "", self.text(written.end)]
        return " ".join(part for part in parts if part)

    def maybe_calls(self, calls: Calls, thinking: Thinking | None) -> str:
        """Text, and calls where a mark stands or a paragraph begins like one.

        `called` is an answer up to the end of a call, `missed` one up to the name of something else that began alike.
        """
        form = calls.form
        self.lines += [f"GAP: /{_GAP}/", "gap: GAP?", 'comma: gap "," gap']
        if form.is_framed:
            self._frames(calls)
        else:
            self._objects(calls)
        self._texts(calls, thinking)
        called, missed = [], []
        for kind, before in (("FIRST", ""), ("FREE", "called "), ("OTHER", "missed ")):
            if (kind == "FREE" and not calls.many) or (kind == "OTHER" and not form.is_bare):
                continue
            for index, mark in enumerate(mark for mark in form.marks if mark not in form.fences):
                self.until(f"{kind.lower()}_{index}", mark, kind)
                behind = self._frames_behind(calls, mark) if form.is_framed else self._behind_mark(calls, mark)
                called.append(f"{before}{kind.lower()}_{index} {behind}")
            for name, behind in _openings(calls):
                self.lines.append(f"{kind.lower()}_{name}[lazy]: {kind}_{name.upper()}")
                called.append(f"{before}{kind.lower()}_{name} named close {behind}")
                missed.append(f"{before}{kind.lower()}_{name}")
        self.lines += [f"{rule}: {' | '.join(ways)}" for rule, ways in (("called", called), ("missed", missed)) if ways]
        return "FIRST | called " + ("FREE" if calls.many else "gap") + (" | missed OTHER" if missed else "")

    def _objects(self, calls: Calls) -> None:
        self.lines += _OBJECT.strip().splitlines()
        named, bare, reversed_ = [], [], []
        for index, function in enumerate(calls.functions):
            name = json.dumps(function.name + '"')
            arguments = self.arguments(index, function, _OWN_SPACING, calls.form)
            named.append(f"{name} comma key colon {arguments}")
            bare += [name] if _takes_nothing(function.parameters) else []
            reversed_.append(f'{arguments} comma name "\\"" {name}')
        ways = [f'name "\\"" ({" | ".join(["named", *bare])})']
        if len(reversed_) <= _MAX_REVERSED:
            ways.append(f"key colon ({' | '.join(reversed_)})")
        self.lines += [
            f"named: {' | '.join(named)}",
            f'object: "{{" gap (id comma)? (type comma)? ({" | ".join(ways)}) close',
        ]

    def _frames(self, calls: Calls) -> None:
        """Calls that are a name and its arguments, from the name on, in the model's own way."""
        form, frames = calls.form, []
        for index, function in enumerate(calls.functions):
            behind, words = form.written.before_arguments, form.written.before_arguments.split()
            if form.is_numbered:
                head = [self.text(function.name), _NUMBER, *map(self.text, words)]
            elif behind[:1].isspace() or not behind:
                head = [*map(self.text, [function.name, *words])]
            else:  # in one piece: the name of a call must not be the beginning of text that is none
                head = [self.text(function.name + words[0]), *map(self.text, words[1:])]
            arguments = self.arguments(index, function, _OWN_SPACING, form, is_loose=True)
            frames.append(" gap ".join([*head, arguments, *map(self.text, form.written.after_arguments.split())]))
        self.lines.append(f"frame: {' | '.join(frames)}")

    def _frames_behind(self, calls: Calls, mark: str) -> str:
        form = calls.form
        join = "comma" if "," in form.written.join else "gap"
        before = "".join(f"{self.text(word)} gap " for word in form.written.before_name.split())
        is_block = calls.many and (form.written.before_name or form.written.after_arguments)
        more = f"({join} {before}frame)*" if is_block else ""
        opening = "".join(f"{self.text(word)} gap " for word in form.opening(mark))
        return f"gap {opening}frame {more} gap {' gap '.join(map(self.text, form.closing(mark)))}"

    def _behind_mark(self, calls: Calls, mark: str) -> str:
        closer = calls.form.closers[mark]
        more = "(comma object)*" if calls.many else ""
        ways = [f'"[" gap object {more} gap "]"']
        ways.append("object (separator object)*" if closer and calls.many else "object")
        if calls.form.has_args:
            call_id = f"({self.text('[CALL_ID]')} /[A-Za-z0-9_-]{{1,64}}/)?"
            behind = f"{call_id} ({self.text('[ARGS]')})? gap"
            ways += [
                f"{json.dumps(function.name)} {behind} arguments_{index}"
                for index, function in enumerate(calls.functions)
            ]
        return f"gap ({' | '.join(ways)})" + (f" gap {self.text(closer)}" if closer else "")

    def _texts(self, calls: Calls, thinking: Thinking | None) -> None:
        """What text may be: FIRST at the beginning of an answer, FREE behind a call, OTHER behind what began like one;
        and each of them up to a call without a mark. The lexer takes the longest match, so FIRST must not begin like
        anything else that may stand there: the blanks behind reasoning, or reasoning itself. And the reader takes a
        mark for one that is only spelled out, so none of them has it."""
        form = calls.form
        spelled = [
            f"{ANY}{escaped(mark)}" for mark in form.marks if len(self._parts(mark)) > 1 or mark in self._special_ids
        ]
        first = list(spelled)
        if thinking is not None and not thinking.is_open:
            first.append(escaped(thinking.marks.open))
        names = "|".join(escaped(function.name) for function in calls.functions)
        begun = ANY if thinking is None else rf"[^ \t\r\n]{ANY}"
        fence = "|".join(map(escaped, form.fences)) + rf"(json)?{_BLANK}"
        for kind, text, start, excluded in (
            ("FIRST", begun, "" if thinking is not None else _BLANK, first),
            ("FREE", ANY, rf"{_BLANK}[;,]?{_BLANK}", spelled),
            ("OTHER", ANY, None, [*spelled, rf'({names})"']),
        ):
            paragraph = rf"{text}\n\n" if start is None else rf"({text}\n\n|{start})"
            patterns = {"": f"({text})?"}
            if form.is_bare:
                patterns |= {"_BARE": paragraph + _OPENING, "_LIST": rf"{paragraph}\[{_BLANK}{_OPENING}"}
            if form.fences:
                fenced = f"({text})?({fence})"
                patterns |= {"_FENCE": fenced + _OPENING, "_FENCED_LIST": rf"{fenced}\[{_BLANK}{_OPENING}"}
            without = "".join(f" & ~/{other}{ANY}/" for other in excluded)
            self.lines += [f"{kind}{name}: /{pattern}/{without}" for name, pattern in patterns.items()]

    def _call(self, calls: Calls) -> tuple[str, str]:
        """A call, and one behind another one."""
        form, written, names = calls.form, calls.form.written, range(len(calls.functions))
        for index, function in enumerate(calls.functions):
            arguments = self.arguments(index, function, _SPACING, form)
            for rule, join in (("function", ""), ("later", written.join)):
                # One piece of text up to the arguments: where text that is no call could go on as well, the lexer would
                # not see the end of a shorter one.
                head = join + written.before_name + function.name
                if form.is_numbered:
                    lark = f"{self.text(head)} {_NUMBER} {self.text(written.before_arguments)}"
                else:
                    lark = self.text(head + written.before_arguments)
                self.lines.append(f"{rule}_{index}: {lark} {arguments} {self.text(written.after_arguments)}".rstrip())
        first, later = (" | ".join(f"{rule}_{index}" for index in names) for rule in ("function", "later"))
        return f"({first})", later

    def arguments(
        self,
        index: int,
        function: ToolSpec,
        spacing: Mapping[str, Any] = _SPACING,
        form: Format | None = None,
        is_loose: bool = False,
    ) -> str:
        if form is not None and form.parameters is not None:
            prefix = f"arguments_{index}_"
            body = ParameterRules(self.lines, self._shared, self.text, form, function, prefix, spacing, is_loose).all()
        else:
            body = _arguments(function, spacing)
        self.lines.append(f"arguments_{index}: {body}")
        return f"arguments_{index}"

    def until(self, rule: str, mark: str, text: str = "TEXT") -> None:
        """A rule: free text up to a mark and with it."""
        before, *rest = self._parts(mark)
        if not rest and before not in self._special_ids:
            self.lines.append(f"{rule}[lazy]: {text} {json.dumps(mark)}")
            return
        if before not in self._special_ids:
            self.lines.append(f"{rule.upper()}_UP_TO: {text} {json.dumps(before)}")
            text, mark = f"{rule.upper()}_UP_TO", mark.removeprefix(before)
        self.lines.append(f"{rule}: {text} {self.text(mark)}")

    def text(self, text: str) -> str:
        """Fixed text as Lark, the special tokens in it as tokens."""
        ids = self._special_ids
        return " ".join(
            f"<[{ids[part]}]>" if part in ids else json.dumps(part, ensure_ascii=False) for part in self._parts(text)
        )

    def _parts(self, text: str) -> list[str]:
        return [part for part in (self._special.split(text) if self._special else [text]) if part]


def _openings(calls: Calls) -> list[tuple[str, str]]:
    """How calls begin without a mark, and what stands behind the first one."""
    more = "(comma plain)*" if calls.many else ""
    fence = 'gap "```"'
    openings = [("bare", ""), ("list", f'{more} gap "]"')] if calls.form.is_bare else []
    if calls.form.fences:
        openings += [
            ("fence", ("(separator plain)* " if calls.many else "") + fence),
            ("fenced_list", f'{more} gap "]" {fence}'),
        ]
    return openings


def _takes_nothing(parameters: Mapping[str, Any]) -> bool:
    """A schema that plainly accepts an empty object."""
    known = {"type", "properties", "additionalProperties", "description", "title", "$schema"}
    return parameters.keys() - known <= {"required"} and not parameters.get("required")


def _arguments(function: ToolSpec, spacing: Mapping[str, Any]) -> str:
    schema = {**function.parameters}
    if not function.is_strict or "type" not in schema:
        schema["type"] = "object"
    return lark_json(schema, "tools", not function.is_strict, function.name, function.coerce_one_of, **spacing)
