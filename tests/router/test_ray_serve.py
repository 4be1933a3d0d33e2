"""The Ray Serve application: its arguments, and a fleet of real servers and a router on a real local Ray."""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock, call

import httpx
import pytest
import yaml  # type: ignore[import-untyped]
from benchmarks.export import save_tokenizer

from tests.support.fake_engine import byte_tokenizer
from tests.support.fork_server import ROOT
from tests.support.peer_rig import free_addresses
from tests.support.refusals import cases, table
from tests.support.running_server import until
from tests.test_serve import MODEL

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'penstock[ray]'")
serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'penstock[ray]'")
ray_serve = pytest.importorskip("penstock.router.ray_serve")

CONFIG = ROOT / "deploy" / "ray-serve.yaml"
NUM_CLIENTS = 3
LOAD = 'vllm:num_requests_running{a="b"} 5.0\nvllm:num_requests_waiting 2\nvllm:num_requests_running_x 1\n'
TINY = "--load-format dummy --kv-cache-bytes 8MiB"


@pytest.mark.parametrize(("arguments", "message"), table(__file__, "ray serve"))
def test_an_argument_that_cannot_be_used_is_named_in_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ray_serve.ArgumentError) as error:
        ray_serve.app(arguments)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert error.value.format_message() == str(error.value)  # what `serve run` prints


def test_the_applications_of_the_configuration_file_can_be_built() -> None:
    for application in yaml.safe_load(CONFIG.read_text())["applications"]:
        build = getattr(ray_serve, application["import_path"].removeprefix("penstock.router.ray_serve:"))
        assert isinstance(build(application["args"]), serve.Application)


def test_arguments_become_options_of_deployments_and_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, deployments in cases(__file__, "deployments", **vars(ray_serve)):
        monkeypatch.setattr(ray_serve, "serve", made := Mock())
        ray_serve.app(arguments)
        replica, _, servers, router, _, routers = made.mock_calls
        assert [replica.kwargs, *servers.args, router.kwargs, *routers.args[:2]] == deployments


def test_enough_replicas_are_started_for_all_sequences() -> None:
    for metrics, count in cases(__file__, "scaling"):
        context = Mock(**{"aggregated_metrics": metrics, "config.target_ongoing_requests": 64})
        assert ray_serve.scale(context) == (count, {})


def test_one_actor_of_a_fleet_survives_its_creators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "remote", remote := Mock())
    ray_serve._addresses("mine")
    assert remote.mock_calls == cases(__file__, "actor", call=call, **vars(ray_serve))


def test_a_server_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('a file of the current directory')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="ended with code 2: penstock: model: there is no folder .*/missing"):
        ray_serve.Program(["serve", str(tmp_path / "missing"), "--port", "0"])


def test_a_program_answers_and_shows_its_log_until_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "sk-mine")
    (tmp_path / "list").touch()
    program = ray_serve.Program(["route", "--discover", f"file:{tmp_path}/list", "--port", "0"])
    assert "router_requests_total" in program.fetch("/metrics")
    with pytest.raises(OSError, match="404"):
        program.fetch("/nothing")
    asyncio.run(program.stop())
    with pytest.raises(OSError, match="has ended with code 0"):
        program.fetch("/metrics")
    until(lambda: "shutting down" in capsys.readouterr().out)


def test_the_list_of_replicas_is_replaced_whole_after_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "replicas.txt"
    lists: list[str] = []  # before each look at the addresses
    errors = {2: ray.exceptions.RayError("the actor has died"), 5: EOFError()}
    file.touch()

    def addresses(_: Any, timeout: float) -> list[str]:
        lists.append(file.read_text())
        if len(lists) in errors:
            raise errors[len(lists)]
        if len(lists) == 3:
            file.with_suffix(".new").mkdir()  # so that writing fails
        if len(lists) == 4:
            file.with_suffix(".new").rmdir()
        return ["http://a:1", "http://b:1"][: len(lists)]

    monkeypatch.setattr(ray_serve, "FOLLOW_S", 0)
    monkeypatch.setattr(ray, "get", addresses)
    with pytest.raises(EOFError):
        ray_serve._follow(Mock(), file, threading.Event())
    one = "http://a:1\n"
    assert lists == ["", one, one, one, f"{one}http://b:1\n"]


def test_an_address_that_is_not_reported_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_runtime_context", context := Mock())
    monkeypatch.setattr(ray_serve, "time", clock := Mock())
    for is_restarted, listed in cases(__file__, "addresses"):
        context().was_current_actor_reconstructed, clock.monotonic.return_value = is_restarted, 1.0
        addresses = ray_serve.Addresses()
        for now_s, reported, expected in listed:
            clock.monotonic.return_value = now_s
            for name in reported:
                addresses.report(f"http://{name}")
            addresses.forget("http://b")  # unknown at first
            assert addresses.urls() == expected


def test_a_replica_reports_its_address_and_load_and_leaves_before_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    asynchronous = {name: AsyncMock() for name in ("report.remote", "forget.remote", "sleep", "stop")}
    fleet = Mock(**asynchronous, **{"fetch.return_value": LOAD})
    fleet.start.return_value = Mock(url="http://a:1", stop=fleet.stop, fetch=fleet.fetch)
    monkeypatch.setattr(ray_serve, "Program", fleet.start)
    monkeypatch.setattr(ray_serve, "_addresses", {"mine": fleet}.get)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    monkeypatch.setattr(asyncio, "sleep", fleet.sleep)
    kind, replica = ray_serve.ReplicaDeployment, Mock()  # no instance, which would stop when Python deletes it
    kind.__init__(replica, ["serve", "x"], "mine")
    asyncio.run(kind.check_health(replica))
    assert asyncio.run(kind.record_autoscaling_stats(replica)) == {"sequences": 7.0}
    asyncio.run(kind.__del__(replica))
    assert fleet.mock_calls == cases(__file__, "calls of a replica", call=call)


@pytest.mark.parametrize("starts", [True, False])
def test_a_router_needs_its_list_and_deletes_it(starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Mock(stop=AsyncMock())
    start = Mock(return_value=program) if starts else Mock(side_effect=RuntimeError("the port is taken"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ray_serve, "Program", start)
    monkeypatch.setattr(ray_serve, "_addresses", Mock())
    monkeypatch.setattr(ray, "get", lambda _, timeout: [])
    with contextlib.nullcontext() if starts else pytest.raises(RuntimeError, match="the port"):
        kind, router = ray_serve.Router, Mock()  # no instance, which would stop when Python deletes it
        kind.__init__(router, [], "penstock", None)
        assert [path.name for folder in tmp_path.iterdir() for path in folder.iterdir()] == ["replicas.txt"]
        asyncio.run(kind.check_health(router))
        asyncio.run(kind.__del__(router))
        program.stop.assert_awaited_once()
        with pytest.raises(RuntimeError, match="the list of replicas"):
            asyncio.run(kind.check_health(router))
    start.assert_called_once()
    assert list(tmp_path.iterdir()) == []


class Fleet:
    """The applications of deploy/ray-serve.yaml with a tiny model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.url = f"http://{free_addresses(1)[0]}"

    def deploy(self, options: str = TINY, num_replicas: int | None = None, **arguments: Any) -> None:
        """Deploy as `serve deploy` does, and wait until it runs. `num_replicas`: of the deployment, beside its arguments."""
        config = yaml.safe_load(CONFIG.read_text())
        servers, router = config["applications"]
        servers["args"] |= {"model": str(self._folder), "cpus": 0.1, "serve_options": options, **arguments}
        if num_replicas is not None:
            servers["deployments"] = [{"name": "Replica", "num_replicas": num_replicas}]
        router["args"] = {"port": int(self.url.rpartition(":")[2]), "route_options": "--host 127.0.0.1"}
        serve.context._get_global_client().deploy_apps(serve.schema.ServeDeploySchema(**config))
        until(lambda: all(each.status == "RUNNING" for each in serve.status().applications.values()), timeout_s=400)

    def up(self) -> list[str]:
        """Return the addresses of the router's replicas if all of them are up, else none."""
        with contextlib.suppress(httpx.TransportError):
            replicas = httpx.get(self.url + "/replicas").json()["replicas"]
            if all(each["state"] == "up" for each in replicas):
                return sorted(each["url"] for each in replicas)
        return []

    def wait_for(self, count: int, without: Collection[str] = (), gone: int | None = None) -> list[str]:
        """Wait until there are so many replicas, none of them at these addresses or in this process; return their addresses."""
        up: list[str] = []

        def is_so() -> bool:
            servers = self.servers()
            up[:] = self.up()
            return len(up) == len(servers) == count and not set(up) & set(without) and gone not in servers

        until(is_so, timeout_s=400)
        return up

    def servers(self) -> list[int]:
        """Return the processes of `penstock serve`."""
        pids = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                if b"\0serve\0" + bytes(self._folder) in path.read_bytes():
                    pids.append(int(path.parent.name))
        return pids

    @contextlib.contextmanager
    def clients(self) -> Iterator[list[str]]:
        """Yield the failures of clients that are answered before the block begins, and still at its end."""
        failures: list[str] = []
        answers: list[httpx.Response] = []
        is_over = threading.Event()

        def ask() -> None:
            body = {"prompt": "hello", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
            with httpx.Client(base_url=self.url, timeout=120) as http:
                while not is_over.is_set():
                    try:
                        answers.append(http.post("/v1/completions", json=body).raise_for_status())
                    except httpx.HTTPError as error:
                        failures.append(repr(error))

        def wait_for_more() -> None:
            enough = len(answers) + 2 * NUM_CLIENTS
            until(lambda: len(answers) >= enough)

        with ThreadPoolExecutor(NUM_CLIENTS) as threads, contextlib.ExitStack() as stack:
            stack.callback(is_over.set)
            for _ in range(NUM_CLIENTS):
                threads.submit(ask)
            wait_for_more()
            yield failures
            wait_for_more()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("ray") / "tiny"
    save_tokenizer(byte_tokenizer(), folder)
    (folder / "config.json").write_text(json.dumps(MODEL))
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    fleet = Fleet(folder)
    fleet.deploy()
    fleet.wait_for(2)
    yield fleet
    serve.shutdown()
    ray.shutdown()
    until(lambda: not fleet.servers())


@pytest.mark.nightly
def test_a_changed_configuration_or_number_of_replicas_fails_no_request(fleet: Fleet) -> None:
    fleet.deploy()
    before = fleet.wait_for(2)
    options = f"{TINY} --max-num-seqs 8"
    with fleet.clients() as failures:
        fleet.deploy(options)
        fleet.wait_for(2, without=before)
        for count in (3, 1):
            fleet.deploy(options, num_replicas=count)
            fleet.wait_for(count)
    assert failures == []


@pytest.mark.nightly
def test_a_killed_replica_is_replaced_and_costs_at_most_its_own_requests(fleet: Fleet) -> None:
    fleet.deploy()
    fleet.wait_for(2)
    for kills_worker in (False, True):  # the server alone; Ray's worker, with which its server ends
        victim = fleet.servers()[0]
        with fleet.clients() as failures:
            stat = Path(f"/proc/{victim}/stat").read_text()
            os.kill(int(stat.rpartition(")")[2].split()[1]) if kills_worker else victim, signal.SIGKILL)
            fleet.wait_for(2, gone=victim)
        assert len(failures) <= NUM_CLIENTS, failures


@pytest.mark.nightly
def test_the_number_of_replicas_follows_the_running_sequences(fleet: Fleet) -> None:
    fleet.deploy(num_replicas=1)  # Ray Serve waits ten minutes before it takes a replica away by itself
    fleet.wait_for(1)
    fleet.deploy(replicas=1, max_replicas=2, sequences_per_replica=1)
    fleet.wait_for(1)
    with fleet.clients() as failures:
        fleet.wait_for(2)
    assert failures == []
