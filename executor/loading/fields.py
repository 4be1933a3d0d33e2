"""Reads a model's config.json as untrusted input: its numbers determine the sizes of allocations.

Every getter raises an ExecutorError with the field, the value and the limit for a wrong type or an excessive value.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.executor.protocol import ExecutorError
from penstock.executor.regular_files import read_regular

MAX_JSON_BYTES = 64 * 2**20  # the index of a model with a trillion weights takes 10 MB
MISSING = object()  # the default of a field that must have a value
# The largest integers by field; 2^31 - 1 for all others.
_LIMITS = msgspec.json.decode(Path(__file__).with_name("field_limits.json").read_bytes(), type=dict[str, int])


class Fields:
    """Typed access to a (sub-)dictionary of config.json, or to a GGUF file's metadata, where `prefix` is prepended to
    each name. A field that is null counts as absent."""

    def __init__(self, values: dict[str, Any], where: str = "config.json", prefix: str = "") -> None:
        self._values, self.where, self._prefix = values, where, prefix
        self._read_names: dict[str, None] = {}  # names that were read, in order
        self._passed: set[str] = set()

    def integer(self, name: str, default: Any = MISSING, low: int = 1, high: int | None = None) -> int:
        value = self._get(name, default)
        limit = _LIMITS.get(name, 2**31 - 1) if high is None else high
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= limit:
            raise self.error(name, value, f"an integer from {low} to {limit}")
        return value

    def integers(self, name: str) -> list[int]:
        """Return a list of indices; empty if the field is absent."""
        value = self._get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, int) and item >= 0 for item in value):
            raise self.error(name, value, "a list of indices")
        return value

    def integer_or_none(self, name: str) -> int | None:
        return self.integer(name) if name in self else None

    def number(self, name: str, default: Any = MISSING) -> float:
        value = self._get(name, default)
        if not _is_positive(value):
            raise self.error(name, value, "a positive number below 1e12")
        return float(value)

    def number_list(self, name: str, count: int) -> tuple[float, ...]:
        value = self._get(name, MISSING)
        if not isinstance(value, list) or len(value) != count or not all(map(_is_positive, value)):
            raise self.error(name, value, f"a list of {count} positive numbers below 1e12")
        return tuple(map(float, value))

    def number_or_zero(self, name: str) -> float:
        """Return the number, or zero if the field is absent."""
        return self.number(name) if self.has_value(name) else 0.0

    def has_value(self, name: str) -> bool:
        """Return whether the field is neither absent nor zero, false or empty."""
        return bool(self._find(name))

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def text(self, name: str, default: Any = MISSING) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, value, "a string")
        return value

    def section(self, name: str) -> "Fields | None":
        """Return the object in this field; None if it is absent or empty."""
        value = self._find(name)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.error(name, value, "an object")
        return Fields(value, f"{self.where}: {name}")

    def required_section(self, name: str, expected: str = "an object") -> "Fields":
        """Return the object in this field; raise ExecutorError if it is absent or empty."""
        section = self.section(name)
        if section is None:
            raise self.error(name, self._find(name), expected)
        return section

    def texts(self, name: str) -> list[str] | None:
        value = self._find(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, value, "a list of strings")
        return value

    def names(self) -> list[str]:
        return list(self._values)

    def pass_over(self, *names: str) -> None:
        """Allow these fields without reading them: they do not affect the computation."""
        self._passed.update(names)

    def unread(self, *names: str) -> list[str]:
        """Return those of the names that were neither read nor passed over."""
        return [name for name in names if name not in self._read_names and name not in self._passed]

    def with_defaults(self, **values: Any) -> "Fields":
        """Return a copy in which absent fields, and fields that are null, have the given default values."""
        given = {name: value for name, value in self._values.items() if value is not None or name not in values}
        return Fields(values | given, self.where, self._prefix)

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def only(self, name: str, *allowed: object, default: object = None) -> None:
        """Raise ExecutorError unless the field has an allowed value: an unsupported feature must not be ignored."""
        value = self._find(name)
        value = default if value is None else value
        if value not in allowed:
            raise self.error(name, value, " or ".join(repr(choice) for choice in allowed))

    def check(self, allowed: Mapping[str, Sequence[object]], required: Collection[str] = ()) -> None:
        """Raise ExecutorError for a field with another value than the allowed ones. If the field is absent, the first one
        counts, unless it is required."""
        for name, values in allowed.items():
            self.only(name, *values, default=None if name in required else values[0])

    def no_others(self, expected: str = "") -> None:
        """Raise ExecutorError if a field has a value and was neither read nor passed over."""
        for name, value in self._values.items():
            if value is not None and (unread := self.unread(name.removeprefix(self._prefix))):
                raise self.error(unread[0], value, expected or f"no field but {', '.join(self._read_names)}")

    def error(self, name: str, value: object, expected: str) -> ExecutorError:
        shown = "nothing" if value is MISSING else repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        return ExecutorError(f"{self.where}: {self._prefix}{name}: {shown} found; {expected} is expected")

    def _find(self, name: str) -> Any:
        self._read_names[name] = None
        return self._values.get(self._prefix + name)

    def _get(self, name: str, default: Any) -> Any:
        value = self._find(name)
        if value is not None:
            return value
        if default is MISSING:
            raise self.error(name, MISSING, "a value")
        return default


class FieldRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of field_rules.json: the supported values of a config's fields, by what the config describes."""

    allowed: dict[str, tuple[Any, ...]]  # the first value counts for an absent field
    required: tuple[str, ...] = ()  # fields that must have one of their values
    lists: tuple[str, ...] = ()  # fields with a list of strings, which the tensors show too
    without_effect: tuple[str, ...] = ()  # on the computation

    def check(self, fields: Fields) -> None:
        fields.check(self.allowed, self.required)
        for name in self.lists:
            fields.texts(name)
        fields.pass_over(*self.without_effect)


RULES = msgspec.json.decode(Path(__file__).with_name("field_rules.json").read_bytes(), type=dict[str, FieldRules])


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e12


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a regular file of at most MAX_JSON_BYTES."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ExecutorError(f"{path}: {size} bytes; at most {MAX_JSON_BYTES} are allowed")
        value = json.loads(read_regular(path))
    except OSError as error:
        raise ExecutorError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ExecutorError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ExecutorError(f"{path}: a JSON object is expected, {type(value).__name__} found")
    return value
