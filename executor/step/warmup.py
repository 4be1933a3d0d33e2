"""Artificial steps that run before the first request, so that no request waits for compiling or loading a kernel.

Kernel variants depend on dtypes, on the model and on sizes: rows, tokens and positions of a step. `tiles.sizes` returns
sizes that cover all variants, and there is an artificial request for every option. The steps run through a normal
runner that has its own slots, sampler and two KV blocks.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from penstock.executor.kernels.cuda.tiles import sizes
from penstock.executor.progress import quarters
from penstock.executor.protocol import Admission, ExecutorConfig, Row, Sampling, Step
from penstock.executor.step.runner import ModelRunner

KV_BLOCKS = 2  # every position of every artificial request is in block 0
GREEDY = Sampling(temperature=0.0)
SAMPLINGS = (
    GREEDY,
    Sampling(temperature=0.7, top_k=2, top_p=0.9, min_p=0.1),
    Sampling(temperature=0.0, logprobs=1),
    Sampling(temperature=0.0, repetition_penalty=1.1),
    Sampling(presence_penalty=0.1, frequency_penalty=0.1, logit_bias=((0, 1.0),), logprobs=1),
    Sampling(allowed_ids=(0, 1)),
    Sampling(banned_ids=(0,)),
    Sampling(min_tokens=2, stop_ids=(0,)),
)


class Share(NamedTuple):
    """The part of an artificial step that one request has: its last `num_tokens` positions."""

    num_tokens: int
    context: int
    sampling: Sampling = GREEDY
    pooling: Literal["last", "mean"] | None = None
    samples: bool = True
    is_masked: bool = False
    is_adapted: bool = False


def warm_up(
    runner: ModelRunner,
    config: ExecutorConfig,
    longest: int,
    vocab_size: int,
    progress: Callable[[str], None],
    adapter: str | None = None,
) -> None:
    """Run everything that requests of up to `longest` positions may need, also with the adapter of this key. Ranks run
    it in parallel."""
    planned = plan_steps(config.max_num_seqs, config.max_num_batched_tokens, longest)
    if adapter is not None:
        planned += plan_adapted_steps(config.max_num_seqs, config.max_num_batched_tokens, longest)
    for parts in quarters(planned, len(planned), "Warmed up by {} of {} steps", progress):
        run_step(runner, parts, longest, vocab_size, adapter)


def run_step(
    runner: ModelRunner, parts: list[Share], longest: int, vocab_size: int, adapter: str | None = None
) -> None:
    launched = runner.launch(_make_step(parts, longest, adapter, runner.draft_tokens))
    if launched.unsampled is not None:
        rows = np.array([row for row, part in enumerate(parts) if part.is_masked], dtype=np.int32)
        words = np.full((len(rows), -(-vocab_size // 32)), -1, dtype=np.int32)  # everything is allowed
        runner.sample_masked(launched, rows, words)
    runner.finish(launched)


def widest_step(max_rows: int, longest: int) -> list[Share]:
    """Return the single-token step that takes the most memory: the maximum number of rows, with block tables as wide as
    those of a graph. With fixed sums, attention's scratch memory grows with the product of both."""
    return [Share(1, longest), *[Share(1, 1)] * (max_rows - 1)]


def plan_steps(max_rows: int, max_tokens: int, longest: int) -> list[list[Share]]:
    """Return the steps, largest first, so that a lack of memory is detected before anything else takes time."""
    max_tokens = min(max_tokens, max_rows * longest)
    max_rows = min(max_rows, max_tokens)
    end, few = min(longest, max_tokens), min(longest, max_tokens, 2)
    everything = Sampling(temperature=0.0, prompt_logprobs=1)
    single = Share(1, 1)
    return [
        *(
            [Share(count, count, everything, "mean") for count in _split(tokens, longest)]
            for tokens in sizes(max_tokens)
        ),
        widest_step(max_rows, longest),
        [Share(end, longest)],
        [Share(count, count) for count in _split(max_tokens, -(-max_tokens // max_rows))],
        *([single] * rows for rows in sizes(max_rows)),
        *([Share(1, context)] for context in sizes(longest)),
        [Share(few, few, samples=False)],
        [Share(few, few, pooling="last")],
        [Share(few, few, pooling="mean")],
        *([single._replace(sampling=sampling)] for sampling in (*SAMPLINGS, Sampling(logprobs=-1))),
        [single._replace(sampling=SAMPLINGS[row % len(SAMPLINGS)]) for row in range(max_rows)],
        [single._replace(is_masked=True)],
        [single._replace(sampling=SAMPLINGS[row % len(SAMPLINGS)], is_masked=row % 3 > 0) for row in range(max_rows)],
    ]


def plan_adapted_steps(max_rows: int, max_tokens: int, longest: int) -> list[list[Share]]:
    """Return steps of every size that selects kernels, with an adapter in every row, because adapters replace fused
    kernels by others. Everything after the layers is the same as without adapters."""
    max_tokens = min(max_tokens, max_rows * longest)
    single = Share(1, 1, is_adapted=True)
    return [
        *([Share(n, n, is_adapted=True) for n in _split(tokens, longest)] for tokens in sizes(max_tokens)),
        *([single] * rows for rows in sizes(min(max_rows, max_tokens))),
    ]


def _split(total: int, most: int) -> list[int]:
    """Split `total` into parts of at most `most`."""
    return [min(most, total - first) for first in range(0, total, most)]


def _make_step(parts: list[Share], longest: int, adapter: str | None, draft_tokens: int) -> Step:
    admissions, rows = [], []
    for slot, part in enumerate(parts):
        # Every computed position has a next prompt token, unless the request would become too long.
        is_asked = part.sampling.prompt_logprobs is not None
        num_prompt = min(part.context + is_asked, longest)
        admissions.append(
            Admission(
                slot=slot,
                request_id=slot,
                tokens=bytes(4 * num_prompt),
                num_prompt=num_prompt,
                sampling=part.sampling,
                pooling=part.pooling,
                adapter=adapter if part.is_adapted else None,
            )
        )
        sample = part.samples and part.pooling is None
        drafts = min(draft_tokens, 1 + longest - part.context) if sample else 0
        start = part.context - part.num_tokens
        rows.append(Row(slot, start, part.num_tokens, sample, masked=part.is_masked, drafts=drafts))
    return Step(0, admissions, rows)
