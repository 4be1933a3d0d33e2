"""Structural tags: free text in which certain beginnings start a constrained piece, up to its end.

    {"structures": [{"begin": "<f=", "schema": {…}, "end": ">"}], "triggers": ["<f"]}

A trigger may come at any place of the text, any number of times; from there on one of the structures that begin
with it must follow. The result is Lark. A trigger that is a special token of the model is matched as that token.
"""

import json
from collections.abc import Collection
from typing import Any

import msgspec

from penstock.engine.grammar.json_schema import WHITESPACE, lark_json
from penstock.engine.sampling_params import InvalidRequest

MAX_STRUCTURES = 256


class Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begin: str
    schema: dict[str, Any] | bool = True
    end: str = ""


class StructuralTag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    structures: list[Structure]
    triggers: list[str]
    type: str = "structural_tag"


def tags_source(value: Any, special_tokens: Collection[str], field: str, coerce_one_of: bool = False) -> str:
    """Lark for a structural tag, checked."""
    try:
        tag = msgspec.convert(value, StructuralTag)
    except msgspec.ValidationError as error:
        raise InvalidRequest(field, str(error)) from None
    if not 1 <= len(tag.structures) <= MAX_STRUCTURES:
        raise InvalidRequest(field, f"{len(tag.structures)} structures; 1 to {MAX_STRUCTURES} are allowed")
    by_trigger: dict[str, list[str]] = {}
    for index, structure in enumerate(tag.structures):
        trigger = next((t for t in tag.triggers if t and structure.begin.startswith(t)), None)
        if trigger is None:
            raise InvalidRequest(field, f"structures[{index}].begin starts with none of the triggers")
        by_trigger.setdefault(trigger, []).append(_after(structure, trigger, field, coerce_one_of))
    names = [f"tag_{index}" for index in range(len(by_trigger))]
    rules = [f"start: ({' | '.join(names)})* TEXT", r"TEXT: /(.|\n)*/"]
    for name, (trigger, pieces) in zip(names, by_trigger.items(), strict=True):
        pieces = [f"{name}_{number}: {piece}" for number, piece in enumerate(pieces)]
        choice = "(" + " | ".join(f"{name}_{number}" for number in range(len(pieces))) + ")"
        if trigger in special_tokens:
            rules += [f"{name}: TEXT {special_token(trigger)} {choice}", *pieces]
        else:  # lazy: the text ends at the first place where the trigger stands
            rules += [f"{name}: {name}_text {choice}", f"{name}_text[lazy]: TEXT {json.dumps(trigger)}", *pieces]
    return "\n".join(rules)


def _after(structure: Structure, trigger: str, field: str, coerce_one_of: bool) -> str:
    """What must follow the trigger."""
    texts = structure.begin[len(trigger) :], structure.end
    rest, end = (f"{json.dumps(text)} " if text else "" for text in texts)
    schema = lark_json(structure.schema, field, coerce_one_of=coerce_one_of, whitespace_pattern=WHITESPACE)
    return f"{rest}{schema} {end}".rstrip()


def special_token(text: str) -> str:
    """How Lark names a special token: as it is written, between angle brackets."""
    return text if text.startswith("<") and text.endswith(">") else f"<{text}>"
