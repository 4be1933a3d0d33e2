"""Determines how many cores (CPU affinity, control-group quotas) and how much memory this process may use.

A thread team that waits by spinning must not be larger than the quota: `docker run --cpus=2` on 64 cores leaves 64
cores in the affinity mask, and the kernel throttles all 64 threads once they have used two cores' share of the time.
Imports no torch.
"""

import os
import resource
from collections.abc import Iterator
from math import floor
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores(root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> int:
    """Return the number of whole cores, at least one, that the affinity and all quotas above this process allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (_quota(*found) for found in _groups("cpu", root, membership))
    return max(1, min([cores, *(floor(quota) for quota in quotas if quota is not None)]))


def available_memory(root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> int:
    """Return the available bytes: the least of the machine's and of what each limit above this process leaves."""
    machine = _table(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    left = (_memory_left(*found) for found in _groups("memory", root, membership))
    return max(0, min([machine, *(number for number in left if number is not None)]))


def address_space_left() -> int | None:
    """Return how many bytes this process may still map; None without a limit (RLIMIT_AS)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return max(0, limit - int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize())


def _groups(controller: str, root: Path, membership: Path) -> Iterator[tuple[Path, int]]:
    """Yield the process's control group and every group above it, each with the version of its hierarchy."""
    lines = membership.read_text().splitlines() if membership.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        folders = [root]  # version 2: one hierarchy
        if controller in controllers.split(","):  # version 1: a hierarchy, mounted under all its controllers or one
            folders = [*dict.fromkeys((root / controllers, root / controller))]
        elif controllers:
            continue
        for folder in folders:
            # A container sees its own group at the root of the mount, whatever its path is on the host.
            group = folder / path.lstrip("/")
            for each in (group, *group.parents[: len(group.parts) - len(folder.parts)]):
                yield each, 1 if controllers else 2


def _quota(group: Path, version: int) -> float | None:
    """Return a group's quota in cores."""
    if version == 2:
        values = _integers(group / "cpu.max")  # "max 100000", or "200000 100000"
    else:
        values = _integers(group / "cpu.cfs_quota_us") + _integers(group / "cpu.cfs_period_us")  # -1: no quota
    return values[0] / values[1] if len(values) == 2 and values[0] > 0 else None


def _memory_left(group: Path, version: int) -> int | None:
    """Return how many bytes a group may still take."""
    limit, current = (
        ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    values = _integers(group / limit) + _integers(group / current)
    if len(values) < 2:
        return None
    # The page cache counts as used but is reclaimable: a model just read from disk does not make the group full.
    stat, prefix = _table(group / "memory.stat"), "" if version == 2 else "total_"
    return values[0] - values[1] + stat[f"{prefix}active_file"] + stat[f"{prefix}inactive_file"]


def _integers(path: Path) -> list[int]:
    """Return the numbers in a file; none if it is absent or says "max"."""
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []


def _table(path: Path) -> dict[str, int]:
    """Parse a file of the kernel with a name and a number per line."""
    return {name: int(value) for name, value, *_ in map(str.split, path.read_text().splitlines())}
