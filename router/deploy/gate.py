"""The real gate: the router of a deployment, asked over HTTP with its admin key. One short call at a time."""

import http.client
from urllib.parse import urlsplit

import msgspec

TIMEOUT_S = 2.0


class _Replica(msgspec.Struct):
    url: str
    state: str


class _Replicas(msgspec.Struct):
    replicas: list[_Replica]


class HttpGate:
    """Every method returns None, and changes nothing, when the router does not answer."""

    def __init__(self, url: str, admin_key: str) -> None:
        parts = urlsplit(url)
        self._address = (_reachable(parts.hostname or ""), parts.port or 80)
        self._headers = {"authorization": f"Bearer {admin_key}", "content-type": "application/json"}

    def states(self) -> dict[str, str] | None:
        return self._ask("GET")

    def add(self, url: str) -> None:
        self._ask("POST", url)

    def remove(self, url: str) -> None:
        """It gets no more requests, and is forgotten when those it has are done."""
        self._ask("DELETE", url)

    def _ask(self, method: str, url: str | None = None) -> dict[str, str] | None:
        body = None if url is None else msgspec.json.encode({"url": url})
        connection = http.client.HTTPConnection(*self._address, timeout=TIMEOUT_S)
        try:
            connection.request(method, "/replicas", body, self._headers)
            answer = connection.getresponse()
            said = msgspec.json.decode(answer.read(), type=_Replicas)
        except (OSError, http.client.HTTPException, msgspec.MsgspecError):  # a refusal has no list of replicas
            return None
        finally:
            connection.close()
        return {each.url: each.state for each in said.replicas}


def _reachable(host: str) -> str:
    """Where a router that listens everywhere is to be found on its own node."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
