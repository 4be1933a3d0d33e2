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
    reader = _Reader(Path(folder))
    reader.start()
    while reader.is_alive():
        if time.monotonic() - reader.progress_s > stall_s:
            raise AdapterError(f"{folder}: reading {reader.reading} has made no progress for {stall_s:g} s")
        await asyncio.sleep(POLL_S)
    if reader.error is not None:
        raise AdapterError(f"{reader.error.filename or folder}: {reader.error.strerror or reader.error}")


class _Reader(threading.Thread):
    """A daemon thread, so that reading that hangs in the kernel does not prevent the process from ending."""

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
                if path.exists():  # the core reports missing files
                    with open_regular(path) as file:
                        while file.read(CHUNK_BYTES):
                            self.progress_s = time.monotonic()
        except OSError as error:
            self.error = error
