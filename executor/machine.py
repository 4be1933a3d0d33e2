"""Determines how many cores (CPU affinity, control-group quotas) and how much memory this process may use.

A thread team that waits by spinning must not be larger than the quota: `docker run --cpus=2` on 64 cores leaves 64
cores in the affinity mask, and the kernel throttles all 64 threads once they have used two cores' share of the time.
Imports no torch.
"""

import os
from collections.abc import Iterator
from math import floor
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores(root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> int:
    """Return the number of whole cores, at least one, that the affinity and all quotas above this process allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(floor(quota) for quota in _quotas(root, membership))]))


def _quotas(root: Path, membership: Path) -> Iterator[float]:
    """Yield the quotas, in cores, of the process's control group and of every group above it."""
    folders: tuple[Path, ...]
    lines = membership.read_text().splitlines() if membership.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2: one hierarchy
            folders, read = (root,), _quota_v2
        elif "cpu" in controllers.split(","):  # version 1: a hierarchy, mounted under all its controllers or one
            folders, read = (root / controllers, root / "cpu"), _quota_v1
        else:
            continue
        for folder in dict.fromkeys(folders):
            # A container sees its own group at the root of the mount, whatever its path is on the host.
            group = folder / path.lstrip("/")
            for each in (group, *group.parents[: len(group.parts) - len(folder.parts)]):
                quota = read(each)
                if quota is not None:
                    yield quota


def _quota_v2(group: Path) -> float | None:
    numbers = _numbers(group / "cpu.max")  # "max 100000", or "200000 100000"
    return numbers[0] / numbers[1] if len(numbers) == 2 else None


def _quota_v1(group: Path) -> float | None:
    quota, period = _numbers(group / "cpu.cfs_quota_us"), _numbers(group / "cpu.cfs_period_us")  # -1: no quota
    return quota[0] / period[0] if quota and period and quota[0] > 0 else None


def _numbers(path: Path) -> list[int]:
    """Return the numbers in a file; none if it is absent or says "max"."""
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []


def available_memory(group: Path | None = None) -> int:
    """Return the available bytes: the machine's or those of a control group (default: this process's), the smaller."""
    available = _table(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    group = _own_group() if group is None else group
    limit = group / "memory.max"
    if limit.is_file() and limit.read_text().strip() != "max":
        # The page cache counts as used but is reclaimable: a model just read from disk does not make the group full.
        stat = _table(group / "memory.stat")
        used = int((group / "memory.current").read_text()) - stat["active_file"] - stat["inactive_file"]
        available = min(available, int(limit.read_text()) - used)
    return max(0, available)


def _own_group() -> Path:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    return Path("/sys/fs/cgroup", *(line.removeprefix("0::/") for line in lines if line.startswith("0::/")))


def _table(path: Path) -> dict[str, int]:
    """Parse a file of the kernel with a name and a number per line."""
    return {name: int(value) for name, value, *_ in map(str.split, path.read_text().splitlines())}
