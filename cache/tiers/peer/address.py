"""Where peers are and what they share: addresses and the secret as the operator gives them. No sockets."""

import ipaddress
from collections.abc import Mapping
from typing import NamedTuple

SECRET_VARIABLE = "PENSTOCK_KV_PEER_SECRET"
LEAST_SECRET = 16  # characters


class Address(NamedTuple):
    host: str
    port: int

    def of_rank(self, rank: int) -> str:
        """Where one rank's tiers are: each listens on a port of its own."""
        host = {"localhost": "127.0.0.1"}.get(self.host, self.host)  # to listen takes a number
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
    """`HOST:PORT`, where `num_ranks` ports from this one on are meant; ValueError names the option."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or any(c in host for c in " /*@;"):
        raise ValueError(f"{name}: {text!r} given; HOST:PORT is expected, like 10.0.0.5:9100")
    if not 1 <= int(port) <= 65536 - num_ranks:
        raise ValueError(f"{name}: port {port} given; each of {num_ranks} ranks takes one, so 1 to {65536 - num_ranks}")
    return Address(host, int(port))


def read_secret(path: str, environment: Mapping[str, str]) -> str:
    """From the file if there is one, else from the environment; empty without either. ValueError names where."""
    name = f"kv_peer_secret_file: {path!r}"
    if path:
        try:
            with open(path, encoding="utf-8") as file:
                secret = file.read(4097).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{name}: {getattr(error, 'strerror', None) or error}") from None
    elif SECRET_VARIABLE in environment:
        name, secret = SECRET_VARIABLE, environment[SECRET_VARIABLE].strip()
    else:
        return ""
    if not LEAST_SECRET <= len(secret) <= 4096:
        # Set but empty is a mistake in a deployment, and must not open the port.
        raise ValueError(f"{name}: a secret of {len(secret)} characters; {LEAST_SECRET} to 4096 are expected")
    return secret
