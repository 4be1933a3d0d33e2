"""The fields of requests that no schema declares: the known ones (other_fields.json), and all others.

Clients send back what other servers answered, so that one field more in a message or a tool must not be an error: it is
left out, and named for the log and a header. `OTHER_FIELDS.in_messages` has the fields that are refused, because they
would change the answer.

Valid values are decoded once, strictly. Only a value that its schema refuses is decoded again and compared with the schema
in Python.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

import msgspec
from msgspec import Raw

from penstock.engine.http.body import MAX_FIELDS, decode, decoded
from penstock.engine.http.errors import HttpError, clip
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.options import alternatives

MAX_OBJECTS = 32_768  # objects in one field; comparing them takes about 50 ms

T = TypeVar("T")

_INDEX = re.compile(r"\[\d+\]")
_alternatives = cache(alternatives)


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


def decode_lenient(kind: type[T], source: bytes | Raw, field: str, ignored: list[str]) -> T:
    """Decode `source`, the value of `field`; append the names of fields that are left out to `ignored`."""
    try:
        return decoded(kind, source)
    except (msgspec.DecodeError, RecursionError):
        return decode(kind, declared(kind, source, field, ignored), field)


def declared(kind: Any, source: bytes | Raw, field: str, ignored: list[str]) -> bytes:
    """Return the JSON of `source` without the fields that `kind` does not declare."""
    comparison = _Comparison()
    value = comparison.declared(decode(object, source, field), kind, field)
    ignored += [name for name in comparison.names if name not in ignored]
    return msgspec.json.encode(value)


class _Comparison:
    """Compares one value with its type."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}  # of the fields that were left out, without positions
        self._num_objects = 0

    def declared(self, value: Any, kind: Any, path: str) -> Any:
        """Return a copy of the value, at `path`, without undeclared fields. A value of another type is returned as it is."""
        for each in _alternatives(kind):
            if isinstance(value, list) and get_origin(each) is list:
                item_kind = get_args(each)[0]
                return [self.declared(item, item_kind, f"{path}[{place}]") for place, item in enumerate(value)]
            if isinstance(value, dict) and isinstance(each, msgspec.StructMeta):
                tag_field, tag = each.__struct_config__.tag_field, each.__struct_config__.tag
                if tag_field is None or value.get(tag_field) == tag:
                    return self._object(value, each, path)
        return value

    def _object(self, value: dict[str, Any], struct: msgspec.StructMeta, path: str) -> dict[str, Any]:
        self._num_objects += 1
        if self._num_objects > MAX_OBJECTS:
            raise InvalidRequest(path, f"more than {MAX_OBJECTS} objects, and fields that are not served")
        types = _field_types(struct)
        result = {}
        for name, item in value.items():
            if name in types:
                result[name] = self.declared(item, types[name], f"{path}.{name}")
            else:
                self._leave_out(f"{path}.{clip(name)}", name, item)
        return result

    def _leave_out(self, path: str, name: str, value: Any) -> None:
        if (unserved := OTHER_FIELDS.in_messages.get(name)) is not None:
            check_neutral(path, value, unserved)
        if len(self.names) < MAX_FIELDS:
            self.names[_INDEX.sub("[]", path)] = None


@cache
def _field_types(struct: Any) -> dict[str, Any]:
    """Return the types of a struct's fields by their names in JSON, with its tag."""
    tag_field = struct.__struct_config__.tag_field
    tag = {} if tag_field is None else {tag_field: Any}
    return tag | {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
