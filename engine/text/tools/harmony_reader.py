"""Incremental parser of answers in the harmony format (harmony.py): splits them into reasoning, content and calls."""

import re
from collections.abc import Collection

from penstock.engine.text.tools.formats import Calls
from penstock.engine.text.tools.harmony import CALL, END, MESSAGE, RETURN, START, TOKENS
from penstock.engine.text.tools.reader import Arguments, CallStart, Content, Piece, Reasoning, object_in
from penstock.engine.text.tools.scan import MAX_FRAME_CHARS, num_held
from penstock.engine.text.tools.thinking import Thinking

_ENDS = (END, CALL, RETURN, START)  # START ends a message if the model omitted the other marks
_END = re.compile("|".join(map(re.escape, _ENDS)))
_TO = re.compile(r"\bto=(\S+?)(?=\s|<\||$)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TOKEN = re.compile("|".join(map(re.escape, TOKENS)))
_HEADER_BEGINS = ("<|", "to=")  # after `<|start|>assistant`


class HarmonyReader:
    """Parses one answer, with the same interface as AnswerReader (answer_reader.py)."""

    def __init__(self, calls: Calls | None, thinking: Thinking | None, *, is_certain: bool) -> None:
        self._names: Collection[str] = () if calls is None else {function.name for function in calls.functions}
        self._is_certain = is_certain
        self._text = "" if thinking is None else thinking.begun  # undecided text
        self._is_header = True
        self._channel, self._function = "final", ""  # of the current message; "" if it is not to a known function
        self._body: list[str] = []  # text of a possible call, which may still turn out to be content
        self._num_calls, self._is_within_call = 0, False
        self._out: list[Piece] = []
        self.feed("")
        self._out = []  # drops the pieces that came from the prompt

    @property
    def has_called(self) -> bool:
        return self._num_calls > 0 and not self._is_within_call

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        while self._read_header() if self._is_header else self._read_body():
            pass
        out, self._out = self._out, []
        return out

    def finish(self) -> list[Piece]:
        """Return the pieces held back so far. An unfinished header is dropped; text that is not a header is content."""
        if self._is_header and _TOKEN.search(self._text) is None:
            self._is_header, self._channel = False, "final"
        if not self._is_header:
            self._take(self._text)
            self._end_message()
        self._text = ""
        out, self._out = self._out, []
        return out

    def check(self) -> None:
        """Assert the invariants that hold between two pieces."""
        assert not self._out and not (self._is_within_call and self._body)

    def _read_header(self) -> bool:
        """Parse the header if it is complete; return whether to go on. Text that cannot be a header is content."""
        at = self._text.find(MESSAGE)
        head = self._text.lstrip()
        may_be = any(head.startswith(mark[: len(head)]) for mark in _HEADER_BEGINS)
        longest = MAX_FRAME_CHARS + len(MESSAGE)
        if not may_be or at > MAX_FRAME_CHARS or (at < 0 and len(self._text) >= longest):
            self._is_header, self._channel = False, "final"
            if may_be:  # strip tokens from a fixed length only, so that the result does not depend on the pieces
                self._text = _TOKEN.sub("", self._text[:longest]) + self._text[longest:]
            return True
        if at < 0:
            return False
        header, self._text = self._text[:at], self._text[at + len(MESSAGE) :]
        channel, to = _CHANNEL.search(header), _TO.search(header)
        self._channel = "final" if channel is None else channel[1]
        name = "" if to is None else to[1].removeprefix("functions.")
        self._function = name if name in self._names else ""
        self._is_header = False
        if self._function and self._is_certain:
            self._announce()
        return True

    def _read_body(self) -> bool:
        found = _END.search(self._text)
        if found is None:
            kept = len(self._text) - num_held(self._text, 0, _ENDS)
            self._take(self._text[:kept])
            self._text = self._text[kept:]
            return False
        self._take(self._text[: found.start()])
        self._text = self._text[found.start() if found[0] == START else found.end() :]
        self._end_message()
        return bool(self._text)

    def _take(self, text: str) -> None:
        if not text:
            return
        if self._is_within_call:
            self._out.append(Arguments(self._num_calls - 1, text))
        elif self._function:
            self._body.append(text)
        else:
            self._out.append(Reasoning(text) if self._channel == "analysis" else Content(text))

    def _end_message(self) -> None:
        """End the current message. Without a grammar, it is a call only if its arguments are a JSON object."""
        if self._function and not self._is_within_call:
            body, self._body = "".join(self._body), []
            if object_in(body or "{}") is not None:
                self._announce()
                self._out.append(Arguments(self._num_calls - 1, body.strip() or "{}"))
            elif body:
                self._out.append(Content(body))
        self._is_header, self._is_within_call, self._function = True, False, ""

    def _announce(self) -> None:
        self._out.append(CallStart(self._num_calls, self._function))
        self._num_calls += 1
        self._is_within_call = True
