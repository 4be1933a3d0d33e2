"""One engine in a process of its own, asked by `peers.py` to run one batch after the other.

The same file runs under Penstock's interpreter and under the peer's (vLLM), so both get the same prompts, the
same sampling and the same clock. It imports nothing of Penstock unless that is the engine asked for.

Its argument is a job as JSON; every line of its input is a number of tokens to generate for each prompt of a
batch, every line of its output that begins with `MARK` is an answer. Engines may print what they like.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

MARK = "=> "
FIRST_ID = 100  # the lowest ids are often special tokens

Generate = Callable[[list[list[int]], int], int]  # prompts, tokens for each → tokens generated


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


def serve(job: dict[str, Any]) -> None:
    started = time.perf_counter()
    generate = {"penstock": penstock, "vllm": vllm}[job["engine"]](job)
    answer(load_s=time.perf_counter() - started)
    rng = random.Random(0)
    for line in sys.stdin:
        max_tokens = int(line)
        # Fresh prompts every time: no prefix cache can help.
        vocabulary = range(FIRST_ID, job["vocab_size"])
        prompts = [rng.choices(vocabulary, k=job["input_len"]) for _ in range(job["num_prompts"])]
        started = time.perf_counter()
        num_tokens = generate(prompts, max_tokens)
        elapsed_s = time.perf_counter() - started
        assert num_tokens == max_tokens * job["num_prompts"], f"{num_tokens} tokens were generated"
        answer(elapsed_s=elapsed_s)


def answer(**fields: float) -> None:
    print(f"\n{MARK}{json.dumps(fields)}", flush=True)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
