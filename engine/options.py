"""Makes options of the fields of the dataclasses that configure an engine, a server or a router.

    max_logprobs: Length = 20

A field is an option if flags.json of its room has an entry for it, under the name of its class: the help text and what
else the command line shows. The flag, the validation of the `LLM(...)` keyword and the line in docs/configuration.md are
all derived from the field and that entry. Code that resolves options checks them against each other.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

# Integers that are sent between processes or to C code have at most 64 bits.
INT64 = 2**63 - 1
Count = Annotated[int, Meta(ge=1, le=INT64)]
Length = Annotated[int, Meta(ge=0, le=INT64)]
Seed = Annotated[int, Meta(ge=-INT64, le=INT64)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Share = Annotated[float, Meta(ge=0, le=1)]
# The limit of about thirty years rejects infinity and other mistakes.
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Delay = Annotated[float, Meta(ge=0, le=1e9)]

REQUIRED = "the field is required"
_type_info: Callable[[Any], Any] = cache(msgspec.inspect.type_info)
_hints = cache(partial(get_type_hints, include_extras=True))


class Declared(Protocol):
    """The type of dataclasses."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


T = TypeVar("T")
D = TypeVar("D", bound=Declared)


class Flag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The command line flag of a field, as flags.json has it."""

    help: str  # the field's default is added, or stands in place of %(default)s
    metavar: str | None = None
    names: tuple[str, ...] = ()  # replace the name that is derived from the field
    has_off: bool = False  # also defines --no-…
    takes_several: bool = False  # one flag takes several values; every flag of a tuple may be repeated
    opens: str = ""  # starts a group with this title in the help text


def flag(default: Any = None, **settings: Any) -> Any:
    """Declare a field whose type does not tell how its option is read: the settings are further attributes of `Option`."""
    return dataclasses.field(default=default, metadata=settings)


class Option(msgspec.Struct, frozen=True):
    name: str  # name of the field
    kind: Any  # type of the field, without limits and None
    default: Any
    flag: Flag
    choices: tuple[str, ...] = ()  # for a type that is not a Literal
    read: Callable[[str], Any] | None = None  # converts the text; raises ValueError if it is invalid
    stands_for: Any = None  # the value that the default None means, if it is a number that the help text names

    @property
    def words(self) -> tuple[str, ...]:
        """The flags; the default is the field's name without its unit, in the singular for a flag that is repeated."""
        name = self.name.removesuffix("_s").replace("_", "-")
        return self.flag.names or (f"--{name.removesuffix('s') if self.is_list else name}",)

    @property
    def keywords(self) -> tuple[str, ...]:
        """The Python keywords: the field's name and the names of all further long flags."""
        return (self.name, *(word[2:].replace("-", "_") for word in self.words[1:] if word.startswith("--")))

    @property
    def help(self) -> str:
        """The help text, with the default unless the text says it."""
        text, default = self.flag.help, self.stands_for or self.default
        if "default" in text or isinstance(default, bool) or not isinstance(default, int | float | str):
            return text
        return f"{text} (default: {default:g})" if isinstance(default, float) else f"{text} (default: {default})"

    @property
    def is_list(self) -> bool:
        return get_origin(self.kind) is tuple

    def settings(self) -> dict[str, Any]:
        """Return the arguments for `add_argument`."""
        flag, kind, read = self.flag, self.kind, self.read
        if kind is bool:
            return {"action": argparse.BooleanOptionalAction if flag.has_off else "store_true"}
        if choices := self.choices or (get_args(kind) if get_origin(kind) is Literal else ()):
            return {"choices": choices, "type": read}
        settings: dict[str, Any] = {"metavar": flag.metavar}
        if self.is_list:
            settings["action"] = "extend" if flag.takes_several or read else "append"
            settings["nargs"] = "+" if flag.takes_several else None
        is_object = get_origin(kind) is dict or isinstance(kind, type(msgspec.Struct))
        read = read or (json_object if is_object else None)
        return {**settings, "type": _complaining(read) if read else kind if kind in (int, float) else None}


@cache
def flags_of(module: str) -> dict[str, dict[str, Flag]]:
    """Return the flags of the room that a module belongs to, by the names of the class and of the field."""
    room = module.split(".")[1]
    table = (Path(__file__).parents[1] / room / "flags.json").read_bytes()
    return msgspec.json.decode(table, type=dict[str, dict[str, Flag]])


def options_of(kind: type[Declared]) -> Iterator[Option]:
    """Yield the options of a dataclass and of its nested dataclasses."""
    hints, flags = get_type_hints(kind, include_extras=True), flags_of(kind.__module__).get(kind.__name__, {})
    for field in dataclasses.fields(kind):
        (plain,) = alternatives(hints[field.name])
        if field.name in flags:
            yield Option(field.name, plain, field.default, flags[field.name], **field.metadata)
        elif isinstance(plain, type) and dataclasses.is_dataclass(plain):
            yield from options_of(plain)


def add_options(parser: argparse.ArgumentParser, kind: type[Declared]) -> None:
    """Add a flag for each option; the names of one option are mutually exclusive."""
    group: argparse._ActionsContainer = parser
    for option in options_of(kind):
        if option.flag.opens:
            group = parser.add_argument_group(option.flag.opens)
        default = [] if isinstance(option.default, tuple) else option.default  # argparse appends to the default
        settings = {"dest": option.name, "default": default, **option.settings()}
        names = group.add_mutually_exclusive_group() if option.words[1:] else group
        names.add_argument(option.words[0], help=option.help, **settings)
        for word in option.words[1:]:
            names.add_argument(word, help=f"the same as {option.words[0]}", **settings)


def given_options(args: argparse.Namespace, kind: type[Declared]) -> dict[str, Any]:
    """Return the options of `kind` that were given on the command line."""
    values = {option.name: getattr(args, option.name, None) for option in options_of(kind)}
    return {name: value for name, value in values.items() if value is not None}


def built(args: argparse.Namespace, kind: type[D], **others: Any) -> D:
    """Build the dataclass and its nested dataclasses from the command line, without validating them."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if (value := getattr(args, field.name, None)) not in (None, []):
            values[field.name] = tuple(value) if isinstance(value, list) else value
        elif dataclasses.is_dataclass(field.default) and not isinstance(field.default, type):
            values[field.name] = built(args, type(field.default))
    return kind(**{**values, **others})


def check(config: Declared) -> None:
    """Check the type and the limits of every field; raise ValueError naming the field, the value and the limit."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for value in values.values():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            check(value)
    converted(msgspec.to_builtins(values), type(config))
    for option in options_of(type(config)):
        if option.choices and (value := values.get(option.name)) is not None and value not in option.choices:
            raise ValueError(f"{option.name}: {value!r} given; one of {', '.join(option.choices)} is expected")


def converted(values: Mapping[str, Any], kind: type[T], *, strict: bool = True) -> T:
    """Convert plain data to an object of this type, not `strict` also from text; raise ValueError like `check`."""
    try:
        return msgspec.convert(values, kind, strict=strict)
    except msgspec.ValidationError as error:
        path, value, reason = refused_part(values, kind, error, strict=strict)
        if " given; " not in reason and reason != REQUIRED:
            reason = f"{value!r} given; {reason}"
        raise ValueError(f"{path.lstrip('.')}: {reason}" if path else reason) from None


def refused_part(value: Any, kind: Any, error: msgspec.ValidationError, **settings: Any) -> tuple[str, Any, str]:
    """Return the path of the innermost part of a value that its type refuses, like `.messages[0].role` (empty for the
    whole value), this part, and the reason. `settings` are those of `msgspec.convert`, which has raised `error`.

    The parts are converted one by one, so that msgspec's texts are passed on, but never read."""
    for name, part, part_kind in _parts(value, kind):
        try:
            msgspec.convert(part, Any if part_kind is msgspec.Raw else part_kind, **settings)
        except msgspec.ValidationError as reason:
            path, refused, text = refused_part(part, part_kind, reason, **settings)
            return name + path, refused, text
    literals = [literal for each in alternatives(kind) if get_origin(each) is Literal for literal in get_args(each)]
    choices = f"; one of {', '.join(sorted(map(repr, literals)))} is expected" if literals else ""
    return "", value, REQUIRED if value is msgspec.UNSET else reason_of(error) + choices


def reason_of(error: msgspec.ValidationError) -> str:
    """Return the text of msgspec's error as the second half of a sentence."""
    return str(error)[:1].lower() + str(error)[1:]


def _parts(value: Any, kind: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the value and the type of each part of a list or an object. A missing field has the value UNSET."""
    kinds, infos = alternatives(kind), []
    for each in kinds:
        types = get_args(each)
        if isinstance(value, (list, tuple)) and get_origin(each) in (list, tuple):
            item_types = types if len(types) == len(value) and ... not in types else types[:1] * len(value)
            yield from ((f"[{index}]", *item) for index, item in enumerate(zip(value, item_types, strict=True)))
        elif isinstance(value, Mapping) and get_origin(each) is dict:
            yield from (("[...]", item, types[1]) for item in value.values())
        elif isinstance(value, Mapping) and (isinstance(each, msgspec.StructMeta) or dataclasses.is_dataclass(each)):
            infos.append(_type_info(each))
    if infos and (tag_field := getattr(infos[0], "tag_field", None)):
        tag = value.get(tag_field, msgspec.UNSET if infos[1:] else infos[0].tag)
        yield f".{tag_field}", tag, Literal[tuple(info.tag for info in infos)]
        infos = [info for info in infos if info.tag == tag]
    for info in infos:
        for field in info.fields:
            if field.required or field.encode_name in value:
                yield f".{field.encode_name}", value.get(field.encode_name, msgspec.UNSET), _hints(info.cls)[field.name]


def alternatives(kind: Any) -> list[Any]:
    """Return the types that a type allows, without limits and None."""
    if get_origin(kind) is Annotated:
        return alternatives(kind.__origin__)
    if get_origin(kind) in (Union, UnionType):
        return [each for part in get_args(kind) for each in alternatives(part)]
    return [] if kind is NoneType else [kind]


def without_aliases(values: Mapping[str, Any], kind: type[Declared]) -> dict[str, Any]:
    """Rename keywords to field names and parse texts as the flags do, so that '8GiB' works in Python too."""
    found = dict(values)
    for option in options_of(kind):
        given = [name for name in option.keywords if name in found]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: given beside {given[0]}; both are the same option")
        if given:
            found[option.name] = found.pop(given[0])
        if isinstance(text := found.get(option.name), str) and option.read is not None:
            try:
                found[option.name] = option.read(text)
            except ValueError as error:
                raise ValueError(f"{option.name}: {error}") from None
    return found


def count(text: str) -> int:
    """Read a number of tokens as vLLM does: `4096`, `4k` (4,000) or `4K` (4,096); else raise ValueError."""
    match = re.fullmatch(r"(\d{1,30}(?:\.\d+)?)([kKmM]?)", text.strip())
    units = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}
    if match is None or (found := Fraction(match[1]) * units[match[2]]).denominator != 1:
        raise ValueError(f"{text!r} is not a number of tokens; write it like 4096, 4k (4,000) or 4K (4,096)")
    return int(found)


_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {f"{unit}i": 1024 ** (index + 1) for index, unit in enumerate("kmgt")}


def size_bytes(text: str) -> int:
    """Read a size: `8GiB`, `500MB`, `1.5g` or a plain number of bytes. Raise ValueError for anything else."""
    match = re.fullmatch(r"(\d{1,30}(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write it like 8GiB, 500MB or 1073741824")
    return int(Fraction(match[1]) * _UNITS[match[2]])


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
        msgspec.msgpack.encode(value)  # checks that it can be sent to the core
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f'{text[:60]!r} given; a JSON object is expected, like {{"name": 1}}')
    return value


def _complaining(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Convert ValueError to ArgumentTypeError, since argparse only shows the message of the latter."""

    def reader(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return reader
