"""`penstock prove` finds every kind of fault in a server that has it, and none in one that has none."""

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock, call
from xml.etree import ElementTree

import pytest

from penstock import prove
from penstock.cache.tiers.index import TierIndex
from penstock.engine.core.tier_stats import Rates, tier_stats
from penstock.engine.messages import Stats
from penstock.engine.server.metrics import stats_families
from penstock.prove import abilities, proof, repeat, session
from penstock.prove.abilities import detect_abilities
from penstock.prove.answers import AskResult, TextChoice
from penstock.prove.asker import Asker
from penstock.prove.cases import Case, run_case
from penstock.prove.judge import allowed, compare
from penstock.prove.options import ProveError, ProveOptions, request_headers
from penstock.prove.own import faults
from penstock.prove.own import run as own_run
from penstock.prove.own import server as own_server
from penstock.prove.own.faults import FaultScene
from penstock.prove.own.server import WORLDS, OwnServer
from penstock.prove.proof import HELD, REACHED
from penstock.prove.questions import Abilities, Ask
from penstock.prove.report import exit_code
from penstock.prove.schema import errors_of
from tests.support import reference_server
from tests.support.programs import printed
from tests.support.reference_server import CONTEXT, DEFECTS, MODEL, ReferenceServer, write
from tests.support.refusals import cases, hardest
from tests.support.running_server import until

# Defects that only the load finds. The slow suite plants all.
FAST = ["full-pool", "finish-lost", "blocks-held"]
# A defect that each case finds, where it is another than positions that are shifted after a hit.
CULPRITS: list[tuple[str, str]] = cases(__file__, "culprits")


async def proven(server: ReferenceServer, **options: Any) -> dict[str, Any]:
    async with server as url:
        fast = {"requests": 200, "rate": 2000.0, "timeout": 60.0, "restart": reference_server.restart_command(url)}
        chosen = ProveOptions(**{**fast, **options})
        return await session.prove(url, "stand-in", chosen)


@pytest.fixture(autouse=True)
def is_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "SETTLE_S", 0.3)
    monkeypatch.setattr(faults, "STOPPED_S", 0.0)


@pytest.fixture
def load_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run no cases, which take most of the time."""
    monkeypatch.setattr(session, "CASES", {})


@pytest.mark.parametrize(
    ("name", "script", "signals", "broken", "health"), cases(__file__, "faults", signal=signal, resource=resource)
)
async def test_a_fault_does_as_it_is_named_and_says_what_it_breaks(
    name: str,
    script: str,
    signals: Any,
    broken: str,
    health: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, answers = OwnServer("uniproc", None, [], tmp_path), {("GET", "/health"): iter(health)}
    server.servers = [subprocess.Popen(["sh", "-c", script], start_new_session=True)]
    monkeypatch.setattr(faults, "UNHEALTHY_S", 0.3 if "/health" in broken else 60.0)
    monkeypatch.setattr(own_server, "END_S", 0.3 if "later" in broken else 60.0)
    monkeypatch.setattr(os, "kill", kill := Mock(wraps=os.kill))
    monkeypatch.setattr(resource, "prlimit", limit := Mock(return_value=(5, 9)))
    with contextlib.closing(server):
        until(lambda: bool(server.children()))
        (child,) = server.children()
        fetch = AsyncMock(side_effect=lambda *request: (next(answers[request]), b""))
        scene = FaultScene(server, Mock(fetch=fetch), random.Random(1))
        assert await faults.FAULTS[name].inject_into(scene) == broken.format(child=child)
        calls = [each.args for each in (*kill.mock_calls, *limit.mock_calls)]
    sent = {"leader": server.leader(), "child": child}
    assert {whom: [args[1:] for args in calls if args[0] == pid] for whom, pid in sent.items()} == signals


async def test_the_disk_is_damaged_but_no_file_that_is_about_to_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "sleep", AsyncMock())
    disk, scene = tmp_path / "disk", FaultScene(Mock(folder=tmp_path), Mock(), random.Random(1))
    disk.mkdir()
    for name, size in {"slab": 4097, "index": 5000, "index.tmp": 5000, "short": 4096}.items():
        (disk / name).write_bytes(bytes(size))
    await faults.FAULTS["disk-flips"].inject_into(scene)
    flipped = {path.name: sum(map(int.bit_count, path.read_bytes())) for path in disk.iterdir()}
    assert flipped == {"slab": 196, "index": 200, "index.tmp": 0, "short": 0}  # two bits were flipped back
    await faults.FAULTS["disk-tears"].inject_into(scene)
    sizes = {path.name: path.stat().st_size for path in disk.iterdir()}
    assert sizes["slab"] < 4097 and sizes["index"] < 5000 and (sizes["index.tmp"], sizes["short"]) == (5000, 4096)
    await faults.FAULTS["disk-gone"].inject_into(scene)
    assert not disk.exists()


async def test_a_server_that_is_right_has_no_findings(capsys: pytest.CaptureFixture[str]) -> None:
    server = ReferenceServer()
    result = await proven(server, exact=True)
    printed = capsys.readouterr().out
    assert result["findings"] == {} and result["answers"]["same"] > 200
    assert json.loads(printed.splitlines()[-1]) == result
    assert "no findings in" in printed and "cancelled" in printed
    assert {*result["cases"].values()} == {"no findings"} and result["cases"].keys() == session.CASES.keys()
    assert exit_code(result) == 0 and "not enough answers" not in printed
    # The limit holds for requests whose clients stay; the server sees later that one has left.
    assert server.most_running <= 24


@pytest.mark.usefixtures("load_alone")
@pytest.mark.parametrize("seed", range(4))
async def test_a_small_load_asks_everything_in_every_manner(seed: int) -> None:
    result = await proven(ReferenceServer(), requests=25, seed=seed)
    assert result["left_out"] == {}


@pytest.mark.usefixtures("load_alone")
@pytest.mark.parametrize("defect", FAST)
async def test_a_defect_is_found_with_its_kind(defect: str) -> None:
    result = await reference_server.find_defect(session.prove, ProveOptions(), defect)
    assert DEFECTS[defect] in result["findings"]


@pytest.mark.slow
def test_every_defect_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert reference_server.self_test(session.prove, ProveOptions()) == 0
    assert f"kill rate: {len(DEFECTS)} of {len(DEFECTS)}, 0 false alarms" in capsys.readouterr().out


OTHERS = session.CASES.keys() - dict(CULPRITS)


@pytest.mark.parametrize(("case", "defect"), CULPRITS + [(case, "positions-shifted") for case in sorted(OTHERS)])
async def test_every_case_finds_a_defect_alone(case: str, defect: str) -> None:
    result = await proven(ReferenceServer(defect), cases=(case,), exact=case == "sglang-35938")
    assert [*result["cases"]] == [case] and DEFECTS[defect] in result["findings"]


@pytest.mark.parametrize(("there", "has", "alike"), cases(__file__, "second servers", **globals()))
async def test_each_finding_says_whether_a_second_server_shares_it(
    there: ReferenceServer, has: str, alike: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with ReferenceServer("seed-ignored") as url, there as url2:
        names, junit = ("seed-repeats", "usage-counts"), str(tmp_path / "junit")
        result = await session.prove(url, "stand-in", ProveOptions(cases=names, against=url2, junit=junit))
    printed = capsys.readouterr().out
    assert result["findings"] == {"seed": 1} and result["against"]["model"] == MODEL
    assert f"seeded outputs changed when repeated (the second server {has})" in printed
    assert f"(the second server {has})" in (tmp_path / "junit").read_text()
    assert result["against"]["cases"]["usage-counts"] == "no findings" and "second server: no findings" in printed
    assert {*result["against"]["answers_alone"]} == alike
    assert sum(result["against"]["findings"].values()) == (has == "has it too")


async def test_a_second_server_that_does_not_answer_is_refused_before_the_run() -> None:
    server = ReferenceServer()
    with pytest.raises(ProveError, match="^against: 127.0.0.1:1/v1/models answers nothing"):
        await proven(server, against="http://127.0.0.1:1")
    assert not any("response_format" in body and "tools" in body for _, _, body in server.requests)


async def test_a_second_run_with_the_same_seed_is_no_false_alarm() -> None:
    options = ProveOptions(cases=("one-token-differs",))
    async with ReferenceServer() as url:
        assert [(await session.prove(url, "stand-in", options))["findings"] for _ in range(2)] == [{}, {}]


@pytest.mark.parametrize(("options", "skipped"), cases(__file__, "skipped"))
async def test_abilities_that_a_server_lacks_are_listed_with_the_reason(options: Any, skipped: list[str]) -> None:
    async with ReferenceServer(**options) as url:
        asker = Asker(url, {}, 60.0)
        with contextlib.closing(asker.client):
            assert (await detect_abilities(asker, 0, print)).skipped == skipped


async def test_abilities_that_a_server_lacks_are_counted_as_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: str(tmp_path / name) for name in ("junit", "badge")}
    lacking = ReferenceServer(without=["n", "return_token_ids", "cache_salt", "reset"])
    result = await proven(lacking, requests=60, **files)
    assert result["findings"] == {}
    assert result["cases"]["llamacpp-n-then-reuse"] == "refused: the server lacks n"
    assert result["refused"]["load: salted"] == "the server lacks cache_salt" and not result["left_out"].get("load: n")
    assert result["checks"] == 42 == result["asked"] + len(result["refused"]) + len(result["left_out"])
    assert f"{result['asked']} of {result['checks']} checks could be asked" in capsys.readouterr().out
    rows = ElementTree.parse(tmp_path / "junit").getroot().findall("testcase/skipped")
    assert Counter(row.get("type") for row in rows)["refused"] == len(result["refused"]) > 8
    assert f" {result['asked']} of {result['checks']} asked<" in (tmp_path / "badge").read_text()
    # Without ids and log-probabilities, a wrong text is still a finding.
    result = await proven(ReferenceServer("positions-shifted", without=["logprobs", "return_token_ids"]), requests=60)
    assert "wrong" in result["findings"]


class Silent(ReferenceServer):
    """A server that never answers some requests."""

    def __init__(self, is_silent: Callable[[str, dict[str, Any]], bool], defect: str = "") -> None:
        super().__init__(defect)
        self.is_silent = is_silent

    async def answer(self, path: str, body: dict[str, Any], *streams: Any) -> None:
        if self.is_silent(path, body):
            await asyncio.sleep(3600)
        await super().answer(path, body, *streams)


class Fussy(ReferenceServer):
    """A server that refuses the tools of two of the three calls, or one that it has answered before."""

    num_calls = 0

    async def answer(self, path: str, body: dict[str, Any], *streams: Any) -> None:
        self.num_calls += "order_parts" in str(body)
        if self.num_calls >= 1 + (self.defect == "hang") and "order_parts" in str(body):
            write(streams[1], {"error": {"message": "no anyOf"}}, "400 Bad Request")
        else:
            await super().answer(path, body, *streams)


async def test_a_request_that_is_refused_is_a_finding_only_if_it_was_answered_before() -> None:
    result = await proven(Fussy(), cases=("tool-arguments",))
    assert result["findings"] == {} and "no anyOf" in result["refused"]["tool-arguments"]
    assert (result["asked"], exit_code(result)) == (0, 3)
    assert (await proven(Fussy("hang"), cases=("tool-arguments",)))["findings"] == {"error": 1}


@pytest.mark.parametrize("number", hardest([signal.SIGINT, signal.SIGTERM], signal.SIGTERM))
async def test_a_run_that_is_ended_early_reports_what_it_has_found(number: signal.Signals, tmp_path: Path) -> None:
    async with Silent(lambda _, body: "get_weather" in str(body), "chunk-lost") as url, asyncio.timeout(90):
        words = ["--case", "stream-equals-whole", "--case", "tool-arguments", "--log"]
        command = (*own_server.PENSTOCK, "prove", url, *words, str(tmp_path / "log"))
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        lines = []
        async for line in process.stdout:
            lines.append(line.decode().rstrip())
            if "case stream-equals-whole: " in lines[-1]:
                process.send_signal(number)
        code = await process.wait()
    result = json.loads(lines[-1])
    assert (code, result["is_incomplete"], result["findings"]["stream"] > 0) == (4, True, True)
    assert result["left_out"] == {"tool-arguments": "the run was ended early"}
    assert "the run was ended early: this is what was found until then" in lines
    assert (tmp_path / "log").read_text().splitlines() == lines[:-1]


@pytest.mark.usefixtures("load_alone")
async def test_a_slow_server_is_told_so_and_asked_less(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ProveOptions(requests=300, concurrency=16, duration=300.0, timeout=120.0)
    rows = [(answer_s, session.scaled(options, answer_s)) for answer_s in (0.5, 1.5, 15.0, 100.0)]
    assert [(each.requests, each.concurrency) for _, each in rows] == [(300, 16), (150, 16), (16, 4), (16, 1)]
    monkeypatch.setattr(session, "SLOW_S", 0.0)
    monkeypatch.setattr(session, "NUM_ANSWERS", 10**6)
    server = ReferenceServer()
    result = await proven(server)
    assert result["findings"] == {} and "slow: a typical answer takes 0.0 s" in capsys.readouterr().out
    asked = [body for path, _, body in server.requests if "return_token_ids" in body and "response_format" not in body]
    assert max((body["max_tokens"], len(body["prompt"])) for body in asked[1:]) == (8, 4 * reference_server.BLOCK)


@pytest.mark.usefixtures("load_alone")
async def test_candidates_within_the_numerical_error_are_a_tie_unless_exact() -> None:
    result = await proven(ReferenceServer(has_ties=True), requests=40)
    assert result["findings"] == {} and result["answers"]["tie"] > 10
    result = await proven(ReferenceServer(has_ties=True), requests=40, exact=True)
    assert result["findings"]["wrong"] > 5


@pytest.mark.usefixtures("load_alone")
async def test_one_seed_sends_the_same_requests() -> None:
    async def bodies(seed: int) -> list[str]:
        server = ReferenceServer(without=["cache_salt", "stream"])
        await proven(server, seed=seed, requests=12, concurrency=1)
        sent = [json.dumps(body) for path, _, body in server.requests if path == "/v1/completions"]
        # To detect reuse, prompts are sent that no earlier run has sent.
        return [body for body in sent if "cache_salt" not in body and "return_token_ids" in body]

    assert await bodies(3) == await bodies(3) != await bodies(4)


@pytest.mark.usefixtures("load_alone")
async def test_time_is_bounded() -> None:
    result = await proven(ReferenceServer(), duration=1.0, rate=20.0, requests=500)
    assert result["answers"]["left out"] > 400


async def test_bytes_in_both_directions_count_up_to_the_limit() -> None:
    asker, abilities = Asker("http://a:1", {}, 60.0), Abilities("a", 16, 0, longest=16, material=range(99))
    exchange = AsyncMock(side_effect=lambda request, take: take(200, b"1" * 20, 0.0))
    asker.client = Mock(exchange=exchange, fetch=AsyncMock(return_value=(200, b"1" * 300)))
    asker.client.target.request.return_value = b"request"
    await asker.ask({})
    await asker.fetch("POST", "/reset", {})
    assert asker.num_bytes == len(b"request") + 20 + len(b"{}") + 300
    for missing, outcome, num_left_out in (1, "left out: no time or bytes left", 8), (0, "no findings", 7):
        limited = proof.Proof(asker, abilities, ProveOptions(max_bytes=asker.num_bytes - missing, requests=8))
        await run_case("silence", Case(AsyncMock(), ""), limited)
        await limited.ask_alone()
        assert max(each.body["max_tokens"] for each in limited.questions) == 48
        assert (limited.cases["silence"], limited.counts["how", "alone", "left out"]) == (outcome, num_left_out)


@pytest.mark.parametrize("num_answered", hardest([40, 90, 160], 40, 160), ids=["alone", "beside", "under load"])
async def test_a_server_that_falls_silent_costs_no_more_than_the_duration(num_answered: int) -> None:
    server = Silent(lambda path, _: path == "/v1/completions" and server._num_answers >= num_answered)
    result = await proven(server, duration=2.0, timeout=3600.0)  # longer than the test may take
    assert result["answers"]["left out"] and "hang" not in result["findings"]
    # Each phase ends at its share of the time, so requests are also sent, and left, under load.
    assert result["answers"]["left"] > 1


async def test_an_answer_of_which_no_byte_comes_for_a_while_counts_as_hung() -> None:
    async with Silent(lambda *_: True) as url, asyncio.timeout(60):
        asker = Asker(url, {}, 0.05)
        with contextlib.closing(asker.client):
            answer = await asker.ask({"prompt": "a"})
    assert answer.is_hung and not answer.has_left and not answer.is_done


async def test_too_little_time_is_no_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine may be so busy that no question is answered alone in its share of the time."""
    starved = Silent(lambda path, body: path == "/v1/completions" and "prove-" in str(body.get("cache_salt")))
    result = await proven(starved, duration=1.0, timeout=60.0, requests=20)
    assert result["findings"] == {} and exit_code(result) == 3
    assert "not enough answers: in 1 s 0 of 8 questions were answered alone" in capsys.readouterr().out
    monkeypatch.setattr(proof.Proof, "run_load", AsyncMock())  # no answer came under load, only before and after it
    assert exit_code(await proven(ReferenceServer(), requests=20)) == 3


@pytest.mark.slow
async def test_reuse_is_turned_off_by_a_field_that_a_lax_server_honours() -> None:
    server = ReferenceServer(is_lax=True, without=["reset"])
    result = await proven(server)
    assert result["findings"] == {} and result["answers"]["same"] > 200
    asked = [body for path, _, body in server.requests if path == "/v1/completions"]
    assert {body.get("cache_prompt", True) for body in asked} == {False, True}
    # Without such a field, cached tokens are no fault, and the report says how far the first answers can be trusted.
    result = await proven(ReferenceServer(is_lax=True, without=["cache_prompt", "reset"]))
    assert result["findings"] == {}


class LikeLlama(ReferenceServer):
    """A server that tells its context as llama.cpp's does, and tokenizes no chats. Without "instructions", it refuses
    them."""

    async def answer(self, path: str, body: dict[str, Any], *streams: Any) -> None:
        is_told = "instructions" in str(self.without) and "system" in str(body)
        answers: dict[str, Any] = {
            "/v1/models": {"data": [{"id": MODEL}]},
            "/props": {"default_generation_settings": {"n_ctx": CONTEXT}},
            "/tokenize": {"tokens": []} if "messages" in body else None,
            "/v1/chat/completions": {"error": "no system role"} if is_told else None,
        }
        if shown := answers.get(path):
            write(streams[1], shown, "400 Bad Request" if "error" in shown else "200 OK")
        else:
            await super().answer(path, body, *streams)


async def test_a_server_that_tells_little_causes_no_false_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abilities, "LEAST_BLOCK", 4)
    async with LikeLlama() as url:
        asker = Asker(url, {}, 60.0)
        with contextlib.closing(asker.client):
            detected = await detect_abilities(asker, 0, print)
    assert (detected.block, detected.context) == (reference_server.BLOCK, CONTEXT)
    result = await proven(LikeLlama(), cases=("all",))
    assert result["findings"] == {} and result["cases"]["ollama-18107"] == "no findings"
    result = await proven(LikeLlama(without=["instructions"]), cases=("all",))
    assert result["findings"] == {} and "chat: 400: " in " ".join(result["skipped"])


@pytest.mark.usefixtures("load_alone")
@pytest.mark.skipif(shutil.which("curl") is None, reason="the scripts are of curl")
@pytest.mark.parametrize("variable", hardest(["PENSTOCK_API_KEY", "OPENAI_API_KEY"], "OPENAI_API_KEY"))
async def test_a_short_script_repeats_the_failure(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    monkeypatch.setenv(variable, "sk-mine")
    server = ReferenceServer("positions-shifted")
    async with server as url:
        options = ProveOptions(requests=80, rate=2000.0, timeout=5.0, scripts=str(tmp_path))
        await session.prove(url, "stand-in", options)
        scripts, number = sorted(tmp_path.glob("*.sh")), len(server.requests)
        process = await asyncio.create_subprocess_exec("sh", str(scripts[0]), url, stdout=asyncio.subprocess.PIPE)
        printed = (await process.communicate())[0].decode().splitlines()
    # Two of a kind; by how the requests meet, log-probabilities of right tokens may be wrong as well.
    assert [path.name for path in scripts if "wrong" in path.name] == ["1-wrong.sh", "2-wrong.sh"]
    # The fault needs no more than an earlier request with the same beginning.
    text = scripts[0].read_text()
    assert "# repeated by these " in text and text.count("\nask ") + text.count("{ echo") <= 12
    answers = [json.loads(line)["choices"][0] for line in printed if line.startswith("{")]
    assert printed[0] == "alone:" and "this one:" in printed and answers
    assert {headers.get("Authorization") for _, headers, _ in server.requests[number:]} == {"Bearer sk-mine"}


@pytest.mark.parametrize("culprit", [0, 17, 39])
async def test_needless_requests_are_left_out(culprit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset of the cache, among 40 requests before the one that fails, is to blame."""
    beside = [Ask(0.01 * index, -1 if index == culprit else 0, "whole", {}) for index in range(41)]
    tried: list[int] = []

    async def repeats(_proof: object, finding: proof.Finding, asks: list[Ask]) -> bool:
        tried.append(len(asks))
        return beside[culprit] in asks and finding.ask in asks

    monkeypatch.setattr(repeat, "_repeats", repeats)
    async with ReferenceServer() as url:
        asker = Asker(url, {}, 60.0)
        with contextlib.closing(asker.client):
            failed = proof.Proof(asker, await detect_abilities(asker, 0, print), ProveOptions(requests=8))
            failed.findings.append(proof.Finding("wrong", "a token", beside[-1], beside))
            (script,) = await repeat.write_scripts(failed, url, tmp_path)
            text = script.read_text()
    # The failing request is also sent alone, at first.
    num_requests = sum(map(text.count, ("\nask 60.000", "{ echo this one:; ask", "/reset_prefix_cache"))) - 1
    assert f"# repeated by these {num_requests}\n" in text and num_requests <= 12
    assert text.count("/reset_prefix_cache") == text.count("{ echo this one:; ask") == 1
    assert len(tried) <= repeat.TRIES


async def test_a_finding_of_a_case_is_in_every_report_with_a_script(tmp_path: Path) -> None:
    files = {name: str(tmp_path / name) for name in ("json", "junit", "badge")}
    names = ("seed-repeats", "usage-counts")
    await proven(ReferenceServer("one-seed"), cases=names, scripts=str(tmp_path), **files)
    assert json.loads((tmp_path / "json").read_text())["findings"] == {"seed": 1}
    suite = ElementTree.parse(tmp_path / "junit").getroot()
    assert [(case.get("name"), len(case)) for case in suite[1:]] == [("seed-repeats", 1), ("usage-counts", 0)]
    failure = suite[1][0]
    assert failure.get("type") == "seed" and "six seeds give the same output" in (failure.text or "")
    assert ">1 findings, 2 of 2 asked<" in (tmp_path / "badge").read_text() and ElementTree.parse(tmp_path / "badge")
    script, report = (tmp_path / "1-seed.sh").read_text(), (tmp_path / "1-seed.md").read_text()
    assert script.count("ask 60.000 /v1/completions") == 12 and "--case seed-repeats --seed 0" in script
    assert subprocess.run(["sh", "-n", str(tmp_path / "1-seed.sh")], check=False).returncode == 0
    assert "six seeds give the same output" in report and "`1-seed.sh`" in report


def test_the_cases_are_listed_with_their_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    prove.add_arguments(parser)
    assert prove.run(parser.parse_args(["--list"])) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*session.CASES]
    assert all(" Finding: " in line for line in lines)


@pytest.mark.parametrize(("value", "schema", "reason"), cases(__file__, "violations"))
def test_a_text_is_refused_if_it_violates_its_schema(value: str, schema: dict[str, Any], reason: str) -> None:
    found = errors_of(value, schema)
    assert reason in found and bool(reason) == bool(found)


async def test_an_error_of_our_own_under_load_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    send, failures = proof.Proof.send, iter([ZeroDivisionError()])

    async def fail_first(self: proof.Proof, ask: Ask) -> AskResult:
        for failure in failures:
            raise failure
        return await send(self, ask)

    monkeypatch.setattr(proof.Proof, "send", fail_first)
    with pytest.raises(ExceptionGroup):
        await proven(ReferenceServer(), requests=40)


def test_the_error_is_measured_and_bounded() -> None:
    for apart, is_exact, error in cases(__file__, "measured errors"):
        assert allowed(apart, is_exact) == error


def choice(ids: list[int], finish: str | None = "length", value: float = -1.0) -> TextChoice:
    tops = [{str(each): value, "other": -1.01} for each in ids]
    return TextChoice("", ids, [str(each) for each in ids], [value] * len(ids), tops, finish)


def test_an_answer_is_compared_to_its_end() -> None:
    for reference, answer, given, outcome in cases(__file__, "comparisons", **globals()):
        assert compare(reference, answer, **{"error": 0.01, "is_done": True, **given}).outcome == outcome


def test_a_log_probability_that_is_missing_is_a_finding() -> None:
    reference, answer = AskResult(200), AskResult(200)
    for each, value in (reference, -1.0), (answer, None):
        shown = {"tokens": [" a"], "token_logprobs": [value]}
        each.take(json.dumps({"choices": [{"text": " a", "finish_reason": "stop", "logprobs": shown}]}).encode())
    assert compare(reference.first, answer.first, 0.3, is_done=True).outcome == "numbers"


@pytest.mark.parametrize(("payload", "error"), cases(__file__, "other forms"))
def test_an_answer_of_another_form_is_an_error_and_ends_nothing(payload: bytes, error: str) -> None:
    answer = AskResult(200)
    answer.take(payload)
    assert answer.error.startswith(error)


KEYED_SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        is_known = self.headers.get("Authorization") == "Bearer " + os.environ["PENSTOCK_API_KEY"]
        is_known &= "route" not in sys.argv or os.environ.get("PENSTOCK_BACKEND_API_KEY") == "sk-own"
        self.send_response(200 if is_known or self.path == "/ready" else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.mark.parametrize("world", ["uniproc", "router"])
def test_its_own_server_is_asked_with_its_key(world: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "sk-own")
    monkeypatch.setenv("PENSTOCK_BACKEND_API_KEY", "sk-of-another-fleet")
    monkeypatch.setattr(own_server, "PENSTOCK", (sys.executable, "-c", KEYED_SERVER))
    server = OwnServer(world, "a-model", [], tmp_path)
    with contextlib.closing(server):
        asyncio.run(server.start(request_headers(ProveOptions())))
        server.close()
        with pytest.raises(ProveError, match="^header: the server requires another API key"):
            asyncio.run(server.start(request_headers(ProveOptions(header=("Authorization=Bearer sk-wrong",)))))


async def test_a_fault_comes_under_load_and_a_new_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fault, server = Mock(world="uniproc"), Mock(start=AsyncMock())
    under_load = Mock(run_load=AsyncMock(), ask_again=AsyncMock(), options=ProveOptions())
    monkeypatch.setattr(own_run, "FAULTS", {"quake": fault})
    monkeypatch.setattr(own_run, "OwnServer", Mock(return_value=server))
    monkeypatch.setattr(own_run, "prove", prove := AsyncMock())
    await own_run.prove_own("quake", ProveOptions())
    await prove.call_args.args[3](under_load)
    inject, may_fail = under_load.run_load.await_args.args
    inject()
    (scene,) = fault.inject_into.call_args.args
    assert (scene.server, scene.asker, may_fail) == (server, under_load.asker, fault.fails_requests)
    own, again = (call.start(headers) for headers in (request_headers(ProveOptions()), under_load.asker.headers))
    assert server.mock_calls == [own, call.close(), call.close(), again]
    under_load.ask_again.assert_awaited_once_with("after it")
    assert not under_load.expects_errors


def test_the_exit_code_of_several_runs_says_the_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_run, "exit_code", int)
    for codes, num_run, code in cases(__file__, "codes of several runs"):
        monkeypatch.setattr(own_run, "prove_own", prove_own := AsyncMock(side_effect=codes))
        scripts = str(tmp_path) if len(codes) == 1 else None
        assert own_run.run_own(ProveOptions(worlds=tuple(WORLDS)[: len(codes)], scripts=scripts)) == code
        assert prove_own.await_count == num_run


def test_every_fault_has_a_world_and_every_world_complete_commands(tmp_path: Path) -> None:
    assert {fault.world for fault in faults.FAULTS.values()} <= {*WORLDS}
    folder = tmp_path / "a b"  # a space does not divide a path
    for world in WORLDS:
        server = OwnServer(world, None, [], folder)
        words = [word for command in server._commands for word in command]
        assert not any("{" in word for word in words if not word.startswith('{"')), words
        assert [word for word in words if "a b" in word] == [f"{folder}/disk"] * (world == "tiers")
        server.close()  # before it was started


def test_the_proof_reads_metrics_that_our_server_has() -> None:
    tiers = tier_stats(TierIndex(4, ["disk"]), Counter(), Rates(1, 1, ["disk"]), {})
    ours = {metric.name for metric in stats_families(Stats(tiers=tiers), "model")}
    names = {name.removesuffix("_total") for name in (*HELD, *REACHED.values())}
    assert {name for name in names if not name.startswith("llamacpp:")} <= ours


def test_a_proof_of_another_server_loads_nothing_of_the_engine() -> None:
    code = "import sys, penstock.prove; print(*(name for name in sys.modules if 'penstock' in name))"
    loaded = {name for name in printed(code).split() if not name.startswith("penstock.prove")}
    assert loaded == {"penstock"}
