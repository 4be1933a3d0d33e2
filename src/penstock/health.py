"""The health check of the container images: asks the server that the container runs.

    python -m penstock.health

An image has one health check, and the user chooses the command: its address and port are read from the command line of
the container's first process. A container that runs no server (`penstock bench`) is healthy.
"""

import http.client
import re
import sys
from pathlib import Path

DEFAULT_PORTS = {"serve": "8000", "route": "8080"}
_COMMAND = re.compile(r"(?:^|[/ ])penstock (serve|route)(?= |$)")
_ADDRESS = re.compile(r" --(host|port)[ =](\S+)")
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # a server that listens on all addresses is asked on its own one
_TIMEOUT_S = 4  # shorter than the image's, so that the reason is reported


def listening_address(command: str) -> tuple[str, int] | None:
    """Return host and port of the server that this command line starts; None if it starts no server."""
    verb = _COMMAND.search(command)
    if verb is None:
        return None
    # The last one applies, as on the command line.
    options: dict[str, str] = dict(_ADDRESS.findall(command[verb.end() :]))
    host = options.get("host", "127.0.0.1")
    return _ANY_ADDRESS.get(host, host), int(options.get("port", DEFAULT_PORTS[verb[1]]))


def check(command: str) -> str:
    """Ask the server that this command line starts; return the reason why it is not healthy, else an empty text."""
    if (address := listening_address(command)) is None:
        return ""
    connection = http.client.HTTPConnection(*address, timeout=_TIMEOUT_S)  # without the proxy of the environment
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
        return "" if status == http.client.OK else f"status {status}"
    except (OSError, http.client.HTTPException) as error:
        return str(error) or repr(error)
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(check(Path("/proc/1/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")) or 0)
