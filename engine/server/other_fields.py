"""The fields of OpenAI's, Anthropic's and vLLM's APIs that no request schema declares (other_fields.json)."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.engine.http.errors import HttpError
from penstock.engine.invalid_request import InvalidRequest


class UnsupportedField(NamedTuple):
    """Why a known field is refused, its values that have no effect and are therefore accepted, and the `details` of the
    error."""

    reason: str
    neutral: tuple[Any, ...] = ()
    details: dict[str, Any] | None = None


class OtherFields(msgspec.Struct, frozen=True):
    """The known fields that no struct declares. Some agents send neutral values in every request, and so do the
    gateways of vLLM and SGLang, which rewrite bodies."""

    harmless: frozenset[str]  # metadata and billing, which do not change the answer: accepted and ignored
    unserved: dict[str, UnsupportedField]
    in_messages: dict[str, UnsupportedField]  # inside messages and tools
    responses: dict[str, UnsupportedField]  # in addition, in the Responses API …
    messages: dict[str, UnsupportedField]  # … and in the Messages API


OTHER_FIELDS = msgspec.json.decode(Path(__file__).with_name("other_fields.json").read_bytes(), type=OtherFields)


def check_neutral(name: str, value: Any, unserved: UnsupportedField) -> None:
    """Raise an error unless the value of an unsupported field has no effect."""
    if value is None or value in unserved.neutral:
        return
    if unserved.details is not None:
        raise HttpError(400, f"{name}: {unserved.reason}", param=name, details=unserved.details)
    raise InvalidRequest(name, unserved.reason)
