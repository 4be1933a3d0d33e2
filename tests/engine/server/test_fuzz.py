"""Random requests out of the schema's own fields: never a 500, never a hang, always the error format."""

import random
from typing import Any

import msgspec
import pytest

from penstock.engine.server import requests
from penstock.engine.server.agents import items_schema, messages_schema
from penstock.engine.server.other_fields import OTHER_FIELDS
from penstock.engine.server.routes import POSTS
from tests.support.fake_engine import FakeEngine
from tests.support.refusals import cases
from tests.support.running_server import MODEL, Running, running, until

SCHEMAS = vars(requests) | vars(items_schema) | vars(messages_schema)
REQUESTS: dict[str, type[msgspec.Struct]] = dict(cases(__file__, "requests of routes", **SCHEMAS))
PATHS = {post.path: REQUESTS[post.path].__struct_fields__ or ("model",) for post in POSTS}
# Numbers and texts at and beyond the limits of fields, and values that are often right, so that a request gets beyond the first check.
(SCALARS,) = cases(__file__, "scalars", MODEL=MODEL)
LIKELY: dict[str, list[Any]] = dict(cases(__file__, "likely values", MODEL=MODEL))
NEEDED = ("prompt", "messages", "input", "tokens")


class Generator:
    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)

    def value(self, depth: int = 0) -> Any:
        kind = self.choose.random()
        if kind < 0.6 or depth > 3:
            return self.choose.choice(SCALARS)
        count = self.choose.choice([0, 1, 1, 2, 3, 20])
        if kind < 0.8:
            return [self.value(depth + 1) for _ in range(count)]
        names = [*SCALARS, "type", "role", "content"]
        return {str(self.choose.choice(names)): self.value(depth + 1) for _ in range(count)}

    def message(self) -> Any:
        if self.choose.random() < 0.1:
            return self.value()
        message = {"role": self.choose.choice(["user", "assistant", "system", "tool"]), "content": "hello"}
        if self.choose.random() < 0.3:
            message[self.choose.choice(["content", "name", "tool_calls", "role", "audio", "x"])] = self.value()
        return message

    def likely(self, field: str) -> Any:
        if field == "messages":
            return [self.message() for _ in range(self.choose.randint(1, 3))]
        if field == "tokens":
            return [self.choose.randint(0, 299) for _ in range(self.choose.randint(0, 5))]
        return self.choose.choice(LIKELY.get(field, [True, False, None, 1, 0.5]))

    def body(self, path: str) -> dict[str, Any]:
        body: dict[str, Any] = {field: self.likely(field) for field in NEEDED if field in PATHS[path]}
        if "max_tokens" in PATHS[path]:
            body["max_tokens"] = 3
        for _ in range(self.choose.randint(0, 4)):
            field = self.choose.choice(PATHS[path])
            body[field] = self.value() if self.choose.random() < 0.4 else self.likely(field)
        if self.choose.random() < 0.1:
            body[self.choose.choice([*OTHER_FIELDS.harmless, *OTHER_FIELDS.unserved, "nonsense"])] = self.value()
        if body and self.choose.random() < 0.05:
            body.pop(self.choose.choice(list(body)))
        return body

    def content(self, path: str) -> bytes:
        content = msgspec.json.encode(self.body(path))
        if self.choose.random() < 0.1:  # broken on the way
            at = self.choose.randrange(len(content))
            content = content[:at] + bytes([self.choose.randrange(256)]) * self.choose.randint(0, 3) + content[at + 1 :]
        return content


def fuzz(server: Running, seed: int, count: int) -> None:
    generator = Generator(seed)
    statuses = set()
    for at in range(count):
        path = generator.choose.choice(list(PATHS))
        content = generator.content(path)
        answer = server.http.post(path, content=content, headers={"content-type": "application/json"})
        where = f"seed {seed}, request {at}, {path}: {content[:300]!r} → {answer.text[:300]}"
        assert answer.status_code in (200, 400, 404), where
        statuses.add(answer.status_code)
        if answer.status_code == 200:
            # A stream may fail later, but no answer here has a reason to.
            assert '"error":{' not in answer.text, where
        else:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, where
            assert len(answer.content) < 3000, where
    assert statuses == {200, 400, 404}  # the generator reaches both sides
    until(lambda: server.call(lambda: server.app.service.num_open_requests) == 0)
    assert len(server.engine.answers) == 0


@pytest.mark.parametrize(("num_seeds", "count"), [(1, 1200), pytest.param(50, 2000, marks=pytest.mark.nightly)])
def test_random_requests_are_answered_or_refused(num_seeds: int, count: int) -> None:
    with running(FakeEngine()) as server:
        for seed in range(1, 1 + num_seeds):
            fuzz(server, seed, count)
