"""Prepares a bare GPU machine: no network, few packages, perhaps no compiler. Missing packages are carried there.

`make gpu-wheels` fills .whl/ where there is a network: wheels, and the C extension as it was built. `prepare` puts to
use what a machine lacks of it. Nothing here needs more than Python's own library.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("engine", "cache", "executor", "router", "eplb")
EXTENSION = ROOT / "src/penstock/_csrc.abi3.so"
CARRIED = ROOT / ".whl"
MAX_BYTES = 64 << 20  # limit of everything that is carried

# Besides torch, triton, numpy, transformers and pytest: imports of `LLM`, and what parallel tests need. The last line
# lists their own dependencies.
PACKAGES = (
    *("msgspec", "cffi", "xxhash", "llguidance", "tokenizers", "safetensors", "gguf"),
    *("pyzmq", "httptools", "starlette", "uvicorn", "uvloop", "prometheus_client"),
    *("pytest-timeout", "pytest-xdist"),
    *("pycparser", "execnet", "anyio", "idna", "sniffio", "h11", "click", "Jinja2", "MarkupSafe", "tqdm"),
    "typing_extensions",
)
PYTHON = "3.12"
GLIBC = (39, 35, 34, 31, 28, 27, 24, 17)  # pip matches each version exactly
OLD_NAMES = ("manylinux2014_x86_64", "manylinux1_x86_64")


def environment(carried: Path = CARRIED) -> dict[str, str]:
    """Return the environment for child processes: our sources first on the path, then carried packages."""
    packages = [str(wheel.with_suffix("")) for wheel in sorted(carried.glob("*.whl"))]
    paths = [str(ROOT / "src"), str(ROOT), *packages, os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }


def prepare(carried: Path = CARRIED) -> list[str]:
    """Restore links, packages and the extension; return messages about failures, which are no reason to stop."""
    for room in ROOMS:
        link = ROOT / "src/penstock" / room
        if not link.exists():  # archives may drop symlinks
            link.symlink_to(f"../../{room}")
    return [*unpack(carried), *extend(carried)]


def unpack(carried: Path) -> list[str]:
    """Unpack wheels that this Python lacks, without an installer. A folder appears whole and then stays, because another
    ladder on this machine may use it."""
    problems = []
    for wheel in sorted(carried.glob("*.whl")):
        name, _, python, abi, _ = re.fullmatch(r"(.+?)-(.+?)-(?:\d[^-]*-)?([^-]+)-([^-]+)-([^-]+)\.whl", wheel.name).groups()  # type: ignore[union-attr]  # fmt: skip
        goal = wheel.with_suffix("")
        if is_installed(name) or goal.exists():
            continue
        if abi not in ("none", "abi3") and python != f"cp{sys.version_info[0]}{sys.version_info[1]}":
            problems.append(f"{wheel.name} is not for Python {sys.version_info[0]}.{sys.version_info[1]}")
            continue
        with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=carried) as folder:
            archive.extractall(f"{folder}/whole")
            with contextlib.suppress(OSError):  # another ladder was first
                Path(folder, "whole").rename(goal)
    return problems


def is_installed(name: str) -> bool:
    return any(importlib.metadata.distributions(name=name))


def extend(carried: Path) -> list[str]:
    """Provide penstock._csrc: the existing one, a carried one if built from these sources, or a new build."""
    ready = carried / carried_name()
    if not _can_import(carried) and ready.exists():
        fresh = Path(shutil.copy(ready, EXTENSION.with_suffix(f".{os.getpid()}")))
        fresh.replace(EXTENSION)  # the present file may be loaded
    if _can_import(carried):
        return []
    print("building penstock._csrc: half a minute, which the one of .whl/ saves", flush=True)
    command = [sys.executable, str(ROOT / "csrc/build.py")]
    built = subprocess.run(command, env=environment(carried), capture_output=True, text=True)
    if built.returncode == 0 and _can_import(carried):
        return []
    reason = built.stderr.strip() or "it was built and cannot be imported"
    return [f"penstock._csrc cannot be had here: {reason[-400:]}"]


def _can_import(carried: Path) -> bool:
    """Tell whether the extension is newer than its sources and can be imported."""
    if not EXTENSION.exists() or EXTENSION.stat().st_mtime < max(path.stat().st_mtime for path in _sources()):
        return False
    command = [sys.executable, "-c", "import penstock._csrc"]
    return subprocess.run(command, env=environment(carried), capture_output=True).returncode == 0


def _sources() -> list[Path]:
    return sorted(path for path in (ROOT / "csrc").iterdir() if path.suffix in (".c", ".h", ".py"))


def carried_name() -> str:
    """Return the extension's name among the wheels. It uses the stable ABI, so one file serves every Python."""
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(path.name.encode() + path.read_bytes())
    return f"_csrc-{digest.hexdigest()[:16]}.abi3.so"


def download(carried: Path = CARRIED) -> None:
    """Download the packages for `make gpu-wheels`, in constraints.txt's versions, for the machines' Python."""
    shutil.rmtree(carried, ignore_errors=True)
    carried.mkdir()
    platforms = [*(f"manylinux_2_{minor}_x86_64" for minor in GLIBC), *OLD_NAMES]
    words = f"-m pip download -q --no-deps --only-binary=:all: --python-version {PYTHON} --implementation cp".split()
    words += ["--dest", str(carried), *(f"--platform={each}" for each in platforms)]
    subprocess.run([sys.executable, *words, *pinned(PACKAGES)], check=True)
    shutil.copy(EXTENSION, carried / carried_name())
    size = sum(path.stat().st_size for path in carried.iterdir())
    print(f"{carried.name}: {len(PACKAGES)} wheels and the extension, {size / 2**20:.1f} of {MAX_BYTES >> 20} MiB")
    if size > MAX_BYTES:
        raise SystemExit(f"{carried.name}: {size} bytes; at most {MAX_BYTES} can be carried")


def pinned(names: tuple[str, ...]) -> list[str]:
    """Return name==version of each package, as pinned in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    versions = {line.partition("==")[0].lower(): line for line in lines if "==" in line}
    return [versions[name.lower()] for name in names]


if __name__ == "__main__":
    download()
