"""The server over the real engine core, with the oracle executor: what the fake cannot show."""

import pytest

from penstock.engine.sampling_params import SamplingParams
from tests.support.fake_engine import FakeEngine
from tests.support.oracle_engine import oracle_engine
from tests.support.running_server import Running, running, started, until

server = started(lambda: oracle_engine(max_model_len=4000))


def num_open(server: Running) -> int:
    return int(server.call(lambda: len(server.engine.answers)))


def test_one_small_request_of_many_prompts_checks_its_fields_once(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of thousands of ids, checked and sorted for each of a thousand prompts, would hold the loop for seconds."""
    checked: list[SamplingParams] = []
    check = SamplingParams.check

    def counted(params: SamplingParams, *given: int) -> None:
        checked.append(params)
        check(params, *given)

    monkeypatch.setattr(SamplingParams, "check", counted)
    lists = {"stop_token_ids": list(range(100)), "allowed_token_ids": list(range(100, 120))}
    answer = server.complete([[number] for number in range(100)], max_tokens=5, temperature=1, **lists).json()
    assert len(checked) <= 2  # once as a request, once by the engine
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(texts) == 100 and len(set(texts)) > 10, "each has a seed of its own"


def test_an_idle_server_resets_its_cache_and_a_busy_one_says_409(server: Running) -> None:
    def cached() -> int:
        usage = server.complete(list(range(40)), max_tokens=1).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert (cached(), cached()) == (0, 32)  # blocks of 16
    assert server.post("/reset_prefix_cache", {}).json() == {"status": "reset"}
    assert cached() == 0
    engine = FakeEngine()
    engine.hold = True
    with running(engine) as busy:
        generation = busy.call(lambda: engine.generate([1, 2, 3], SamplingParams(detokenize=False)))
        answer = busy.post("/reset_prefix_cache", {})
        assert answer.status_code == 409 and "try again" in answer.json()["error"]["message"]
        busy.call(generation.abort)
        until(lambda: len(engine.answers) == 0)
        assert busy.post("/reset_prefix_cache", {}).status_code == 200
