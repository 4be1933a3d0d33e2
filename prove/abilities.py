"""Detects a server's abilities with trial requests. What a server cannot do is skipped, and reported with the reason.

A field counts as supported when a request with it is answered and its effect is seen, unless it has no visible effect:
many servers accept unknown fields.
"""

import asyncio
import random
import secrets
from typing import Any

from .answers import AskResult
from .asker import CHAT_PATH, MESSAGES_PATH, PATH, RESPONSES_PATH, Asker
from .journal import Say
from .metrics import Metrics
from .options import ProveError
from .questions import RESET, TRIALS, WORDS, Abilities, as_prompt, in_form_of
from .schema import FORCED

APIS = {"chat": CHAT_PATH, "tools": CHAT_PATH, "responses": RESPONSES_PATH, "messages": MESSAGES_PATH}
TRIALS_AT_ONCE = 4
LEAST_BLOCK, MOST_BLOCK = 16, 128  # usual sizes, for servers that do not tell theirs


async def detect_abilities(asker: Asker, seed: int, say: Say) -> Abilities:
    """Detect the server's abilities; raise ProveError if it does not answer or completions do not work."""
    loop = asyncio.get_running_loop()
    status, models = await asker.fetch("GET", "/v1/models")
    where = f"{asker.client.target.host}:{asker.client.target.port}"
    if status != 200 or not isinstance(models, dict) or not models.get("data"):
        raise ProveError(f"url: {where}/v1/models answers {status or 'nothing'}; a list of models is expected")
    first, *others = models["data"]
    _, properties = await asker.fetch("GET", "/props")  # llama.cpp has the context of a slot there
    settings = (properties.get("default_generation_settings") or {}) if isinstance(properties, dict) else {}
    context = first.get("max_model_len") or settings.get("n_ctx") or 0
    abilities = Abilities(first["id"], block=first.get("block_size") or LEAST_BLOCK, context=context)
    abilities.note("context", context, "neither /v1/models nor /props has it")
    plain = {"model": abilities.model, "prompt": "On the river", "max_tokens": 4, "temperature": 0}
    begun_s = loop.time()
    answer = await asker.ask(plain)
    if not answer.is_done:
        raise ProveError(f"url: {PATH} is not answered: {answer.error or 'no end came'}")
    say(f"{where}: {abilities.model}; {loop.time() - begun_s:.1f} s for the first answer, of 4 tokens")
    begun_s = loop.time()
    await asker.ask({**plain, "prompt": " ".join(random.Random(seed).choices(WORDS, k=64)), "max_tokens": 24})
    abilities.answer_s = loop.time() - begun_s
    is_lenient = (await asker.ask({**plain, "there_is_no_such_field": 1})).is_done
    room = asyncio.Semaphore(TRIALS_AT_ONCE)

    async def trial(body: dict[str, Any], path: str = PATH) -> AskResult:
        async with room:
            return await asker.ask(body, path=path)

    answers = await asyncio.gather(*(trial({**plain, **fields}) for fields in TRIALS.values()))
    for name, answer in zip(TRIALS, answers, strict=True):
        choice = answer.first
        seen: dict[str, object] = {  # the other fields have no visible effect on every answer
            "n": len(answer.choices) == 2,
            "logprobs": any(choice.tops),
            "return_token_ids": choice.ids,
            "prompt_logprobs": choice.num_prompt,
            "structured_outputs": choice.text.isalpha() and choice.text.islower(),
            "response_format": choice.text.lstrip().startswith("{"),
        }
        abilities.note(name, answer.is_done and seen.get(name, True), answer.error[:80] or "no effect seen")
    bodies = {name: in_form_of(path, abilities.chat("Hello", 2)) for name, path in APIS.items()}
    bodies["tools"] |= FORCED["move_file"]
    answers = await asyncio.gather(*(trial(bodies[name], path) for name, path in APIS.items()))
    for name, answer in zip(APIS, answers, strict=True):
        abilities.note(
            name, answer.is_done and (answer.first.calls or name != "tools"), answer.error[:80] or "no effect seen"
        )
    apis = abilities.supported & {"responses", "messages"}
    abilities.note("another API", apis, "neither /v1/responses nor /v1/messages")
    abilities.note(RESET, await asker.reset() == 200, "there is no /reset_prefix_cache")
    abilities.adapters = [model["id"] for model in others if model.get("parent")]
    abilities.note("adapter", abilities.adapters, "/v1/models lists none")
    await _choose_material(asker, abilities, seed)
    num_cached = await _detect_reuse(asker, abilities, is_lenient)
    # Whole blocks are cached: the largest power of two in their number is the size of a block, or a multiple of it.
    block = min(MOST_BLOCK, num_cached & -num_cached)
    if "ids" in abilities.supported and not first.get("block_size") and block > abilities.block:
        abilities.block = block
        await _choose_material(asker, abilities, seed)
    return abilities


async def _detect_reuse(asker: Asker, abilities: Abilities, is_lenient: bool) -> int:
    """Detect whether cache salts separate cached blocks, which only shows on servers that count cached tokens. Return
    the number of cached tokens of a prompt that was sent before.

    Behind a router with prefill servers, even a new prompt has cached tokens: its blocks come from there.
    """
    new = random.SystemRandom().sample(abilities.material, min(abilities.longest, len(abilities.material)))
    body = {"model": abilities.model, "prompt": as_prompt(new), "max_tokens": 1, "temperature": 0}
    salts = [secrets.token_hex(4)] * 2 + [secrets.token_hex(4)]
    first, again, other = [(await asker.ask({**body, "cache_salt": salt})).num_cached for salt in salts]
    if "cache_salt" in abilities.supported and is_lenient and (not again or other):
        abilities.supported.discard("cache_salt")
        abilities.skipped.append("cache_salt: accepted like any unknown field, without a visible effect")
        if again and (await asker.ask({**body, "cache_prompt": False})).num_cached == 0:  # llama.cpp's name
            abilities.supported.add("cache_prompt")
    if not abilities.fresh("") and RESET not in abilities.supported:
        abilities.skipped.append(
            "without reuse: no field is known that disables it; requests sent alone may reuse cached blocks too"
        )
    if not again:  # not even under one salt
        first, again = [(await asker.ask(body)).num_cached for _ in range(2)]
    uncounted = "not counted, or counted also for prompts that cannot have been cached"
    abilities.note("cached_tokens", again and not first, uncounted)
    return again or 0


async def _choose_material(asker: Asker, abilities: Abilities, seed: int) -> None:
    """Make the text that prompts are cut from, as token ids where the server has /tokenize and accepts ids."""
    # Twelve blocks, fewer of large blocks; the rest of the context is for the answer.
    abilities.longest = min(12 * abilities.block, max(192, 6 * abilities.block), (abilities.context or 4096) - 64)
    words = random.Random(seed).choices(WORDS, k=6 * abilities.longest)
    ids: list[int] = []
    for first in range(0, len(words), abilities.longest // 4):  # keeps each text shorter than the longest prompt
        text = " ".join(words[first : first + abilities.longest // 4])
        for name in ("prompt", "content"):  # servers differ in the name, and may refuse a body with both
            status, reply = await asker.fetch("POST", "/tokenize", {"model": abilities.model, name: text})
            if status == 200 and isinstance(reply, dict) and reply.get("tokens"):
                ids += reply["tokens"]
                break
    trial = {"model": abilities.model, "prompt": ids[:3], "max_tokens": 1, "temperature": 0}
    if ids and (await asker.ask(trial)).is_done:
        abilities.material = ids
        abilities.supported.add("ids")
        return
    abilities.material = words
    abilities.longest //= 4  # words may have several tokens
    abilities.skipped.append("ids: prompts are text, so cuts do not meet the borders of blocks")


async def read_metrics(asker: Asker) -> Metrics:
    """Return the server's metrics, none if it does not answer or has no such page."""
    status, text = await asker.fetch("GET", "/metrics")
    return Metrics.of(text if status == 200 and isinstance(text, str) else "")
