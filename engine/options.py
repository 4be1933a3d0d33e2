"""Options, declared once: on the fields of the structs that configure an engine, a server and a router.

    max_num_seqs: Annotated[int, Meta(ge=1), Flag("sequences computed at a time", "N")] = 256

Type, limits and `Flag` together are the flag on the command line with its help, the check of a keyword of `LLM(...)`,
the key in a deployment's file and the line in docs/configuration.md. What several options must keep to together is
checked where they are resolved.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Share = Annotated[float, Meta(ge=0, le=1)]
# More than thirty years is a mistake, and so is infinity.
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
SecondsOrNone = Annotated[float, Meta(ge=0, le=1e9)]  # 0: do not wait

S = TypeVar("S", bound=msgspec.Struct)


class Flag(NamedTuple):
    """What the command line says of a field. Without one, a field is no option there."""

    help: str  # %(default)s is the field's
    metavar: str | None = None
    names: tuple[str, ...] = ()  # where they are not the field's own name
    choices: tuple[str, ...] = ()  # where the type does not list them
    read: Callable[[str], Any] | None = None  # what a text stands for; ValueError: for nothing
    has_off: bool = False  # a switch that --no-… turns off
    takes_several: bool = False  # values behind one flag; else a tuple's flag is repeated
    opens: str = ""  # the title of a group in the help, for this option and those that follow


class Option(NamedTuple):
    name: str  # of the field
    kind: Any  # its type, without what is said about it and without None
    default: Any
    flag: Flag

    @property
    def words(self) -> tuple[str, ...]:
        return self.flag.names or ("--" + self.name.replace("_", "-"),)

    @property
    def is_switch(self) -> bool:
        return self.kind is bool

    @property
    def is_list(self) -> bool:
        return get_origin(self.kind) is tuple

    def settings(self) -> dict[str, Any]:
        """Of `add_argument`."""
        flag = self.flag
        if self.is_switch:
            return {"action": argparse.BooleanOptionalAction if flag.has_off else "store_true"}
        found: dict[str, Any] = {"metavar": flag.metavar}
        if flag.choices or get_origin(self.kind) is Literal:
            found = {"choices": flag.choices or get_args(self.kind)}
        read = flag.read or (self.kind if self.kind in (int, float) else None)
        if self.kind is dict or get_origin(self.kind) is dict or isinstance(self.kind, type(msgspec.Struct)):
            read = json_object
        if self.is_list:
            found |= {"nargs": "+"} if flag.takes_several else {"action": "extend" if flag.read else "append"}
        return found if read is None else {**found, "type": read if read in (int, float) else _complaining(read)}


def options_of(kind: type[msgspec.Struct]) -> Iterator[Option]:
    """Those of a struct, and of the structs within it that have some."""
    hints = get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        flag = next((said for said in getattr(hints[field.name], "__metadata__", ()) if isinstance(said, Flag)), None)
        plain = _plain(hints[field.name])
        if flag is not None:
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            yield Option(field.name, plain, default, flag)
        elif isinstance(plain, type(msgspec.Struct)):
            yield from options_of(plain)


def add_options(parser: argparse.ArgumentParser, kind: type[msgspec.Struct]) -> None:
    """A flag for each option."""
    add = parser.add_argument
    for option in options_of(kind):
        if option.flag.opens:
            add = parser.add_argument_group(option.flag.opens).add_argument
        default = [] if isinstance(option.default, tuple) else option.default  # argparse adds to a list that is there
        add(*option.words, dest=option.name, default=default, help=option.flag.help, **option.settings())


def given_options(args: argparse.Namespace, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """What the command line says of a struct's own options; None is nothing."""
    values = {option.name: getattr(args, option.name, None) for option in options_of(kind)}
    return {name: value for name, value in values.items() if value is not None}


def built(args: argparse.Namespace, kind: type[S], **others: Any) -> S:
    """The struct, and those within it, as the command line says. Nothing is checked yet."""
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        if (value := getattr(args, field.name, None)) not in (None, []):
            values[field.name] = tuple(value) if isinstance(value, list) else value
        elif isinstance(field.default, msgspec.Struct):
            values[field.name] = built(args, type(field.default))
    return kind(**{**values, **others})


def check(config: msgspec.Struct) -> None:
    """Every field has its type and keeps to its limits; ValueError names the field, the value and the limit."""
    values = {name: getattr(config, name) for name in config.__struct_fields__}
    for value in values.values():
        if isinstance(value, msgspec.Struct):
            check(value)
    converted(msgspec.to_builtins(values), type(config))
    for option in options_of(type(config)):
        if option.flag.choices and (value := values.get(option.name)) is not None and value not in option.flag.choices:
            raise ValueError(f"{option.name}: {value!r} is not known; {', '.join(option.flag.choices)} are")


def converted(values: Mapping[str, Any], kind: type[S]) -> S:
    """A struct of plain data; ValueError as of `check`."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).replace(" | null`", "`").partition(" - at `$.")
        if not path:
            raise ValueError(what) from None
        value: Any = values
        name = path.rstrip("`").partition("[")[0]
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        what = what if " given; " in what else f"{value!r} given; {what[0].lower()}{what[1:]}"
        raise ValueError(f"{name}: {what}") from None


def meant(values: Mapping[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Texts as the flags read them: a keyword may say '8GiB' too."""
    found = dict(values)
    for option in options_of(kind):
        if isinstance(text := values.get(option.name), str) and option.flag.read is not None:
            try:
                found[option.name] = option.flag.read(text)
            except ValueError as error:
                raise ValueError(f"{option.name}: {error}") from None
    return found


def count(text: str) -> int:
    """`4096`, `4k` (thousands) or `4K` (of 1,024), as vLLM reads a number of tokens; ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number of tokens; write it like 4096, 4k (4,000) or 4K (4,096)")
    return int(float(match[1]) * {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}[match[2]])


_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {f"{unit}i": 1024 ** (index + 1) for index, unit in enumerate("kmgt")}


def size_bytes(text: str) -> int:
    """`8GiB`, `500MB`, `1.5g` or a plain number of bytes; ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write it like 8GiB, 500MB or 1073741824")
    return int(float(match[1]) * _UNITS[match[2]])


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("a JSON object is expected, like '{\"rope_theta\": 1000000}'")
    return value


def _complaining(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """argparse passes on what this exception says, and not what a ValueError does."""

    def reader(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return reader


def _plain(kind: Any) -> Any:
    if get_origin(kind) is Annotated:
        return _plain(kind.__origin__)
    if get_origin(kind) in (Union, UnionType):
        (kind,) = [_plain(each) for each in get_args(kind) if each is not NoneType] or [None]
    return kind
