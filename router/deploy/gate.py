"""The real gate: the router of a deployment, asked over HTTP with its admin key. One short call at a time."""

import http.client
from urllib.parse import urlsplit

import msgspec

TIMEOUT_S = 2.0


class HttpGate:
    """Every method returns None, and changes nothing, when the router does not answer."""

    def __init__(self, url: str, admin_key: str) -> None:
        parts = urlsplit(url)
        host = parts.hostname or ""  # where a router that listens everywhere is to be found on its own node
        self._address = ({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), parts.port or 80)
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
            return {each["url"]: each["state"] for each in msgspec.json.decode(answer.read())["replicas"]}
        except (OSError, http.client.HTTPException, msgspec.MsgspecError, LookupError, TypeError):
            return None  # a refusal has no list of replicas
        finally:
            connection.close()
