"""The first rung: describes the machine (device, versions, tools) and measures a read and a matrix product."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from typing import Any

import torch
from benchmarks.gpu.figures import Timer, ceilings, open_device, report
from benchmarks.gpu.machine import PACKAGES, is_installed
from benchmarks.gpu.memcheck_part import find_sanitizer

VERSIONS = ("torch", "triton", "transformers", "numpy", "pytest", *PACKAGES)


def main(job: dict[str, Any]) -> None:
    report("machine", python=platform.python_version(), cores=os.cpu_count(), glibc=platform.libc_ver()[1])
    report("versions", "", **{name: importlib.metadata.version(name) for name in VERSIONS if is_installed(name)})
    report("lacking", packages=[name for name in VERSIONS if not is_installed(name)], extension=extension())
    tools = ("nvcc", "ncu", "cc")
    report("tools", "", **{name: shutil.which(name) for name in tools}, sanitizer=find_sanitizer())
    device = open_device(job)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        report(
            "device",
            model=properties.name,
            capability=list(torch.cuda.get_device_capability(device)),
            processors=properties.multi_processor_count,
            gib=properties.total_memory / 2**30,
            cuda=torch.version.cuda,
            driver=driver(),
        )
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    ceilings(Timer(device, 3 if job["tiny"] else 30), device, dtype, job["tiny"])


def extension() -> str | None:
    """Return why our C extension cannot be imported, or None if it can."""
    try:
        import penstock._csrc  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


def driver() -> str | None:
    asked = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.max.sm,power.limit", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None
