"""Reads an adapter's files in a thread before the engine core does.

Files on a hung mount then block only this thread, not the core, which serves all requests; the core finds the content
in the page cache. `AsyncEngine.load_adapter` calls this.
"""

import asyncio
import threading
import time
from pathlib import Path

from penstock.executor.protocol import AdapterError
from penstock.executor.regular_files import open_regular

STALL_S = 30.0  # the folder is refused after this time without a byte
FILES = ("adapter_config.json", "adapter_model.safetensors")
CHUNK_BYTES = 4 * 2**20
POLL_S = 0.005


async def read_ahead(folder: str, stall_s: float = STALL_S) -> None:
    """Read every adapter file in `folder` once; raise AdapterError if one cannot be read, or reading makes no
    progress."""
    reading, progress_s, errors = "", time.monotonic(), list[OSError]()

    def read() -> None:
        nonlocal reading, progress_s
        try:
            for reading in FILES:
                path = Path(folder, reading)
                if path.exists():  # the core reports missing files
                    with open_regular(path) as file:
                        while file.read(CHUNK_BYTES):
                            progress_s = time.monotonic()
        except OSError as error:
            errors.append(error)

    # A daemon thread, so that reading that hangs in the kernel does not prevent the process from ending.
    thread = threading.Thread(target=read, name="adapter files", daemon=True)
    thread.start()
    while thread.is_alive():
        if time.monotonic() - progress_s > stall_s:
            raise AdapterError(f"{folder}: reading {reading} has made no progress for {stall_s:g} s")
        await asyncio.sleep(POLL_S)
    for error in errors:
        raise AdapterError(f"{error.filename or folder}: {error.strerror or error}")
