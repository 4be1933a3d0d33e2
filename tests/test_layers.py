"""Rules on imports and dangerous calls (tests/layers.toml), checked in the syntax trees of every module.

Lazy imports inside functions and imports for type checkers count like any other. Fresh processes show that torch stays
out of the light commands.
"""

import ast
import functools
import graphlib
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.programs import printed

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("engine", "cache", "executor", "router", "eplb", "prove")

_RULES = tomllib.loads((ROOT / "tests/layers.toml").read_text())
MAY_IMPORT: dict[str, list[str]] = _RULES["may_import"]
PARTS: dict[str, list[str]] = _RULES["parts"]
LEAVES: dict[str, list[str]] = _RULES["leaves"]
BANNED: dict[str, list[str]] = _RULES["banned"]
DISTRIBUTIONS: dict[str, str] = _RULES["distributions"]
TORCH_LIVES_IN = {"executor"}
TORCH_AND_CO = {"torch", "transformers", "triton", "safetensors.torch"}


class Module(NamedTuple):
    """A module of ours by its name below `penstock`, with the full names of all that it imports, and its bad calls."""

    name: str
    imports: list[str]
    banned: list[str]
    path: Path = ROOT

    @property
    def room(self) -> str:
        return self.name.partition(".")[0]

    @property
    def own_imports(self) -> list[str]:
        """The imports from our modules, by their names below `penstock`."""
        return [name.removeprefix("penstock.") for name in self.imports if name.startswith("penstock.")]


@functools.cache
def modules() -> list[Module]:
    """Return every module of ours: executor/protocol.py is executor.protocol, src/penstock/cli.py is cli."""
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    return [read_module(path) for path in sorted([*paths, *(ROOT / "src/penstock").glob("*.py")])]


def read_module(path: Path) -> Module:
    is_package = path.name == "__init__.py"
    name = path.stem if path.is_relative_to(ROOT / "src") else dotted(path)
    nodes = list(ast.walk(ast.parse(path.read_text())))
    return Module(name, list(imports(nodes, name, is_package)), list(banned_calls(nodes)), path)


def dotted(path: Path) -> str:
    """Return executor.models.llama for executor/models/llama.py; the name of a package has no `__init__`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def name_of(function: ast.expr) -> str:
    """Return the dotted name of a called function; an empty text for another expression."""
    if isinstance(function, ast.Attribute):
        return f"{name_of(function.value)}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def imports(nodes: Iterable[ast.AST], module: str, is_package: bool) -> Iterator[str]:
    """Yield full names; `from a import b` yields a.b, which may be a module or a name."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ("penstock." + module).split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, base] if base else parents)
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and name_of(node.func).endswith(("import_module", "__import__")):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def banned_calls(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield banned calls by their full names, also if the function was imported under another name."""
    renamed: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            renamed |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            renamed |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.Call):
            first, dot, rest = name_of(node.func).partition(".")
            name = renamed.get(first, first) + dot + rest
            if name in BANNED["calls"]:
                yield name
            for keyword in node.keywords:
                is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value in (False, None)
                if keyword.arg in BANNED["keywords"] and not is_off:
                    yield f"{name}({keyword.arg}=…)"


def is_within(name: str, allowed: Iterable[str]) -> bool:
    return any(name == entry or name.startswith(entry + ".") for entry in allowed)


def wrong_imports(module: Module) -> list[str]:
    allowed = {"__version__", *MAY_IMPORT.get(module.room, ())}
    wrong = [name for name in module.own_imports if not is_within(name, allowed)]
    others = [name for name in module.imports if name.partition(".")[0] in ROOMS]
    if module.room not in TORCH_LIVES_IN:
        others += [name for name in module.imports if is_within(name, TORCH_AND_CO)]
    return wrong + others


def wrong_leaves(module: Module) -> list[str]:
    """Return the imports of leaves by a module that may not import them."""
    return [
        f"{name}, which is part of the leaf {leaf}"
        for leaf, importers in LEAVES.items()
        for name in module.own_imports
        if is_within(name, {leaf}) and not is_within(module.name, {leaf, *importers})
    ]


def part_of(name: str) -> int:
    """Return the number of the part of its room that a module, or a name in it, belongs to; 0 for a package of several."""
    room, _, rest = name.partition(".")
    numbers = [number for number, part in enumerate(PARTS[room]) if is_within(rest, part.split())]
    assert numbers or (ROOT / name.replace(".", "/")).is_dir(), f"{name} is in no part of {room}"
    return numbers[0] if numbers else 0


def upward_imports(module: Module) -> list[str]:
    if module.room not in PARTS:
        return []
    within = [name for name in module.own_imports if name.startswith(f"{module.room}.")]
    return [name for name in within if part_of(name) > part_of(module.name)]


def circle(room: str) -> list[str]:
    """Return modules of a room that import each other in a circle, be it in functions or for types alone."""
    members = {module.name: module for module in modules() if module.room == room}
    graph = {}
    for module in members.values():
        parts = (name.split(".") for name in module.own_imports)
        prefixes = ([".".join(words[:size]) for size in range(len(words), 1, -1)] for words in parts)
        graph[module.name] = {next((name for name in longest if name in members), module.name) for longest in prefixes}
        graph[module.name].discard(module.name)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def complaints(check: Callable[[Module], list[str]]) -> dict[str, list[str]]:
    """Return what a check reports for each file, without files that are right."""
    reports = {str(module.path.relative_to(ROOT)): check(module) for module in modules()}
    return {path: report for path, report in reports.items() if report}


@pytest.mark.parametrize("check", [wrong_imports, upward_imports, wrong_leaves, attrgetter("banned")])
def test_modules_import_what_theirs_may_and_evaluate_and_unpickle_nothing(check: Callable[[Module], list[str]]) -> None:
    """They import other rooms, no higher part of their own, and leaves as tests/layers.toml says."""
    assert complaints(check) == {}


def test_leaves_exist_and_are_not_imported_by_any_module() -> None:
    assert wrong_leaves(Module("engine.core.kv", ["penstock.prove.judge"], [])) != []
    paths = [ROOT / leaf.replace(".", "/") for leaf in LEAVES]
    assert [path for path in paths if not (path.is_dir() or path.with_suffix(".py").is_file())] == []


@pytest.mark.parametrize("room", ["cache", "executor", "router", "eplb", "prove"])
def test_no_modules_of_a_room_import_each_other_in_a_circle(room: str) -> None:
    assert circle(room) == []


def test_modules_import_no_package_that_pyproject_does_not_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["ray"], *extras["otel"]]
    declared = {re.split(r"[^\w-]", line)[0].lower() for line in lines}

    def undeclared(module: Module) -> list[str]:
        foreign = {name.partition(".")[0] for name in module.imports} - sys.stdlib_module_names - {"penstock"}
        allowed = {"numpy"} if module.room == "eplb" else declared  # eplb plans where there is nothing else
        return sorted(name for name in foreign if DISTRIBUTIONS.get(name, name) not in allowed)

    assert complaints(undeclared) == {}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_a_symlink_in_the_package_and_its_folders_are_packages(room: str) -> None:
    link = ROOT / "src/penstock" / room
    assert link.is_symlink() and link.resolve() == ROOT / room
    folders = {path.parent for path in (ROOT / room).rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


LOADED_FILES = """
import importlib, sys
importlib.import_module(sys.argv[1])
ours = {name: getattr(module, "__file__", None) for name, module in sys.modules.items() if name.split(".")[0] == "penstock"}
print(*(f"{name}={file}" for name, file in ours.items() if file))
"""


@pytest.mark.parametrize("module", _RULES["closures"])
def test_importing_a_module_loads_little_else(module: str) -> None:
    limit, excluded = _RULES["closures"][module]
    loaded = dict(entry.split("=", 1) for entry in printed(LOADED_FILES, f"penstock.{module}").split())
    names = {name.removeprefix("penstock."): Path(file) for name, file in loaded.items()}
    size = sum(file.read_text().count("\n") for file in names.values() if file.suffix == ".py")
    print(f"{module} loads {size:,} lines of {len(names)} files")
    assert [name for name in names if is_within(name, excluded)] == []
    assert size <= limit, sorted(names)


def modules_in_a_fresh_process(code: str) -> set[str]:
    """Return the top-level modules that are loaded after `code` ran in a new interpreter."""
    report = "\nimport sys; print('\\nLOADED', *{name.partition('.')[0] for name in sys.modules})"
    return set(printed(f"import sys\n{code}{report}").rpartition("LOADED ")[2].split())


def importing(*rooms: str) -> str:
    """Return code that imports every module of these rooms."""
    return "\n".join(f"import penstock.{module.name}" for module in modules() if module.room in rooms)


RUN_A_PROGRAM = """
def program(words):
    from penstock.cli import main
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as end:
        assert not end.code
"""


def test_torch_and_transformers_are_not_loaded_by_light_modules_and_programs() -> None:
    checked = "\nloaded = {'torch', 'transformers', 'triton'} & {*sys.modules}\nassert not loaded, (%r, loaded)\n"
    every = importing("engine", "cache", "router", "prove")
    light = _RULES["light"] | {"every module of engine, cache, router and prove": every}
    modules_in_a_fresh_process(RUN_A_PROGRAM + "".join(f"{code}{checked % name}" for name, code in light.items()))


def test_a_start_loads_no_package_that_it_needs_later() -> None:
    before_the_core = (
        "import penstock.engine.commands.serve, penstock.engine.http.sockets, penstock.engine.front.answer"
    )
    tokenizers = "import penstock.engine.text.hf_tokenizer, penstock.engine.text.gguf_tokenizer"
    later = {"numpy", "uvicorn", "jinja2", "llguidance", "gguf", "huggingface_hub"}
    assert modules_in_a_fresh_process(f"{before_the_core}\n{tokenizers}") & later == set()
    assert modules_in_a_fresh_process("from penstock import LLM") & {"jinja2", "llguidance"} == set()
