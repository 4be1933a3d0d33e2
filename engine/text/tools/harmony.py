"""Harmony, the output format of gpt-oss: an answer is a list of messages, each with a header that names its channel.

    <|channel|>analysis<|message|>…<|end|>                                             reasoning
    <|start|>assistant<|channel|>final<|message|>…<|return|>                           the text of the answer
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>   a call

The prompt ends with `<|start|>assistant`. The recipient of a message (`to=`) may also precede the channel. Commentary
without a recipient introduces calls and is part of the answer's text; so is a message to an unknown function. This
module treats the marks as text; tool_choice.py handles them as special tokens.
"""

import re

from penstock.engine.text.tools.call_kinds import Calls, NamedCalls
from penstock.engine.text.tools.reader import CallReader, Content, Piece, Reasoning
from penstock.engine.text.tools.scan import MAX_FRAME_CHARS, Malformed, Wait, num_held
from penstock.engine.text.tools.thinking import HARMONY as MARKS
from penstock.engine.text.tools.thinking import Thinking

NAME = "harmony"
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TOKENS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
# For the grammar and the detection; HarmonyReader parses the answers.
FORM = NamedCalls(
    NAME,
    *("", "", f"{CHANNEL}commentary to=functions.", f" {CONSTRAIN}json{MESSAGE}", ""),
    join="",
    found_by=((CHANNEL, MESSAGE),),
    closers={},
    extra=TOKENS,
    has_many=False,  # a call ends the turn
)
ENDS = (END, CALL, RETURN, START)  # START ends a message if the model omitted the other marks
_END = re.compile("|".join(map(re.escape, ENDS)))
_TO = re.compile(r"\bto=(\S+?)(?=\s|<\||$)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TOKEN = re.compile("|".join(map(re.escape, TOKENS)))
_HEADER_BEGINS = ("<|", "to=")  # after `<|start|>assistant`
_MAX_HEADER_CHARS = MAX_FRAME_CHARS + len(MESSAGE)


def after_prompt(prompt: str) -> Thinking:
    """Return how an answer begins after this prompt. A message begun in the prompt is the answer's first message."""
    begun = prompt[prompt.rindex(START) :].strip() if START in prompt else ""
    return Thinking(MARKS, begun="" if begun == f"{START}assistant" else begun)


class HarmonyReader(CallReader):
    """Parses one answer: call `feed` per piece, then `finish`. `is_certain`: a grammar enforces the call format."""

    def __init__(self, calls: Calls | None, thinking: Thinking | None, *, is_certain: bool) -> None:
        super().__init__({} if calls is None else {each.name: each.parameters for each in calls.functions})
        self.is_certain = is_certain
        self._is_header = True
        self._channel, self._function = "final", ""  # of the current message; "" if it is not to a known function
        if thinking is not None:
            self.feed(thinking.begun)  # these pieces are in the prompt
            self.start -= len(thinking.begun)

    @property
    def channel(self) -> str | None:
        """The channel of the message that goes on; None between messages."""
        return None if self._is_header else self._channel

    @property
    def is_enforced(self) -> bool:
        """True in headers, too, which are not part of the text."""
        return self._is_header or (self.is_certain and bool(self._function))

    def finish(self) -> list[Piece]:
        """Return the pieces held back so far. An unfinished header is dropped; text that is not a header is content,
        unless a grammar enforces the headers."""
        self._reading.close()
        rest, self.at = self.text[self.at :], len(self.text)
        if not self._is_header or (_TOKEN.search(rest) is None and not self.is_certain):
            self._add(rest, self.at)
            self._end_message(self.at)
        return self._taken()

    def _answer(self) -> Wait[None]:
        while True:
            yield from self._header()
            if self._function and self.is_certain:
                self._announce(self._function)
            while (found := _END.search(self.text, self.at)) is None:
                stop = len(self.text) - num_held(self.text, self.at, ENDS)
                self._add(self.text[self.at : stop], stop)
                self.at = stop
                yield from self.wait()
            self._add(self.text[self.at : found.start()], found.start())
            self.at = found.start() if found[0] == START else found.end()
            self._end_message(found.start())

    def _header(self) -> Wait[None]:
        """Read the header of a message. Text that cannot be one is content."""
        while True:
            text = self.text[self.at :]
            head, end = text.lstrip(), text.find(MESSAGE)
            if not any(head.startswith(mark[: len(head)]) for mark in _HEADER_BEGINS):
                break
            if end > MAX_FRAME_CHARS or (end < 0 and len(text) >= _MAX_HEADER_CHARS):
                # Tokens are removed from a fixed length only, so that the result does not depend on the pieces.
                text = _TOKEN.sub("", text[:_MAX_HEADER_CHARS]) + text[_MAX_HEADER_CHARS:]
                self.start += len(self.text) - len(text)
                self.text, self.at = text, 0
                break
            if end >= 0:
                channel, to = _CHANNEL.search(text[:end]), _TO.search(text[:end])
                self._channel = "final" if channel is None else channel[1]
                name = "" if to is None else to[1].removeprefix("functions.")
                self._function = name if name in self.functions else ""
                self.at += end + len(MESSAGE)
                break
            yield from self.wait()
        self._is_header = False

    def _add(self, text: str, end: int) -> None:
        """Add text that ends at `end` to the current message. The text of a call that is not announced may still become
        content."""
        if self._function:
            self.json.append(text)
        elif text:
            self._out.append(Reasoning(text) if self._channel == "analysis" else Content(text, self.start + end))

    def _end_message(self, end: int) -> None:
        """End the current message, whose text ends at `end`. Without a grammar, it is a call only if its arguments are a
        JSON object."""
        if self._function:
            body = "".join(self.json)
            self.json = [body if self.is_within_call else body.strip()]
            try:
                self.end_call(self._function)
            except Malformed:
                self._out.append(Content(body, self.start + end))
        self.json = []
        self._is_header, self._channel, self._function = True, "final", ""
