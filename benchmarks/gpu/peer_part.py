"""The same batch of requests through transformers' continuous batching, on weights of the same shape.

python -m benchmarks.gpu peer_part '{"model": "qwen3-0.6b", "device": "cuda", "tiny": false}'
"""

import os
from typing import Any

import torch
import transformers
from benchmarks.gpu.model_part import throughput
from benchmarks.gpu.shapes import config_of, model_folder


def main(job: dict[str, Any]) -> None:
    config = config_of(job["model"], job["tiny"])
    with model_folder(config) as folder:
        shape = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.device(job["device"]):
        model = transformers.AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, config["torch_dtype"]))
    model.eval()
    # On a CPU it would take nearly all memory; on a GPU it is left to find its own best settings.
    settings = {"num_blocks": 16, "max_batch_tokens": 64, "page_size": 16} if job["tiny"] else {}

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[int]:
        # No token ends an answer, so all answers are equally long.
        asked = transformers.GenerationConfig(
            max_new_tokens=lengths[0], do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        answers = model.generate_batch(
            prompts,
            generation_config=asked,
            continuous_batching_config=transformers.ContinuousBatchingConfig(**settings),
            persistent_manager=True,  # else every call would allocate its cache and capture its graphs again
        )
        return [len(each.generated_tokens) for each in answers.values()]

    throughput("throughput of transformers", config, job["tiny"], generate)
    os._exit(0)  # the manager's thread would keep the process alive
