"""Parsing of the peer tier's addresses and shared secret as the operator gives them."""

import ipaddress
from collections.abc import Mapping
from typing import NamedTuple

SECRET_VARIABLE = "PENSTOCK_KV_PEER_SECRET"
LEAST_SECRET = 16  # characters


class Address(NamedTuple):
    host: str
    port: int

    def of_rank(self, rank: int) -> str:
        """Return the endpoint of one rank's tiers: each rank listens on a port of its own."""
        host = {"localhost": "127.0.0.1"}.get(self.host, self.host)  # ZMQ cannot bind to a host name
        host = f"[{host}]" if ":" in host else host
        return f"tcp://{host}:{self.port + rank}"

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def read_address(name: str, text: str, num_ranks: int = 1) -> Address:
    """Parse `HOST:PORT`, the first of `num_ranks` consecutive ports; raise ValueError naming the option `name`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or any(c in host for c in " /*@;"):
        raise ValueError(f"{name}: {text!r} given; HOST:PORT is expected, like 10.0.0.5:9100")
    if not 1 <= int(port) <= 65536 - num_ranks:
        raise ValueError(f"{name}: port {port} given; {num_ranks} ranks need a port each, so 1 to {65536 - num_ranks}")
    return Address(host, int(port))


def read_secret(path: str, environment: Mapping[str, str]) -> str:
    """Read the secret from the file `path` or, without one, from the environment; return "" if neither is set."""
    name = f"kv_peer_secret_file: {path!r}"
    try:
        if path:
            with open(path, encoding="utf-8") as file:
                secret = file.read(4097).strip()
        elif SECRET_VARIABLE in environment:
            name, secret = SECRET_VARIABLE, environment[SECRET_VARIABLE].strip()
            secret.encode()  # as the keys derived from it need it: a variable may have any bytes
        else:
            return ""
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: {getattr(error, 'strerror', None) or error}") from None
    if not LEAST_SECRET <= len(secret) <= 4096:
        # An empty secret is a mistake in the deployment; starting without a secret would leave the port unprotected.
        raise ValueError(f"{name}: a secret of {len(secret)} characters; {LEAST_SECRET} to 4096 are expected")
    return secret
