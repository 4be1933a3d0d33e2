"""One engine in a process of its own, asked by `peers.py` to run one batch after the other.

The same file runs under Penstock's interpreter and under the peer's (vLLM), so both get the same prompts, the same
sampling and the same clock. Its argument is a job as JSON; a question is a number of tokens to generate for each prompt
of a batch, the answer the seconds that it took.
"""

import json
import random
import sys
import time
from typing import Any

from pairs import answer_questions

FIRST_ID = 100  # the lowest ids are often special tokens


class Engine:
    def __init__(self, job: dict[str, Any]) -> None:
        self._job, self._rng = job, random.Random(0)
        started = time.perf_counter()
        if job["engine"] == "penstock":
            import penstock as engine

            self._llm = engine.LLM(job["model"], skip_tokenizer=True, **job["options"])
        else:
            import vllm as engine  # type: ignore[import-not-found, no-redef]

            self._llm = engine.LLM(job["model"], skip_tokenizer_init=True, **job["options"])
        self._params = engine.SamplingParams
        self.load_s = time.perf_counter() - started

    def run(self, max_tokens: int) -> float:
        """Fresh prompts every time: no prefix cache can help."""
        job, vocabulary = self._job, range(FIRST_ID, self._job["vocab_size"])
        prompts: list[Any] = [self._rng.choices(vocabulary, k=job["input_len"]) for _ in range(job["num_prompts"])]
        if job["engine"] == "vllm":
            prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = self._params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        results = self._llm.generate(prompts, params, use_tqdm=False)
        elapsed_s = time.perf_counter() - started
        num_tokens = sum(len(result.outputs[0].token_ids) for result in results)
        assert num_tokens == max_tokens * job["num_prompts"], f"{num_tokens} tokens were generated"
        return elapsed_s


if __name__ == "__main__":
    asked = Engine(json.loads(sys.argv[1]))
    answer_questions(asked.run, asked.load_s)
