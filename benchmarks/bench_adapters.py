"""What adapters cost: 16 requests decode together, with 8 adapters among them and with none, in turn in one engine.

    python benchmarks/bench_adapters.py [--rank 16] [--rounds 5] [--tokens 64] [--cpu-time]

--cpu-time is for a busy machine, with OMP_NUM_THREADS=1.
The adapters are random, for all seven projections of every layer of the default model, in bfloat16.
"""

import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pairs import compare, main
from safetensors.torch import save_file

from penstock import LLM, LoRARequest, SamplingParams

ADAPTERS, REQUESTS = 8, 16


def write_adapter(folder: Path, rank: int, seed: int, llm: LLM) -> Path:
    made = torch.Generator().manual_seed(seed)
    model = llm._running().executor._rank._loaded.model  # type: ignore[union-attr,attr-defined]
    products = llm._running().executor._rank.adapters._products  # type: ignore[attr-defined]
    assert len(products) == len(model.adapted)
    tensors = {}
    for product in products:
        for name, rows in zip(product.names, product.rows, strict=True):
            sizes = {"A": (rank, product.columns), "B": (rows, rank)}
            for factor, size in sizes.items():
                numbers = 0.02 * torch.randn(size, generator=made)
                tensors[f"base_model.model.{name}.lora_{factor}.weight"] = numbers.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}))
    return folder


def run(rank: int = 16, rounds: int = 5, tokens: int = 64, cpu_time: bool = False) -> dict[str, Any]:
    clock = time.process_time if cpu_time else time.perf_counter
    options = {"enable_prefix_caching": False, "kv_cache_bytes": 2**27, "max_model_len": 1024}
    with tempfile.TemporaryDirectory() as root, LLM(enable_lora=True, max_lora_rank=256, **options) as llm:
        paths = [write_adapter(Path(root) / str(seed), rank, seed, llm) for seed in range(ADAPTERS)]
        requests = [LoRARequest(str(seed), 1, str(path)) for seed, path in enumerate(paths)]
        prompts = [[100 + index] * 16 for index in range(REQUESTS)]
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)

        def rate(asked: list[LoRARequest | None]) -> float:
            """Tokens in a second of the clock, or of the processors' time: with one thread, that stands on a busy machine."""
            started_s = clock()
            llm.generate(prompts, params, use_tqdm=False, lora_request=asked)
            return REQUESTS * tokens / (clock() - started_s)

        plain: list[LoRARequest | None] = [None] * REQUESTS
        adapted: list[LoRARequest | None] = [requests[index % ADAPTERS] for index in range(REQUESTS)]
        for asked in (plain, adapted):  # threads, pages
            rate(asked)
        sides = {"adapters": partial(rate, adapted), "base": partial(rate, plain)}
        return compare("16 rows", sides, rounds, "tokens/s")


if __name__ == "__main__":
    main(__doc__, "adapters", run)
