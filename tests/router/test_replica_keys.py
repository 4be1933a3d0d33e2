"""Which environment variables of the router a replica may be given as its key."""

from pathlib import Path

import pytest

from penstock.router.config import RouterConfig, resolve
from penstock.router.fleet.fleet import Fleet
from penstock.router.placement.placement import Placement
from tests.support.router_fleet import ADMIN, running_router, until
from tests.support.router_stub import Stub


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_CLOUD_SECRET", "not-for-replicas")
    monkeypatch.setenv("ONE_KEY", "sk-one")
    monkeypatch.setenv("PENSTOCK_BACKEND_KEY_TWO", "sk-two")


def test_an_added_replica_cannot_be_given_any_variable_of_the_environment(backend: Stub) -> None:
    with running_router(admin_api_keys=(ADMIN,)) as router:
        answer = router.change("POST", url=f"{backend.url},key=A_CLOUD_SECRET")
        assert answer.status_code == 400 and "PENSTOCK_BACKEND_KEY_" in answer.json()["error"]["message"]
        assert router.fleet.replicas == {}


def test_neither_can_one_that_a_file_names(tmp_path: Path, backend: Stub) -> None:
    path = tmp_path / "replicas"
    path.write_text(f"{backend.url},key=A_CLOUD_SECRET\nhttp://127.0.0.1:1\n")
    with running_router(discover=(f"file:{path}",)) as router:
        until(lambda: "http://127.0.0.1:1" in router.fleet.replicas)
        assert router.fleet.replicas.keys() == {"http://127.0.0.1:1"}


def test_an_added_replica_may_use_keys_that_were_configured_at_start(backend: Stub) -> None:
    for variable, secret in (("PENSTOCK_BACKEND_KEY_TWO", b"sk-two"), ("ONE_KEY", b"sk-one")):
        backend.seen.clear()
        with running_router("http://127.0.0.1:1,key=ONE_KEY", admin_api_keys=(ADMIN,), wait_for=0) as router:
            assert router.change("POST", url=f"{backend.url},key={variable}").status_code == 200
            until(lambda: router.states().count("up") == 1)
            router.complete(model="m")
        assert [seen.header(b"authorization") for seen in backend.seen] == [[b"Bearer " + secret]]


def test_the_key_of_a_source_may_be_given_to_what_it_finds() -> None:
    config = resolve(RouterConfig(discover=("dns:localhost:8000,key=ONE_KEY",)), {})
    fleet = Fleet(config, Placement)
    assert fleet.add("http://127.0.0.1:8000,key=ONE_KEY").key_line == b"authorization: Bearer sk-one\r\n"
