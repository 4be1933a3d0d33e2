"""LMCache's LocalDiskBackend behind two pipes, for bench_disk.py; runs under the interpreter that has LMCache.

    python disk_peer.py DIR CHUNK_BYTES RESIDENT FULL

For each line `N` on stdin it submits N batches of eight chunks and answers with the seconds of each on the calling
thread. Writing and unlinking files is left out, as it is on the other side; RESIDENT entries are there from the start,
and with FULL=1 every further one evicts.
"""

import asyncio
import json
import os
import sys
import threading
import time

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

BATCH = 8


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is not an answer
    folder, chunk_bytes, resident, full = sys.argv[1], *map(int, sys.argv[2:5])
    shape = torch.Size([2, 1, 256, chunk_bytes // 1024])
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=256,
        local_cpu=True,
        max_local_cpu_size=0.25,
        local_disk=f"file://{folder}/",
        max_local_disk_size=(resident if full else resident + 10**6) * chunk_bytes / 2**30,
        extra_config={"use_odirect": True},
    )
    metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.bfloat16, (1, 2, 256, 1, chunk_bytes // 1024))
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    memory = LocalCPUBackend(config, metadata=metadata, dst_device="cpu")
    disk = LocalDiskBackend(config, loop, memory, dst_device="cpu", metadata=metadata)
    disk.write_file = lambda buffer, path: None
    os.remove = lambda path: None
    chunks = [memory.allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD) for _ in range(BATCH)]
    size = chunks[0].get_physical_size()
    assert size == chunk_bytes, (size, chunk_bytes)
    for number in range(resident):
        disk.insert_key(key_of(number), size, shape, torch.bfloat16, MemoryFormat.KV_2LTD)
        disk.current_cache_size += size
    number = 10**9
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            keys = [key_of(number + at) for at in range(BATCH)]
            number += BATCH
            started_s = time.perf_counter()
            disk.batched_submit_put_task(keys, chunks)
            seconds.append(time.perf_counter() - started_s)
            while disk.disk_worker.put_tasks:
                time.sleep(0.0002)
        print(json.dumps(seconds), file=answers, flush=True)
    os._exit(0)


def key_of(number: int) -> CacheEngineKey:
    return CacheEngineKey("model", 1, 0, number, torch.bfloat16)


main()
