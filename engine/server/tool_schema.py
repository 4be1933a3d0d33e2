"""The schemas of functions and custom tools, which chats and the agents' APIs share.

The input of a custom tool is a text instead of JSON. The model is shown a function with one string, `input`. A regex
becomes its `pattern`, which the grammar of calls can enforce. A Lark grammar is only described to the model: llguidance
cannot apply one inside a JSON string.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema of an object; None: the function has no parameters
    strict: bool | None = None  # refuse a schema that a grammar cannot enforce exactly


class TextInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text is an input."""


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Meta(min_length=1, max_length=10_000)]


class GrammarFormat(Grammar, frozen=True, tag_field="type", tag="grammar"):
    """A grammar in the Responses API's form; chats nest it."""


class CustomTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="custom"):
    name: str
    description: str | None = None
    format: TextInput | GrammarFormat | None = None


def as_function(name: str, description: str | None, form: TextInput | Grammar | None) -> Function:
    """Return the function that the model is shown for a custom tool whose input has this form."""
    text, description = {"type": "string"}, description or ""
    if isinstance(form, Grammar):
        kind = "Lark grammar" if form.syntax == "lark" else "regular expression"
        description += f"\n\nThe input has to match this {kind}:\n{form.definition}"
        text |= {"pattern": f"^(?:{form.definition})$"} if form.syntax == "regex" else {}
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    return Function(name, description.strip(), schema)
