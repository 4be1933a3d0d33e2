"""One engine, one offline workload, one JSON line: what `peers.py` runs in a fresh process for each side.

The same file runs under Penstock's interpreter and under the peer's (vLLM), so both get the same prompts, the
same sampling and the same clock. It imports nothing of Penstock unless that is the engine asked for.

    python benchmarks/offline_job.py '{"engine": "penstock", "model": "…", "num_prompts": 8, …}'
"""

import json
import random
import sys
import time
from typing import Any

Generate = Any  # (prompts, max_tokens) -> number of tokens generated


def penstock(job: dict[str, Any]) -> Generate:
    from penstock import LLM, SamplingParams

    llm = LLM(job["model"], skip_tokenizer=True, **job["options"])

    def generate(prompts: list[list[int]], max_tokens: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        results = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(result.outputs[0].token_ids) for result in results)

    return generate


def vllm(job: dict[str, Any]) -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(job["model"], skip_tokenizer_init=True, **job["options"])

    def generate(prompts: list[list[int]], max_tokens: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(result.outputs[0].token_ids) for result in results)

    return generate


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Load, warm up with the same shapes, then time. Every batch has fresh prompts: no prefix cache can help."""
    started = time.perf_counter()
    generate = {"penstock": penstock, "vllm": vllm}[job["engine"]](job)
    load_s = time.perf_counter() - started
    rng = random.Random(0)

    def timed(max_tokens: int) -> float:
        vocabulary = range(100, job["vocab_size"])
        prompts = [rng.choices(vocabulary, k=job["input_len"]) for _ in range(job["num_prompts"])]
        started = time.perf_counter()
        num_tokens = generate(prompts, max_tokens)
        elapsed_s = time.perf_counter() - started
        assert num_tokens == max_tokens * job["num_prompts"], num_tokens
        return elapsed_s

    for _ in range(job["warmups"]):
        timed(job["output_len"])
    # The first token alone as well: the difference is what decoding takes.
    first_s, whole_s = [], []
    for _ in range(job["iterations"]):
        if job["output_len"] > 1:
            first_s.append(timed(1))
        whole_s.append(timed(job["output_len"]))
    return {"load_s": load_s, "first_s": first_s, "whole_s": whole_s}


if __name__ == "__main__":
    answer = run(json.loads(sys.argv[1]))
    print("\n" + json.dumps(answer), flush=True)
