"""Converts the conversations of Python callers, dictionaries in OpenAI's form, into messages.

Templates are also given the entries that messages do not have. Errors name the field.
"""

from typing import Any

import msgspec

from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.options import refused_part
from penstock.engine.text.chat_messages import Message, OpenMessage, TextPart, plain

FIELDS = frozenset(Message.__struct_fields__)


def messages_of(values: object) -> list[Message]:
    if not isinstance(values, list) or not values:
        raise InvalidRequest("messages", "a list of at least one message is expected")
    return [_message(value, f"messages[{place}]") for place, value in enumerate(values)]


def _message(value: object, field: str) -> Message:
    if not isinstance(value, dict):
        raise InvalidRequest(field, f"{type(value).__name__} given; an object with role and content is expected")
    content = value.get("content")
    if isinstance(content, list):
        content = [TextPart("text", part) if isinstance(part, str) else part for part in content]
    fields: dict[str, Any] = {"content": content}  # checked when it has become one text
    others: dict[str, Any] = {}  # what only templates know
    for key, item in value.items():
        if key != "content" and item is not None:
            (fields if key in FIELDS else others)[key] = plain(item, f"{field}.{key}")
    if "thinking" in others:
        fields.setdefault("reasoning_content", others.pop("thinking"))
    fields["others"] = others
    try:
        return msgspec.convert(fields, OpenMessage)
    except msgspec.ValidationError as error:
        path, _, reason = refused_part(fields, OpenMessage, error)
        raise InvalidRequest(field + path, reason) from None
