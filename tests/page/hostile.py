"""A name and a text that would do harm if anybody took it for markup."""

import json

HOSTILE = '<img src=x onerror="window.broken=1"><script>window.broken=1</script><b>x</b>'


def hostile_models() -> bytes:
    return json.dumps({"object": "list", "data": [{"id": HOSTILE}]}).encode()
