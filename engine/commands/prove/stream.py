"""A parser of server-sent event streams."""


class Events:
    """Cuts a byte stream into the payloads of its `data:` lines, wherever the chunks begin and end."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes of the stream; return the payloads that are complete now."""
        data = self._rest + data
        if b"\r" in data:  # JSON never contains a raw carriage return
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        return [payload for event in events if (payload := _payload(event))]


def _payload(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:  # nearly all events
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
