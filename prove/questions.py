"""Draws the questions and the schedule from one seed, as far as the server's abilities allow.

A question holds everything that its greedy answer depends on. A manner holds what must not change the answer:
concurrent requests, how the response is read, when the client disconnects.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from .asker import MESSAGES_PATH, RESPONSES_PATH
from .schema import FORMATTED
from .tables import load_table

Material = Sequence[int] | Sequence[str]  # token ids of a text, or its words if a server does not accept ids

NUM_TOPS = 5  # alternatives requested for each token
_TABLE = load_table("questions")
WORDS: list[str] = _TABLE["words"].split()


@dataclass
class Abilities:
    """The abilities of one server, and the material for its prompts."""

    model: str
    block: int
    context: int  # tokens of a prompt and its answer; 0: not told
    supported: set[str] = field(default_factory=set)
    skipped: list[str] = field(default_factory=list)  # with the reason
    adapters: list[str] = field(default_factory=list)
    longest: int = 0  # tokens of a prompt
    material: Material = ()
    answer_s: float = 0.0  # for a typical answer
    most_tokens: int = 0  # of an answer to a question; 0: as many as it asks for

    def note(self, name: str, is_there: object, otherwise: str) -> None:
        if is_there:
            self.supported.add(name)
        else:
            self.skipped.append(f"{name}: {otherwise}")

    def completion(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return a completion request with these fields, besides those of every question, which make tokens comparable and
        differences explainable. A field that is None is left out."""
        common = {"model": self.model, "temperature": 0}
        common |= {"return_token_ids": True} if "return_token_ids" in self.supported else {}
        common |= {"logprobs": NUM_TOPS} if "logprobs" in self.supported else {}
        return {name: value for name, value in {**common, **fields}.items() if value is not None}

    def chat(self, text: str, max_tokens: int) -> dict[str, Any]:
        """Return a chat request with instructions and one message."""
        messages = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": text}]
        request = {"model": self.model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        return request | ({"logprobs": True, "top_logprobs": NUM_TOPS} if "logprobs" in self.supported else {})

    def fresh(self, name: str) -> dict[str, Any]:
        """Return fields with which a request reuses nothing that was computed before."""
        if "cache_salt" in self.supported:
            return {"cache_salt": name}
        return {"cache_prompt": False} if "cache_prompt" in self.supported else {}


class Question(NamedTuple):
    """A request whose answer must always be the same."""

    kind: str
    body: dict[str, Any]


class Manner(NamedTuple):
    """A way to ask: fields with values to draw from, and the required ability. In KINDS it changes the answer; in
    MANNERS it must not."""

    weight: int
    needs: str = ""
    fields: Mapping[str, Sequence[Any]] = {}
    streams: bool | None = None  # None: drawn at random
    copies: int = 1  # requests sent at the same moment
    reads: Literal["at once", "slowly", "never"] = "at once"
    leaves: bool = False


# A repetition_penalty scales logits, which are not shown, so its ties could not be told.
KINDS = {name: Manner(**row) for name, row in _TABLE["kinds"].items()}
KINDS["schema"] = Manner(1, "response_format", {"response_format": [FORMATTED]})
MANNERS = {name: Manner(**row) for name, row in _TABLE["manners"].items()}
# A trial of each ability. A field counts as supported when its effect is seen, or if it has none that can be seen.
TRIALS: dict[str, dict[str, Any]] = _TABLE["trials"]
TRIALS["response_format"] = {"response_format": FORMATTED, "max_tokens": 40}
RESET = "reset"  # in place of a question: empties the prefix cache


class Ask(NamedTuple):
    """One entry of the schedule."""

    at_s: float
    question: int  # -1: a reset
    manner: str
    fields: dict[str, Any]
    leaves_s: float | None = None
    reads: str = "at once"


def questions(rng: random.Random, abilities: Abilities, num: int) -> list[Question]:
    """Draw prompts that share prefixes, first one for every kind. Each is cut at a block boundary or one token beside it,
    and continues with tokens of its own or not at all. A few have one token, and a few have the maximum length."""
    material, block, longest = abilities.material, abilities.block, abilities.longest
    kinds = {name: kind for name, kind in KINDS.items() if not kind.needs or kind.needs in abilities.supported}
    names, weights = list(kinds), [kind.weight for kind in kinds.values()]
    roots = [_piece(rng, material, longest) for _ in range(3)]
    drawn, once = [], rng.sample(names, len(names))
    for _ in range(num):
        kind = once.pop() if once else rng.choices(names, weights)[0]
        cut = block * rng.randint(0, longest // block) + rng.choice((-1, 0, 0, 1))
        prompt = rng.choice(roots)[: max(1, min(cut, longest))]
        if rng.random() < 0.7:
            prompt = (prompt + _piece(rng, material, rng.randint(1, 2 * block)))[:longest]
        most = rng.choice((1, 8, 2 * block + 4, 3 * block))
        most = 40 if kind in ("choice", "regex", "schema") else min(most, abilities.most_tokens or most)
        body = {"prompt": as_prompt(prompt), "max_tokens": most}
        if kind == "adapter":
            body["model"] = rng.choice(abilities.adapters)
        drawn.append(Question(kind, body | _drawn(rng, kinds[kind].fields)))
    return drawn


def schedule(
    rng: random.Random, questions: Sequence[Question], supported: set[str], num: int, rate: float
) -> list[Ask]:
    """Draw `num` requests, first in every manner and of every question, at `rate` per second on average, in bursts."""
    manners = {name: manner for name, manner in MANNERS.items() if not manner.needs or manner.needs in supported}
    names, weights = list(manners), [manner.weight for manner in manners.values()]
    asks = list[Ask]()
    once, order = rng.sample(names, len(names)), rng.sample(range(len(questions)), len(questions))
    now_s = 0.0
    while len(asks) < num:
        now_s += rng.expovariate(rate / 4) if rng.random() < 0.25 else 0.0  # bursts of four on average
        if RESET in supported and rng.random() < 0.01:
            asks.append(Ask(now_s, -1, RESET, {}))
            continue
        name = once.pop() if once else rng.choices(names, weights)[0]
        manner, question = manners[name], order.pop() if order else rng.randrange(len(questions))
        fields = _drawn(rng, manner.fields)
        is_stream = rng.random() < 0.5 if manner.streams is None else manner.streams
        if is_stream and questions[question].kind != "prompt_logprobs":  # which cannot be streamed
            fields["stream"] = True
        leaves_s = rng.choice((0.0, 0.002, 0.02, 0.1, 0.5)) * rng.random() if manner.leaves else None
        asks += [Ask(now_s, question, name, fields, leaves_s, manner.reads)] * manner.copies
    return asks


def in_form_of(path: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request of `Abilities.chat` in the form of the API at the path."""
    system, user = request["messages"]
    common = {"model": request["model"], "temperature": 0}
    if path == RESPONSES_PATH:
        told = {"instructions": system["content"], "input": user["content"]}
        return {**common, **told, "max_output_tokens": request["max_tokens"]}
    if path == MESSAGES_PATH:
        return {**common, "system": system["content"], "messages": [user], "max_tokens": request["max_tokens"]}
    return dict(request)


def as_prompt(material: Sequence[Any]) -> list[int] | str:
    return " ".join(material) if isinstance(material[0], str) else list(material)


def _drawn(rng: random.Random, fields: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    return {name: rng.choice(values) for name, values in fields.items()}


def _piece(rng: random.Random, material: Material, length: int) -> list[Any]:
    start = rng.randrange(max(1, len(material) - length))
    return list(material[start : start + length])
