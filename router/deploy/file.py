"""The file of `penstock deploy`: what may stand in it, and what is made of it. Knows nothing of Ray.

Own settings are the fields of the structs below. Everything else in [model] and [router] is a flag of `penstock
serve` or `penstock route` under its own name, read by that command's own parser. The first mistake is an error that
names the field, the value and the limit.
"""

import argparse
import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn, Protocol, TypeVar

import msgspec
from msgspec import Meta

from penstock.engine.options import Option, converted

Count = Annotated[int, Meta(ge=0, le=1024)]
Amount = Annotated[float, Meta(ge=0, le=4096)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]
Text = Annotated[str, Meta(min_length=1)]

S = TypeVar("S", bound=msgspec.Struct)

KEY_VARIABLES = ("PENSTOCK_API_KEY", "PENSTOCK_ADMIN_API_KEY", "PENSTOCK_BACKEND_API_KEY")
RAYS_OWN = ("CPU", "GPU", "memory", "object_store_memory")
# By table, what is set here and no flag of the file's, and what says it instead.
_KEYS = {
    "api-key": "; clients' key is PENSTOCK_API_KEY, set where deploy is started",
    "drain-timeout": "; rollout.drain-s says it",
}
_ALIKE = "; the replicas of a deployment are all alike"
OURS = {
    "model": {"host": "", "port": "", **_KEYS},
    "router": {
        "backend": "; replicas.count says how many there are",
        "prefill": _ALIKE,
        "decode": _ALIKE,
        **_KEYS,
        "admin-api-key": "",
        "backend-api-key": "",
    },
}
PATHS = ("model", "tokenizer", "chat-template")  # may be given relative to the file


class DeployError(ValueError):
    """The file, or the cluster, cannot be used as it is; the message says what is wrong."""


class Flags(Protocol):
    """The module of a command whose flags the file may have."""

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None: ...

    def options(self) -> list[Option]: ...

    def check(self, args: argparse.Namespace, /) -> object:
        """Raises ValueError."""
        ...


class Command(NamedTuple):
    """A command, started by these words after `python -m`."""

    words: tuple[str, ...]
    flags: Flags


class Replicas(msgspec.Struct, frozen=True, kw_only=True):
    """How many, and what each takes of its node."""

    count: Annotated[int, Meta(ge=1, le=1024)] = 1
    cpus: Amount = 1.0
    gpus: Amount | None = None  # None: one for each rank where the cluster has GPUs
    resources: dict[str, Annotated[float, Meta(gt=0, le=1e6)]] = {}
    env: dict[str, str] = {}


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """How a new version takes the place of an old one."""

    surge: Count = 1  # replicas beyond `count` while it lasts
    max_unavailable: Count = 0  # how many fewer than `count` may answer while it lasts
    ready_s: Seconds = 600.0  # from the start of a replica to its first word that it is ready
    drain_s: Seconds = 30.0  # for requests in flight at a replica that leaves


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to a replica, or a router, that dies."""

    limit: Count = 5  # new starts in a row that end before `stable_s`; then it is left alone
    pause_s: Seconds = 1.0  # before the first of them; doubled for each, up to 30 s
    stable_s: Seconds = 60.0


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a replica; another template is another version."""

    words: tuple[str, ...]
    cpus: float
    gpus: float | None
    num_ranks: int
    resources: dict[str, float]
    env: dict[str, str]


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    count: int
    template: Template
    router_words: tuple[str, ...]
    router_cpus: float
    rollout: Rollout
    restart: Restart


def read(path: Path, serve: Command, route: Command) -> Deployment:
    try:
        given = tomllib.loads(path.read_text())
    except OSError as error:
        raise DeployError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeployError(f"{path}: not TOML: {error}") from None
    try:
        return _deployment(given, path.resolve().parent, serve, route)
    except DeployError as error:
        raise DeployError(f"{path}: {error}") from None


def _deployment(given: dict[str, Any], folder: Path, serve: Command, route: Command) -> Deployment:
    tables = ("model", "replicas", "router", "rollout", "restart")
    for key in given:
        if key not in ("name", *tables):
            raise _unknown(key, ["name", *tables])
    model, replicas, router, rollout, restart = (_table(given, name) for name in tables)
    name = _field("name", given.get("name", "penstock"), Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9-]{0,39}$")])
    size = _own(Replicas, "replicas", replicas)
    how = _own(Rollout, "rollout", rollout)
    if how.surge + how.max_unavailable < 1:
        raise DeployError("rollout.surge: 0 given, and max-unavailable is 0 too; one of them must be at least 1")
    if how.max_unavailable > size.count:
        raise DeployError(f"rollout.max-unavailable: {how.max_unavailable} given; at most replicas.count, {size.count}")
    for variable in KEY_VARIABLES:
        if variable in size.env:
            raise DeployError(f"replicas.env.{variable}: keys are not written here; set it where deploy is started")
    for variable, value in size.env.items():
        if not variable or "=" in variable or "\0" in variable + value:
            raise DeployError(
                f"replicas.env.{variable!r}: neither a name with = nor a zero byte can be in an environment"
            )
    for resource in size.resources:
        if resource in RAYS_OWN:
            raise DeployError(f"replicas.resources.{resource}: Ray counts it itself; cpus and gpus say how many")
    if size.gpus is not None and size.gpus > 1 and size.gpus != int(size.gpus):
        raise DeployError(f"replicas.gpus: {size.gpus:g} given; beyond 1 Ray gives whole ones")
    engine_words, engine = CommandTable("model", serve, folder).read(
        {key: value for key, value in model.items() if key != "model"}, model.get("model")
    )
    router_cpus = _field("router.cpus", router.pop("cpus", 0.0), Amount)
    edge_words, _ = CommandTable("router", route, folder, ("cpus",)).read(router)
    return Deployment(
        name=name,
        count=size.count,
        template=Template(
            words=(*serve.words, *engine_words),
            cpus=size.cpus,
            gpus=size.gpus if engine.device != "cpu" and engine.executor != "ray" else size.gpus or 0,
            num_ranks=engine.tensor_parallel_size or 1,
            resources=size.resources,
            env=size.env,
        ),
        router_words=(*route.words, *edge_words),
        router_cpus=router_cpus,
        rollout=how,
        restart=_own(Restart, "restart", restart),
    )


class CommandTable:
    """A command's flags as the keys of a table; those that `deploy` sets itself are refused."""

    def __init__(self, name: str, command: Command, folder: Path, others: tuple[str, ...] = ()) -> None:
        self._name, self._flags, self._folder = name, command.flags, folder
        self._kept = OURS[name]
        self._others = others  # keys of the table that are no flags
        self._options = {
            word[2:]: option for option in self._flags.options() for word in option.words if word[:2] == "--"
        }

    def read(self, given: Mapping[str, Any], model: Any = None) -> tuple[tuple[str, ...], argparse.Namespace]:
        words = [] if model is None else [self._path("model", _field(f"{self._name}.model", model, Text))]
        for key in sorted(given):
            words += self._words(key, given[key])
        parser = _Parser(prog=self._name, add_help=False, allow_abbrev=False)
        self._flags.add_arguments(parser)
        options = parser.parse_args(words)
        try:
            self._flags.check(options)
        except ValueError as error:
            raise DeployError(f"{self._name}.{error}") from None
        return tuple(words), options

    def _words(self, key: str, value: Any) -> list[str]:
        name = f"{self._name}.{key}"
        if key in self._kept:
            raise DeployError(f"{name}: deploy sets this itself{self._kept[key]}")
        option = self._options.get(key)
        if option is None:
            known = [each for each in self._options if each not in self._kept]
            raise _unknown(name, [f"{self._name}.{each}" for each in (*known, *self._others)])
        if option.kind is bool:
            if not _field(name, value, bool) and not option.flag.has_off:
                raise DeployError(f"{name}: false given; leave the key out, it is off unless it is true")
            return [f"--{key}" if value else f"--no-{key}"]
        if option.is_list:
            values = _field(name, value if isinstance(value, list) else [value], list[str])
            return [f"--{key}", *values] if option.flag.takes_several else [f"--{key}={each}" for each in values]
        if option.kind in (int, float) and option.flag.read is None:
            return [f"--{key}={_field(name, value, option.kind)}"]
        if isinstance(value, dict):
            try:
                return [f"--{key}={json.dumps(value)}"]
            except TypeError:  # TOML has dates and times
                raise DeployError(f"{name}: {value!r} given; no date or time can be in it, but as a text") from None
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else _field(name, value, str)
        return [f"--{key}={self._path(key, text)}"]

    def _path(self, key: str, text: str) -> str:
        """Replicas run elsewhere: what lies beside the file is named by its whole path."""
        beside = self._folder / text
        return str(beside) if key in PATHS and beside.exists() else text


class _Parser(argparse.ArgumentParser):
    """Says what argparse says as an error of the file; `prog` is the table."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ").removeprefix("--")
        raise DeployError(f"{self.prog}.{message}")


def _table(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Keys are written with dashes, as flags are; underscores are taken as well."""
    table = given.get(name, {})
    if not isinstance(table, dict):
        raise DeployError(f"{name}: {table!r} given; a table is expected: [{name}]")
    keys: dict[str, Any] = {}
    for key, value in table.items():
        if (dashed := key.replace("_", "-")) in keys:
            raise DeployError(f"{name}.{dashed}: given twice, with '-' and with '_'")
        keys[dashed] = value
    return keys


def _own(kind: type[S], table: str, given: Mapping[str, Any]) -> S:
    known = [name.replace("_", "-") for name in kind.__struct_fields__]
    for key in given:
        if key not in known:
            raise _unknown(f"{table}.{key}", [f"{table}.{each}" for each in known])
    try:
        return converted({key.replace("-", "_"): value for key, value in given.items()}, kind)
    except ValueError as error:
        name, _, rest = str(error).partition(":")
        raise DeployError(f"{table}.{name.replace('_', '-')}:{rest}") from None


def _field(name: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        said = str(error)
        raise DeployError(f"{name}: {value!r} given; {said[0].lower()}{said[1:]}") from None


def _unknown(name: str, known: list[str]) -> DeployError:
    near = difflib.get_close_matches(name, known, 1, 0.75)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
    return DeployError(f"{name}: there is no such key; {hint}")
