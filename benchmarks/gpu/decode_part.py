"""Decoding by models in their real shapes, with kernels launched as usual and with those that may start early; then what
a step's kernels take. No engine, no measuring of memory: the shortest way from nothing to a step's time.

    python -m benchmarks.gpu.decode_part '{"device": "cuda", "tiny": false, "models": ["qwen3-0.6b"]}'
"""

import gc
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from benchmarks.gpu import figures
from benchmarks.gpu.model_part import Bench
from benchmarks.gpu.shapes import config_of

from penstock.executor.protocol import ExecutorConfig
from penstock.executor.uniproc import UniprocExecutor

KV_BYTES = 40 << 30  # 256 requests of a Llama-3.1-8B at 1,100 positions; beside its weights an H100 holds that


def main(job: dict[str, Any]) -> None:
    figures.open_device(job)
    for model in job["models"]:
        for dependent in (False, True) if job["device"] == "cuda" else (False,):
            measure(model, job | {"dependent": dependent})
            gc.collect()
            if job["device"] == "cuda":
                torch.cuda.empty_cache()


def measure(model: str, job: dict[str, Any]) -> None:
    config = config_of(model, job["tiny"])
    figures.set_launch(job)
    started_s = time.monotonic()
    prefix = f"{model}, {'dependent' if job['dependent'] else 'usual'} launch: "
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        options = ExecutorConfig(
            model=folder,
            device=job["device"],
            load_format="dummy",
            max_model_len=min(8192, config["max_position_embeddings"]),
            max_num_seqs=8 if job["tiny"] else 256,
            kv_cache_bytes=2**22 if job["tiny"] else KV_BYTES,
        )
        executor = UniprocExecutor(options)
        figures.tell("startup", prefix, seconds=time.monotonic() - started_s, memory=executor.info.memory)
        Bench(executor, config, job | {"parts": ["decode", "profile"], "prefix": prefix}).run()
        executor.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
