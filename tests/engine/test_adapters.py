"""Adapters in the core and in the offline API, over the oracle: whose blocks are whose, how many run, and how they go."""

from pathlib import Path
from typing import Any

import pytest

from penstock import LoRARequest, SamplingParams
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.messages import UnloadAdapter
from penstock.executor.protocol import AdapterError
from tests.support.oracle import content_folder
from tests.support.oracle_engine import oracle_llm
from tests.support.simulation import CoreRig, alone, serve, submit

PROMPT = list(range(40))


class Rig(CoreRig):
    """A core that takes adapters, with room for everything that these tests ask for."""

    def __init__(self, max_loras: int = 2, patience_s: float = 1000.0, num_host_blocks: int = 0) -> None:
        options = {"enable_lora": True, "max_loras": max_loras}
        sizes: dict[str, Any] = {"num_blocks": 2048, "max_num_batched_tokens": 2048, "max_model_len": 2048}
        super().__init__(**sizes, patience_s=patience_s, num_host_blocks=num_host_blocks, options=options)

    def load(self, tmp_path: Path, names: str = "a") -> list[str]:
        """Load an adapter of each name, and return their keys."""
        return [self.core.load_adapter(content_folder(tmp_path, name)).key for name in names]

    def ask(self, name: str, adapter: str | None, max_tokens: int = 6) -> None:
        self.submit(submit(name, PROMPT, max_tokens, adapter=adapter))


def answer(adapter: str | None, weights: str | None = None) -> list[int]:
    """Return the answer that no other request, adapter or weights can have changed."""
    message = submit("alone", PROMPT, max_tokens=6, adapter=adapter)
    return alone(message, max_model_len=2048, weights=weights)[0]


@pytest.mark.parametrize("num_host_blocks", [0, 16], ids=["device", "with a tier"])
def test_requests_never_read_blocks_of_other_adapters_or_weights(tmp_path: Path, num_host_blocks: int) -> None:
    rig = Rig(num_host_blocks=num_host_blocks)
    keys = [None, *rig.load(tmp_path, "ab")]
    for weights in [None, content_folder(tmp_path, "first"), content_folder(tmp_path, "second")]:
        if weights is not None:
            rig.core.pauses.drain()
            rig.core.pauses.update_weights(weights)
        for num_cached in (0, len(PROMPT) - 1):
            for index, key in enumerate(keys):
                rig.ask(str(index), key)
            rig.run()
            for index, key in enumerate(keys):
                assert rig.tokens(str(index)) == answer(key, weights) and rig.num_cached(str(index)) == num_cached


def test_an_adapter_that_is_unloaded_goes_with_the_last_request_that_has_it(tmp_path: Path) -> None:
    rig = Rig()
    (key,) = rig.load(tmp_path)
    rig.ask("running", key, max_tokens=20)
    rig.step()
    rig.ask("waiting", key)
    rig.core.unload_adapter(key)
    assert key in rig.executor._adapters
    rig.run()
    assert rig.tokens("waiting") == answer(key) == rig.tokens("running")[:6] and len(rig.tokens("running")) == 20
    assert key not in rig.executor._adapters


def test_requests_that_wait_for_the_end_of_a_pause_keep_their_adapter(tmp_path: Path) -> None:
    rig = Rig()
    (key,) = rig.load(tmp_path)
    rig.ask("alone", key)
    rig.run()
    rig.ask("long", None, max_tokens=30)
    rig.core.pauses.pause("wait")
    rig.ask("late", key)
    rig.core.unload_adapter(key)
    while not rig.core.pauses.is_paused:
        rig.step()
    assert not rig.outputs["late"]
    assert key in rig.executor._adapters and rig.core.pauses.is_paused
    rig.core.pauses.resume()
    rig.run()
    assert rig.tokens("late") == rig.tokens("alone") and key not in rig.executor._adapters
    rig.load(tmp_path)  # one that waits may also leave
    rig.ask("long again", None, max_tokens=30)
    rig.core.pauses.pause("wait")
    rig.ask("left", key)
    rig.core.unload_adapter(key)
    rig.abort("left")
    assert key not in rig.executor._adapters, "before any further step"


def test_an_adapter_that_was_loaded_twice_is_unloaded_twice(tmp_path: Path) -> None:
    rig = Rig()
    (key,) = rig.load(tmp_path)
    assert rig.load(tmp_path) == [key]
    rig.core.unload_adapter(key)
    rig.ask("one", key)
    rig.run()
    assert rig.tokens("one") == answer(key)
    serve(rig.core, [UnloadAdapter(key)])
    assert key not in rig.executor._adapters


def test_requests_pass_others_whose_adapters_have_no_slot_yet(tmp_path: Path) -> None:
    """The oracle asserts the bound of every step."""
    rig = Rig(max_loras=2)
    keys = rig.load(tmp_path, "abcd")
    for index in range(12):
        rig.ask(str(index), keys[index % 4], max_tokens=3 + index % 4)
    rig.ask("base", None)
    rig.step()
    running = {request.message.adapter for request in rig.core.scheduler.running}
    assert running == {*keys[:2], None}, "those behind the ones that lack a place were admitted"
    assert rig.core.stats().adapters == [sorted(keys[:2]), sorted(keys[2:])]
    assert rig.core.stats(with_tiers=False).adapters == []
    rig.run()
    for index in range(12):
        assert rig.tokens(str(index))[:3] == answer(keys[index % 4])[:3]


def test_a_request_that_waits_too_long_for_a_place_lets_nobody_pass(tmp_path: Path) -> None:
    rig = Rig(max_loras=1, patience_s=5.0)
    keys = rig.load(tmp_path, "ab")
    rig.ask("first", keys[0])
    rig.step()
    rig.ask("other", keys[1])
    ended = False
    for turn in range(60):
        rig.ask(f"again {turn}", keys[0])
        rig.step()
        ended = ended or any(output.finish_reason for output in rig.outputs["other"])
    assert ended, "an endless stream of requests for another adapter keeps it out"


def test_without_enable_lora_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="enable_lora: not given"):
        CoreRig().core.load_adapter(content_folder(tmp_path, "a"))


def test_the_offline_api_takes_an_adapter_for_all_or_for_each(folder: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, detokenize=False)
    a, b = (LoRARequest(name, 1, content_folder(tmp_path, name)) for name in "ab")
    with oracle_llm(folder, enable_lora=True, max_cpu_loras=2, max_loras=2) as llm:

        def tokens(*adapters: LoRARequest | None) -> list[list[int]]:
            results = llm.generate([[1, 2, 3]] * len(adapters), params, use_tqdm=False, lora_request=adapters)
            return [each.outputs[0].token_ids for each in results]

        llm.generate([[1]], SamplingParams(stop_token_ids=[*range(50)]), use_tqdm=False)  # leaves a step in flight
        base, with_a, with_b = tokens(None, a, b)
        assert base != with_a != with_b != base
        assert tokens(a, a) == [with_a, with_a]
        both = llm.generate([[1, 2, 3], [1, 2, 3]], params, use_tqdm=False, lora_request=b)
        assert [each.outputs[0].token_ids for each in both] == [with_b, with_b]
        c = LoRARequest("c", 1, content_folder(tmp_path, "c"))
        assert tokens(c, b) == [*tokens(c), with_b], "a has made room"
        assert tokens(a, c)[0] == with_a
        Path(a.lora_path, "adapter_config.json").write_text("trained on")
        assert tokens(a) == [with_a], "read once"
        assert tokens(LoRARequest("a", 2, a.lora_path)) != [with_a], "another number reads the folder anew"
        with pytest.raises(InvalidRequest, match="3 adapters in one call; max_cpu_loras is 2"):
            tokens(a, b, c)
        with pytest.raises(InvalidRequest, match="1 given for 2 prompts"):
            llm.generate([[1], [2]], params, use_tqdm=False, lora_request=[a])
