"""How much main memory this process may still take. It imports no torch: the engine core's side of the ring asks, too."""

from pathlib import Path


def available_memory(group: Path | None = None) -> int:
    """In bytes: the machine's or its control group's (this process's, if none is given), whichever is less."""
    available = _table(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    group = _own_group() if group is None else group
    limit = group / "memory.max"
    if limit.is_file() and limit.read_text().strip() != "max":
        # Files in the page cache count as used, but make way: a model just read from disk must not fill the group.
        stat = _table(group / "memory.stat")
        used = int((group / "memory.current").read_text()) - stat["active_file"] - stat["inactive_file"]
        available = min(available, int(limit.read_text()) - used)
    return max(0, available)


def _own_group() -> Path:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    return Path("/sys/fs/cgroup", *(line.removeprefix("0::/") for line in lines if line.startswith("0::/")))


def _table(path: Path) -> dict[str, int]:
    """The kernel's tables: a name and a number per line."""
    return {name: int(value) for name, value, *_ in map(str.split, path.read_text().splitlines())}
