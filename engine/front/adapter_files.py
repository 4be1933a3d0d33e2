"""Reads an adapter's files in a thread before the engine core does.

A file on a hung mount then blocks that thread alone and not the core's, which has every request to serve; the core finds
the content in the page cache. `AsyncEngine.load_adapter` calls this.
"""

import asyncio
import threading
import time
from pathlib import Path

from penstock.executor.protocol import AdapterError
from penstock.executor.regular_files import open_regular

STALL_S = 30.0  # without a byte for this long, the folder is refused
FILES = ("adapter_config.json", "adapter_model.safetensors")
CHUNK_BYTES = 4 * 2**20
POLL_S = 0.005


async def read_ahead(folder: str, stall_s: float = STALL_S) -> None:
    """Read every adapter file in `folder` once. AdapterError: a file cannot be read, or reading it makes no progress."""
    reader = _Reader(Path(folder))
    reader.start()
    while reader.is_alive():
        if time.monotonic() - reader.progress_s > stall_s:
            raise AdapterError(f"{folder}: reading {reader.reading} has made no progress for {stall_s:g} s")
        await asyncio.sleep(POLL_S)
    if reader.error is not None:
        raise AdapterError(f"{reader.error.filename or folder}: {reader.error.strerror or reader.error}")


class _Reader(threading.Thread):
    """A daemon thread, because one that hangs in the kernel must not keep the process from ending."""

    def __init__(self, folder: Path) -> None:
        super().__init__(name="adapter files", daemon=True)
        self._folder = folder
        self.reading = ""
        self.progress_s = time.monotonic()
        self.error: OSError | None = None

    def run(self) -> None:
        try:
            for self.reading in FILES:
                path = self._folder / self.reading
                if not path.exists():  # the core says what is missing
                    continue
                with open_regular(path) as file:
                    while file.read(CHUNK_BYTES):
                        self.progress_s = time.monotonic()
        except OSError as error:
            self.error = error
