"""One engine in its own process, which runs batches for `peers.py` or answers prompts for `bench_agreement.py`.

The same file runs under Penstock's interpreter and under the peer's (vLLM, llama.cpp's binding), so both get the same
prompts, the same sampling and the same clock. Its argument is a job as JSON. A question is [prompts, their length,
tokens to generate for each], or {"inputs": lengths of prompts, "outputs": of answers, "temperature": …}, both answered by
the seconds it took; or a list of prompts, answered by a list.
"""

import itertools
import json
import random
import sys
import time
from typing import Any

from pairs import answer_questions

FIRST_ID = 100  # the lowest ids are often special tokens
Ids = list[int]


class Engine:
    def __init__(self, job: dict[str, Any]) -> None:
        self._job, self._rng = job, random.Random(0)
        started = time.perf_counter()
        if job["engine"] == "penstock":
            import penstock as engine

            self._llm: Any = engine.LLM(job["model"], skip_tokenizer=True, **job["options"])
        else:
            import vllm as engine  # type: ignore[import-not-found, no-redef]

            self._llm = engine.LLM(job["model"], skip_tokenizer_init=True, **job["options"])
        self._params = engine.SamplingParams
        self.load_s = time.perf_counter() - started

    def __call__(self, question: Any) -> Any:
        if isinstance(question, dict):
            return self._seconds(**question)
        if isinstance(question[0], int):
            count, length, max_tokens = question
            return self._seconds([length] * count, [max_tokens] * count)
        return self._generate(
            question, [self._job["max_tokens"]] * len(question), stop_token_ids=self._job["ends"], ignore_eos=True
        )

    def _seconds(self, inputs: list[int], outputs: list[int], temperature: float = 0.0) -> float:
        """Return the seconds for fresh prompts of these lengths, so that no prefix cache can help."""
        vocabulary = range(FIRST_ID, self._job["vocab_size"])
        prompts = [self._rng.choices(vocabulary, k=length) for length in inputs]
        started = time.perf_counter()
        answers = self._generate(prompts, outputs, temperature=temperature, ignore_eos=True)
        elapsed_s = time.perf_counter() - started
        assert [len(answer) for answer in answers] == outputs, "an answer has not its length"
        return elapsed_s

    def _generate(self, prompts: list[Any], outputs: list[int], **options: Any) -> list[Ids]:
        if self._job["engine"] == "vllm":
            prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
        options = {"temperature": 0.0, "detokenize": False} | options
        params = [self._params(max_tokens=max_tokens, **options) for max_tokens in outputs]
        return [list(each.outputs[0].token_ids) for each in self._llm.generate(prompts, params, use_tqdm=False)]


def llama_cpp(job: dict[str, Any]) -> Any:
    """Run prompts one after another, with the library's own defaults."""
    import llama_cpp as library  # type: ignore[import-not-found]

    llm = library.Llama(job["model"], verbose=False, **job["options"])

    def answer(prompt: Ids) -> Ids:
        tokens = itertools.islice(llm.generate(prompt, temp=0.0, repeat_penalty=1.0), job["max_tokens"])
        found: Ids = []
        for token in tokens:
            found.append(token)
            if token in job["ends"]:
                break
        return found

    return lambda prompts: [answer(prompt) for prompt in prompts]


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    if job["engine"] == "llama.cpp":
        answer_questions(llama_cpp(job))
    else:
        asked = Engine(job)
        answer_questions(asked, asked.load_s)
