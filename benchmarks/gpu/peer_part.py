"""The same batch of requests through transformers' continuous batching, on weights of the same shape.

python -m benchmarks.gpu peer_part '{"model": "qwen3-0.6b", "device": "cuda", "tiny": false}'
"""

import json
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from benchmarks.gpu.figures import report
from benchmarks.gpu.model_part import prompts
from benchmarks.gpu.shapes import config_of


def main(job: dict[str, Any]) -> None:
    config = config_of(job["model"], job["tiny"])
    num, length, answer = (4, 24, 6) if job["tiny"] else (256, 1500, 150)
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        shape = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.device(job["device"]):
        model = transformers.AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, config["torch_dtype"]))
    model.eval()
    # No token ends an answer, so all are as long.
    asked = transformers.GenerationConfig(max_new_tokens=answer, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # On a CPU it would take nearly all memory; on a GPU it is left to find its own best settings.
    settings = {"num_blocks": 16, "max_batch_tokens": 64, "page_size": 16} if job["tiny"] else {}

    def generate(wanted: list[list[int]]) -> dict[str, Any]:
        answers: dict[str, Any] = model.generate_batch(
            wanted,
            generation_config=asked,
            continuous_batching_config=transformers.ContinuousBatchingConfig(**settings),
            persistent_manager=True,  # else every call would allocate its cache and capture its graphs again
        )
        return answers

    generate(prompts(config, 4, length, seed=1))
    wanted = prompts(config, num, length, seed=2)
    started_s = time.perf_counter()
    results = generate(wanted)
    seconds = time.perf_counter() - started_s
    lengths = [len(result.generated_tokens) for result in results.values()]
    if lengths != [answer] * num:
        raise SystemExit(f"transformers gave {len(lengths)} answers of {sorted(set(lengths))} tokens")
    report(
        "throughput of transformers",
        seconds=seconds,
        requests=num,
        input_len=length,
        output_len=answer,
        output_tokens_per_s=num * answer / seconds,
        total_tokens_per_s=num * (length + answer) / seconds,
    )
    os._exit(0)  # its manager's thread would keep the process
