"""Cases of reuse, batching and context: the server's answer without reuse is the reference."""

from dataclasses import replace

from .answers import AskResult
from .cases import CaseRun
from .schema import FORMATTED, SCHEMA, errors_of

CONTEXT_TOKENS = 8  # generated after a full context
LONG_TOKENS, STEP_TOKENS = 128, 24  # of an answer whose numbers are computed again, at every so many tokens


async def vllm_55766(run: CaseRun) -> None:
    end = 3 * run.block
    root = run.draw(end + 10)
    await run.ask(run.body(root[:end]))
    for past in range(4, 11):
        await run.ask_reused(root[: end + past], end + past, f"hit, {past} tokens past a block")


async def one_token_differs(run: CaseRun) -> None:
    root = run.draw(3 * run.block + 3)
    await run.ask(run.body(root))
    for at in (0, run.block - 1, run.block, 2 * run.block + 5):
        other = [*root[:at], *run.draw(1, unlike=root[at]), *root[at + 1 :]]
        await run.ask_reused(other, at, f"token {at} differs from a cached prompt")


async def nano_vllm_144(run: CaseRun) -> None:
    root = run.draw(4 * run.block)
    await run.ask_reused(root, 0, "first")
    answer = await run.ask_reused(root, len(root), "again")
    for other in await run.ask_together([run.body(root)] * 4):
        run.expect_same(answer, other, "four at once")


async def vllm_45238(run: CaseRun) -> None:
    hits = {}
    for shift in (0, 20, 50, 100):
        shared = run.abilities.longest - run.block - shift
        if shared < 4 * run.block:
            continue
        root, tail = run.draw(shared), run.draw(run.block)
        await run.ask(run.body(root + tail, 1))
        hits[shared] = 0
        # A server that keeps recurrent states may learn from the second prompt alone where prompts differ.
        for which in ("second", "third"):
            if not hits[shared]:
                other = run.draw(run.block, unlike=tail[0])
                answer = await run.ask_reused(root + other, shared, f"{shared} tokens shared, {which} prompt")
                hits[shared] = answer.num_cached or 0
    missed = [shared for shared, cached in hits.items() if not cached]
    run.expect(not missed, "reuse", f"tokens reused of a shared prefix, by its length: {hits}")


async def vllm_50702(run: CaseRun) -> None:
    fields = {"response_format": FORMATTED, "logprobs": None}
    bodies = [run.body(run.draw(run.abilities.longest - index), 32, **fields) for index in range(5)]
    references = [await run.ask_fresh(body) for body in bodies]
    for reference, answer in zip(references * 2, await run.ask_together(bodies * 2), strict=True):
        run.expect_same(reference, answer, "beside others")
        if answer.first.finish == "stop":
            wrong = errors_of(answer.first.text, SCHEMA)
            run.expect(not wrong, "schema", f"{wrong}: {answer.first.text!r}")


async def vllm_53912(run: CaseRun) -> None:
    phrase = run.draw(run.block // 2 + 1)
    root = (phrase * 12)[: 4 * run.block]
    await run.ask(run.body(root))
    for end in (len(root) - 3, len(root), len(root) - run.block):
        await run.ask_reused(root[:end], end, "a repetitive prompt, cached", max_tokens=24)


async def llamacpp_n_then_reuse(run: CaseRun) -> None:
    root = run.draw(3 * run.block + 5)
    many = await run.ask_together([run.body(root, n=3), run.body(root), run.body(root, n=2)])
    single = await run.ask_reused(root, len(root), "after n > 1")
    for answer in many:
        run.expect_same(single, answer, "n > 1")
    await run.ask_reused(root + run.draw(3), len(root), "longer, after n > 1")


async def trtllm_18156(run: CaseRun) -> None:
    root = run.draw(4 * run.block + 3)
    first, again, other = [
        await run.ask(run.body(root, **run.proof.abilities.fresh(f"{run.proof.name}-{salt}"))) for salt in "aab"
    ]
    run.expect_same(first, again, "again under one salt")
    run.expect_same(first, other, "under another salt")
    if "cached_tokens" in run.abilities.supported:
        run.expect(again.num_cached, "reuse", "nothing is reused under a salt that was used before")
        run.expect(not other.num_cached, "foreign", f"{other.num_cached} cached tokens under a salt never used")


async def adapter_reuse(run: CaseRun) -> None:
    root, adapter = run.draw(4 * run.block + 3), run.abilities.adapters[0]
    await run.ask_reused(root, 0, "the base model")
    await run.ask_reused(root, 0, "the adapter, after the base model", model=adapter)
    await run.ask_reused(root, len(root), "the base model, after the adapter")


async def mini_sglang_142(run: CaseRun) -> None:
    root = run.draw(run.abilities.longest - run.block)
    bodies = [run.body(root[: len(root) - 7 * index], 64, stream=True) for index in range(4)]
    await run.ask_together(bodies, leave=(0.0, 0.01, 0.05, 0.2))
    await run.ask_together([run.body(run.draw(run.abilities.longest // 2), 1) for _ in range(4)])
    for index in range(4):
        end = len(root) - 7 * index
        await run.ask_reused(root[:end], end, "after cancelled requests")


async def stale_after_reset(run: CaseRun) -> None:
    body = run.body(run.draw(4 * run.block + 3))
    first = await run.ask(body)
    if await run.proof.asker.reset() != 200:  # blocks are in use
        return
    answer = await run.ask(body)
    run.expect_same(first, answer, "after a reset")
    if "cached_tokens" in run.abilities.supported:
        run.expect(not answer.num_cached, "foreign", f"{answer.num_cached} tokens cached after a reset")


async def neighbours(run: CaseRun) -> None:
    bodies = [run.body(run.draw(run.block + 3 * index)) for index in range(8)]
    references = [await run.ask_fresh(body) for body in bodies]
    fresh = [{**body, **await run.proof.fresh()} for body in bodies]
    for reference, answer in zip(references, await run.ask_together(fresh), strict=True):
        run.expect_same(reference, answer, "eight at once, without reuse")


async def sglang_35938(run: CaseRun) -> None:
    prompt = run.draw(run.block + 3)
    most = min(LONG_TOKENS, (run.abilities.context or 4096) - len(prompt))
    body = run.body(prompt, run.abilities.most_tokens or most)
    alone = await run.ask_fresh(body)
    for num_others in (1, 3, 7):
        others = [run.body(run.draw(run.block * (1 + index % 4) + index), 24) for index in range(num_others)]
        answer, *_ = await run.ask_together([{**body, **await run.proof.fresh()}, *others])
        run.expect_same(alone, answer, f"beside {num_others} others")
    decoded = alone.first
    for at in range(STEP_TOKENS - 1, len(decoded.ids) - 1, STEP_TOKENS):
        again = await run.ask_fresh(run.body([*prompt, *decoded.ids[:at]], 1))
        parts = {name: getattr(decoded, name)[at : at + 1] for name in ("ids", "tokens", "values", "tops")}
        choice = replace(decoded, **parts, text=again.first.text, finish=again.first.finish)
        token = AskResult(200, {0: choice}, is_done=alone.is_done)
        run.expect_same(
            token, again, f"token {len(prompt) + at}, decoded and computed from a prompt that ends before it"
        )


async def ollama_18107(run: CaseRun) -> None:
    length = run.abilities.context - CONTEXT_TOKENS
    prompt = run.draw(length)
    for end in (length // 4, length // 2, 3 * length // 4, length):
        grown = await run.ask(run.body(prompt[:end], CONTEXT_TOKENS))
        counted = grown.usage.get("prompt_tokens", end)
        run.expect(counted == end, "truncated", f"a prompt of {end} tokens counts as {counted}")
    whole = await run.ask_fresh(run.body(prompt, CONTEXT_TOKENS))
    run.expect_same(whole, grown, f"a context of {length} tokens, grown by turns")
    other = await run.ask_fresh(run.body(run.draw(8) + prompt[8:], CONTEXT_TOKENS))
    if whole.is_done and other.is_done and any(whole.first.tops):
        is_read = (whole.first.tokens, whole.first.values) != (other.first.tokens, other.first.values)
        run.expect(is_read, "truncated", "the beginning of a full context has no effect on the answer")
    over = await run.proof.asker.ask(run.body([*prompt, *run.draw(2 * CONTEXT_TOKENS)], CONTEXT_TOKENS))
    run.expect(not over.is_done, "truncated", f"a prompt of {length + 2 * CONTEXT_TOKENS} tokens is answered")
