"""The kinds of tool call formats. Each parses the calls of its formats (formats.py) in the text of an answer; engine/grammar
constrains a model to the spelling that a format describes.

After a call mark, any spelling of an object that names the function and its arguments is a call. Without a mark, the
text might only quote a call. It then counts as a call only if it is a separate paragraph (or is in a code fence, for
formats with fences), begins with its name, and has arguments.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from penstock.engine.text.tools.arguments import Parameters, literals, tagged
from penstock.engine.text.tools.reader import CallReader
from penstock.engine.text.tools.scan import MAX_FRAME_CHARS, Malformed, Wait, skip_blank

# Matches texts that may be special tokens of a model.
_TOKEN = re.compile(r"<[^<>\s=]+>|\[/?[A-Z_]+\]")
ARGUMENTS = "arguments"  # or "parameters"


def tokens_in(*texts: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(token for text in texts for token in _TOKEN.findall(text)))


@dataclass(frozen=True)
class ToolFormat(ABC):
    """A tool call format. Its spelling, which a grammar enforces, is `start`, one or more calls separated by `join`, and
    `end`. `found_by`: groups of texts; a chat template with all texts of a group has this format. `closers`: the marks
    that open calls, each with its closing text. `extra`: further texts that may be special tokens. `has_many`: an answer
    may have several calls. `id_length`: length of a call's id in the template. `is_bare`: a paragraph that begins with a
    bracket may be a call without a mark. `fences`: marks that may also open other content."""

    name: str
    start: str
    end: str
    before_name: str
    before_arguments: str
    after_arguments: str
    join: str
    found_by: tuple[tuple[str, ...], ...]
    closers: Mapping[str, str]
    parameters: Parameters | None = None
    extra: tuple[str, ...] = ()
    has_many: bool = True
    id_length: int = 24
    is_bare: bool = False
    fences: tuple[str, ...] = ()

    @abstractmethod
    def parse(self, reader: CallReader, mark: str) -> Wait[None]:
        """Parse the calls that follow `mark` ("" if there is none); raise Malformed if the text is not a call."""

    @cached_property
    def marks(self) -> tuple[str, ...]:
        return tuple(self.closers)

    @cached_property
    def triggers(self) -> tuple[str, ...]:
        """The marks after which a grammar enforces optional calls: those in its spelling and those without a closer."""
        written = self.start + self.before_name
        return tuple(
            mark for mark in self.marks if mark not in self.fences and (mark in written or not self.closers[mark])
        )

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """All texts of the format that may be special tokens."""
        return tokens_in(
            *(*self.closers, *self.closers.values(), *map(str, self.parameters or ()), *self.extra),
            *(self.start, self.before_name, self.before_arguments, self.after_arguments, self.join, self.end),
        )

    def closing(self, mark: str) -> list[str]:
        """Return the texts that close calls opened by this mark; without a mark, those of the enforced spelling."""
        return re.findall(r"\]|[^\]]+", self.closers.get(mark, self.end).strip())

    def opening(self, mark: str) -> str:
        """Return the text between a mark and the name of the first call."""
        whole = self.start + self.before_name
        _, found, rest = whole.partition(mark if mark in whole else self.marks[0])
        return rest if found else whole


class ToolSpec(NamedTuple):
    name: str
    parameters: dict[str, Any]  # a JSON schema of an object
    is_strict: bool = True  # a schema that a grammar cannot express exactly is refused, not loosened
    coerce_one_of: bool = False  # treat oneOf as anyOf even if `is_strict`


class Calls(NamedTuple):
    """The calls that an answer may have. `must`: the answer consists of calls only. `many`: several are allowed."""

    form: ToolFormat
    functions: Sequence[ToolSpec]
    must: bool
    many: bool


@dataclass(frozen=True)
class ObjectCalls(ToolFormat):
    """Calls that are JSON objects with a name and arguments, in any order and spelling, alone or in lists.

    `has_args`: a call may also be `f[ARGS]{…}`, `f[CALL_ID]abc[ARGS]{…}` or `f{…}`."""

    has_args: bool = False

    def parse(self, reader: CallReader, mark: str) -> Wait[None]:
        in_list = False
        if mark in self.fences:
            reader.take((yield from reader.passed(reader.at, "json")))
        while True:
            place = brace = yield from reader.sign()
            if reader.text[place] == "[" and not in_list:
                brace = yield from reader.sign(place + 1 - reader.at)
                in_list = True
            if reader.text[brace] == "{":
                reader.take(brace)
                yield from self._object(reader, must_be_plain=mark in ("", *self.fences))
            elif self.has_args and brace == place:
                yield from self._named(reader)
            else:
                raise Malformed(place if mark else brace)  # a mark may begin at `place`; else skip "["
            reader.is_closing = True
            is_call, mark, in_list = yield from self._next(reader, mark, in_list)
            if not is_call:
                return
            reader.is_closing = False

    def _object(self, reader: CallReader, *, must_be_plain: bool) -> Wait[None]:
        """Read one call. A second name or second arguments are refused, since the call would be ambiguous; ids and types,
        which some models add, are skipped. With `must_be_plain`, it begins with the name, or the type and the name."""
        name, known, opening = "", set[str](), "{"
        while True:
            yield from reader.match(opening)
            key = yield from reader.quoted()
            yield from reader.match(":")
            key = ARGUMENTS if key == "parameters" else key
            is_early = must_be_plain and not name and key not in ("name", "type")
            if key in known or is_early or key not in (ARGUMENTS, "name", "type", "id"):
                raise Malformed(reader.at)
            known.add(key)
            if key == ARGUMENTS:
                yield from self._arguments(reader, name)
            else:
                value = yield from reader.quoted()
                name = value if key == "name" else name
                if (key == "name" and name not in reader.functions) or (key == "type" and value != "function"):
                    raise Malformed(reader.at)
            place = yield from reader.sign()
            if reader.text[place] == "}":
                break
            opening = ","
        if not name or (must_be_plain and ARGUMENTS not in known):
            raise Malformed(place)
        reader.take(place + 1)
        reader.end_call(name)

    def _arguments(self, reader: CallReader, name: str) -> Wait[None]:
        """Read an object, or a string that contains one, which is passed on only when the call is complete."""
        place = yield from reader.sign()
        if reader.text[place] == '"':
            reader.take(place)
            reader.take(place + 1, '"')
            yield from reader.json_value(in_string=True)
        else:
            yield from json_arguments(reader, name)
        reader.is_closing = reader.is_within_call

    def _named(self, reader: CallReader) -> Wait[None]:
        name = yield from reader.name()
        end = yield from reader.passed(reader.at, "[CALL_ID]")
        if end > reader.at:
            reader.take(end)
            yield from reader.name()
        reader.take((yield from reader.passed(reader.at, "[ARGS]")))
        yield from json_arguments(reader, name)
        reader.end_call(name)

    def _next(self, reader: CallReader, mark: str, in_list: bool) -> Wait[tuple[bool, str, bool]]:
        """Skip what closes a call, and a separator if another call follows. Return whether one does, the mark to which
        it belongs, and whether it is in the list."""
        while in_list or self.is_bare or self.closers.get(mark):
            yield from reader.skip_blanks()
            at = reader.at
            end = yield from reader.passed(at, "]" if in_list else self.closers.get(mark, ""))
            if end > at:
                reader.skip(end)
                mark, in_list = mark if in_list else "", False
                continue
            is_separated = reader.text[at] in ("," if in_list else ",;")
            while not reader.is_full and (is_separated or not in_list):
                place = skip_blank(reader.text, at + is_separated)
                if place == len(reader.text) and place - at <= MAX_FRAME_CHARS:
                    yield
                    continue
                if place - at > MAX_FRAME_CHARS or reader.text[place] not in ("{" if in_list else "{["):
                    break
                reader.take(place)
                return True, mark if in_list or self.closers.get(mark) else "", in_list
            break
        return False, mark, in_list


@dataclass(frozen=True)
class NamedCalls(ToolFormat):
    """Calls that are a name followed by arguments, between fixed texts. The arguments are JSON or follow `parameters`."""

    def parse(self, reader: CallReader, mark: str) -> Wait[None]:
        words, before_name, closing = self.opening(mark).split(), self.before_name.split(), self.closing(mark)
        after = self.after_arguments.split()
        while True:
            yield from reader.match(*words)
            name = yield from reader.name()
            yield from reader.match(*self.before_arguments.split())
            yield from self._arguments(reader, name, (after or closing)[0])
            reader.end_call(name)
            reader.is_closing = True
            for word in after:
                yield from reader.skip_word(word)
            if (yield from reader.skip_word(closing[0])):
                for word in closing[1:]:
                    yield from reader.skip_word(word)
                return
            place = yield from reader.sign(reader.text[reader.at] in ",;")
            if before_name:
                is_call = (yield from reader.passed(place, before_name[0])) > place
            else:
                is_call = reader.text[place].isalpha()
            if not is_call or reader.is_full:
                return
            reader.take(place)
            words, reader.is_closing = before_name, False

    def _arguments(self, reader: CallReader, name: str, end: str) -> Wait[None]:
        """Begin the call and read its arguments, which `end` follows unless they are JSON."""
        if self.parameters is None:
            yield from json_arguments(reader, name)
            return
        reader.begin_call(name)
        if self.parameters.quote:
            yield from literals(reader, self.parameters.quote, end)
        else:
            yield from tagged(reader, self.parameters, reader.functions[name], end)


def json_arguments(reader: CallReader, name: str) -> Wait[None]:
    """Begin the call, unless its name follows, and read the JSON object that contains its arguments."""
    place = yield from reader.sign()
    if reader.text[place] != "{":
        raise Malformed(place)
    reader.take(place)
    if name:
        reader.begin_call(name)
    yield from reader.json_value()
