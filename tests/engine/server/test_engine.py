"""The server over the real engine core, with the oracle executor: what the fake cannot show."""

import httpx
import pytest

from penstock.engine.config import SchedulerConfig
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


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks(server: Running, stream: bool) -> None:
    server.leave(num_open=4, prompt="x", max_tokens=3999, n=4, stream=stream)
    until(lambda: num_open(server) == 0)
    server.complete(max_tokens=1)  # brings fresh numbers along
    until(lambda: server.call(lambda: server.engine.stats.num_used_blocks) == 0)


def test_more_than_the_queue_holds_is_refused_with_a_time() -> None:
    with running(
        oracle_engine(max_model_len=4000, scheduler=SchedulerConfig(max_num_seqs=2, max_queued_requests=2))
    ) as server:
        body = {"prompt": ["a"] * 3, "max_tokens": 3999, "stream": True}
        with httpx.Client() as client, client.stream("POST", f"{server.url}/v1/completions", json=body):
            until(lambda: num_open(server) == 3)
            answer = server.complete(["a"] * 2, max_tokens=5)
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
        until(lambda: num_open(server) == 0)
        assert server.complete(["a"] * 4, max_tokens=5).status_code == 200
        answer = server.complete(["a"] * 5, max_tokens=5)  # no time makes room for it
        assert answer.status_code == 400 and "this server allows 4 at a time" in answer.json()["error"]["message"]


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
