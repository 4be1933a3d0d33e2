"""The house's rules on imports and dangerous calls, read from the syntax trees of every module.

Lazy imports inside functions and imports for type checkers count like any other. What only a running process can
show, that torch stays out of the light commands, is asked of fresh processes.
"""

import ast
import functools
import graphlib
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.programs import printed

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("engine", "cache", "executor", "router", "eplb", "prove")

# Where imports may point, per room; a name stands for itself and everything beneath it.
MAY_IMPORT = {
    "engine": {
        *("engine", "cache", "executors", "_csrc", "executor.protocol", "executor.process_life", "executor.machine"),
        *("executor.regular_files", "executor.shared_tensors", "executor.gguf_header", "executor.forward"),
        *("executor.models.catalogue", "executor.logs"),
        "executor.loading.fields",  # without torch
        "prove",
    },
    "executors": {"executor"},
    "core_process": {"engine", "executor.protocol", "executors"},
    "executor": {"executor", "cache", "eplb", "_csrc"},
    "cache": {"cache", "_csrc"},
    "eplb": {"eplb"},
    "prove": {"prove"},
    "router": {
        *("router", "cache.keys", "engine.options", "engine.text", "engine.http", "_csrc"),
        *("executor.process_life", "executor.logs"),
    },
    "__init__": {"engine"},
    "cli": {*ROOMS},
}
# Inside a room imports point one way too: a part imports itself and those before it.
PARTS = {
    "engine": ("config messages", "core", "options vllm_options engine_options sampling_params invalid_request model_error model_files", "http", "page",
               "text", "grammar", "front", "server", "commands"),
    "executor": ("protocol regular_files gguf_header code_types shared_tensors cache_layout batch moe_spec parallel staging progress child_main logs process_life outbox machine weight_memory",
                 "kernels", "loading", "models",
                 "sampling", "tiers", "step", "ring", "ranks", "uniproc forward"),
    "router": ("backend background discovery config", "http", "placement", "fleet",
               "routes answer leg prefill metrics exchange spans tokenizer_check app serve ray_serve"),
    "cache": ("keys pool", "tiers.names tiers.base tiers.health tiers.memory", "tiers.index", "tiers.disk",
              "tiers.peer"),
}  # fmt: skip
# Parts that only the named modules import, so that each can be deleted together with its tests.
LEAVES = {
    "engine.page": {"engine.server.routes"},
    "engine.server.agents": {"engine.server.routes", "engine.server.service"},
    "engine.http.tracing": {"engine.server.spans", "router.spans"},
    "engine.server.spans": {"engine.server.service"},
    "router.spans": {"router.serve"},
    "engine.commands.bench": {"cli"},
    "prove": {"cli", "engine.commands.bench"},
    "router.fleet.engine_feed": {"router.fleet"},
    "router.placement.engine_blocks": {"router.placement", "router.fleet"},
    "router.ray_serve": set(),
}
TORCH_LIVES_IN = {"executor"}
TORCH_AND_CO = {"torch", "transformers", "triton", "safetensors.torch"}

BANNED_CALLS = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open", "torch.load",
    "yaml.load", "yaml.unsafe_load", "eval", "exec", "os.system", "os.popen",
}  # fmt: skip
BANNED_KEYWORDS = {"shell", "allow_pickle", "trust_remote_code"}
# Import names whose package is called otherwise; torch brings triton where there is CUDA.
DISTRIBUTIONS = {
    "huggingface_hub": "huggingface-hub",
    "opentelemetry": "opentelemetry-sdk",
    "prometheus_client": "prometheus-client",
    "triton": "torch",
    "zmq": "pyzmq",
}


def modules() -> list[Path]:
    """Every module of ours, by its real path: executor/protocol.py, src/penstock/cli.py."""
    rooms = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    return sorted([*rooms, *(ROOT / "src/penstock").glob("*.py")])


def room_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return path.stem if first == "src" else first


def dotted(path: Path) -> str:
    """executor/models/llama.py → executor.models.llama, a package without its `__init__`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@functools.cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Return the imports and the calls of a module."""
    return tuple(
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)
    )


@pytest.fixture(scope="module", autouse=True)
def forget_the_trees() -> Iterator[None]:
    """Drop the syntax trees after the tests of this file: every later garbage collection would look at each of their nodes."""
    yield
    nodes.cache_clear()


def name_of(function: ast.expr) -> str:
    """The dotted name of a called function; empty where it is no plain name."""
    if isinstance(function, ast.Attribute):
        return f"{name_of(function.value)}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def imports(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Full names of everything a module imports; `from a import b` yields a.b, which may be a module or a name."""
    for node in nodes(source):
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


def is_within(name: str, allowed: set[str]) -> bool:
    return any(name == entry or name.startswith(entry + ".") for entry in allowed)


def wrong_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    room = module.split(".")[0]
    wrong = []
    for name in imports(source, module, is_package):
        first, _, rest = name.partition(".")
        if first == "penstock":
            if rest and rest != "__version__" and not is_within(rest, MAY_IMPORT[room]):
                wrong.append(name)
        elif first in ROOMS or (room not in TORCH_LIVES_IN and is_within(name, TORCH_AND_CO)):
            wrong.append(name)
    return wrong


def wrong_leaves(source: str, module: str, is_package: bool = False) -> list[str]:
    """Return the imports of leaves by a module that may not import them."""
    names = [name.removeprefix("penstock.") for name in imports(source, module, is_package)]
    return [
        f"{name}, which is part of the leaf {leaf}"
        for leaf, importers in LEAVES.items()
        for name in names
        if is_within(name, {leaf}) and not is_within(module, {leaf, *importers})
    ]


def part_of(name: str) -> int:
    """At which place of its room's parts a module, or a name in it, stands. A package that holds several parts: 0."""
    room, _, rest = name.partition(".")
    places = [place for place, part in enumerate(PARTS[room]) if is_within(rest, set(part.split()))]
    assert places or (ROOT / name.replace(".", "/")).is_dir(), f"{name} is in no part of {room}"
    return places[0] if places else 0


def upward_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    room = module.split(".")[0]
    names = [name.partition(".")[2] for name in imports(source, module, is_package)]
    within = [name for name in names if name.startswith(f"{room}.")]
    return [name for name in within if room in PARTS and part_of(name) > part_of(module)]


def circle(room: str) -> list[str]:
    """Return modules of a room that import each other in a circle, be it in functions or for types alone."""
    paths = {dotted(path): path for path in (ROOT / room).rglob("*.py")}
    graph = {}
    for module, path in paths.items():
        names = (name.split(".")[1:] for name in imports(path.read_text(), module, path.name == "__init__.py"))
        found = ([".".join(parts[:size]) for size in range(len(parts), 1, -1)] for parts in names)
        graph[module] = {next((name for name in longest if name in paths), module) for longest in found} - {module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def banned_calls(source: str) -> list[str]:
    """Calls by their full names, also when the function was imported under another."""
    renamed: dict[str, str] = {}
    for node in nodes(source):
        if isinstance(node, ast.Import):
            renamed |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            renamed |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    found = []
    for node in nodes(source):
        if not isinstance(node, ast.Call):
            continue
        first, dot, rest = name_of(node.func).partition(".")
        name = renamed.get(first, first) + dot + rest
        if name in BANNED_CALLS:
            found.append(name)
        for keyword in node.keywords:
            is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value in (False, None)
            if keyword.arg in BANNED_KEYWORDS and not is_off:
                found.append(f"{name}({keyword.arg}=…)")
    return found


def modules_in_a_fresh_process(code: str) -> set[str]:
    """The top-level modules that are loaded after `code` ran in a new interpreter."""
    report = "\nimport sys; print('\\nLOADED', *{name.partition('.')[0] for name in sys.modules})"
    return set(printed(f"import sys\n{code}{report}").rpartition("LOADED ")[2].split())


def complaints(check: Callable[[Path, str, str], list[str]], paths: list[Path]) -> dict[str, list[str]]:
    """What a check of (path, module, source) finds wrong, by file; empty where all is well."""
    found = {}
    for path in paths:
        module = room_of(path) if path.is_relative_to(ROOT / "src") else dotted(path)
        if wrong := check(path, module, path.read_text()):
            found[str(path.relative_to(ROOT))] = wrong
    return found


def test_modules_import_only_what_their_room_may() -> None:
    def check(path: Path, module: str, source: str) -> list[str]:
        return wrong_imports(source, module, path.name == "__init__.py")

    assert complaints(check, modules()) == {}


def test_modules_import_nothing_that_stands_above_them_in_their_room() -> None:
    def check(path: Path, module: str, source: str) -> list[str]:
        return upward_imports(source, module, path.name == "__init__.py")

    assert complaints(check, [path for path in modules() if room_of(path) in PARTS]) == {}


def test_leaves_are_imported_only_by_the_modules_that_may() -> None:
    def check(path: Path, module: str, source: str) -> list[str]:
        return wrong_leaves(source, module, path.name == "__init__.py")

    assert complaints(check, modules()) == {}
    assert wrong_leaves("import penstock.prove.judge", "engine.core.kv") != []


def test_every_leaf_exists() -> None:
    paths = [ROOT / leaf.replace(".", "/") for leaf in LEAVES]
    assert [path for path in paths if not (path.is_dir() or path.with_suffix(".py").is_file())] == []


@pytest.mark.parametrize("room", ["cache", "executor", "router", "eplb", "prove"])
def test_no_modules_of_a_room_import_each_other_in_a_circle(room: str) -> None:
    assert circle(room) == []


def test_modules_evaluate_and_unpickle_nothing() -> None:
    assert complaints(lambda _path, _module, source: banned_calls(source), modules()) == {}


def test_modules_import_no_package_that_pyproject_does_not_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["ray"], *extras["otel"]]
    declared = {re.split(r"[^\w-]", line)[0].lower() for line in wanted}

    def check(_: Path, module: str, source: str) -> list[str]:
        tops = {name.partition(".")[0] for name in imports(source, module, False)}
        foreign = tops - sys.stdlib_module_names - {"penstock"}
        return sorted(name for name in foreign if DISTRIBUTIONS.get(name, name) not in declared)

    assert complaints(check, modules()) == {}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_a_symlink_in_the_package_and_each_of_its_folders_is_a_package(room: str) -> None:
    link = ROOT / "src/penstock" / room
    assert link.is_symlink() and link.resolve() == ROOT / room
    folders = {path.parent for path in (ROOT / room).rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


# The most lines of our own files that importing a module may load, and what must not be among them.
CLOSURES = {
    "engine.core.scheduler": (3_550, {
        *("engine.text", "engine.grammar", "engine.http", "engine.options", "engine.vllm_options", "engine.model_files"),
        *("executor.loading", "executor.models", "executor.process_life"),
    }),
    "engine.core.engine_core": (4_100, {"engine.text", "engine.grammar", "engine.http", "engine.vllm_options"}),
    "engine.server.app": (10_500, {"prove", "engine.commands.bench", "engine.front.client", "executor.process_life"}),
    "router.app": (7_350, {
        *("engine.grammar", "engine.front", "engine.server", "engine.model_files", "engine.sampling_params"),
        *("engine.vllm_options", "executor.protocol"),
    }),
}  # fmt: skip
LOADED_FILES = """
import importlib, sys
importlib.import_module(sys.argv[1])
ours = {name: getattr(module, "__file__", None) for name, module in sys.modules.items() if name.split(".")[0] == "penstock"}
print(*(f"{name}={file}" for name, file in ours.items() if file))
"""


@pytest.mark.parametrize("module", CLOSURES)
def test_importing_a_module_loads_little_else(module: str) -> None:
    limit, excluded = CLOSURES[module]
    loaded = dict(entry.split("=", 1) for entry in printed(LOADED_FILES, f"penstock.{module}").split())
    names = {name.removeprefix("penstock."): Path(file) for name, file in loaded.items()}
    size = sum(file.read_text().count("\n") for file in names.values() if file.suffix == ".py")
    print(f"{module} loads {size:,} lines of {len(names)} files")
    assert [name for name in names if is_within(name, excluded)] == []
    assert size <= limit, sorted(names)


def importing(*rooms: str) -> str:
    """Code that imports every module of these rooms."""
    paths = [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]
    return "\n".join(f"import penstock.{dotted(path)}" for path in paths)


# What runs, one after the other, without torch and what it brings.
LIGHT = {
    "the package": "import penstock\ndir(penstock)\npenstock.SamplingParams",
    "every module of engine, cache, router and prove": importing("engine", "cache", "router", "prove"),
    "the executor's protocol": "import penstock.executor.protocol",
    "penstock --help": "program(['--help'])",
    "penstock serve --help": "program(['serve', '--help'])",
    "penstock route --help": "program(['route', '--help'])",
}
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
    modules_in_a_fresh_process(RUN_A_PROGRAM + "".join(f"{code}{checked % what}" for what, code in LIGHT.items()))


def test_what_a_start_does_not_need_at_once_is_not_waited_for() -> None:
    before_the_core = "import penstock.engine.commands.serve, penstock.engine.http.sockets"
    assert modules_in_a_fresh_process(before_the_core) & {"numpy", "uvicorn", "jinja2", "llguidance"} == set()
    assert modules_in_a_fresh_process("from penstock import LLM") & {"jinja2", "llguidance"} == set()


REFUSING_ALL_BUT_NUMPY = """
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "numpy", "penstock"}:
            raise ModuleNotFoundError(f"{name} is not numpy")
sys.meta_path.insert(0, Refusing())
"""


def test_eplb_plans_where_there_is_nothing_but_numpy() -> None:
    use = "\nfrom penstock.eplb import balance, plan\nassert balance([[3, 1, 2]], plan([[3, 1, 2]], 4, 2)).all()"
    loaded = modules_in_a_fresh_process(REFUSING_ALL_BUT_NUMPY + importing("eplb") + use)
    assert "numpy" in loaded and "torch" not in loaded
    with pytest.raises(AssertionError, match="msgspec is not numpy"):
        modules_in_a_fresh_process(REFUSING_ALL_BUT_NUMPY + "import msgspec")
