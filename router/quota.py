"""What each client may ask for: requests and tokens a minute, requests at a time; and before whom. `--quotas FILE`:

    {"default": {"requests": 600, "concurrent": 16},
     "keys": {"sk-…": {"requests": 60, "tokens": 100000, "concurrent": 4}, "sk-other…": {"priority": -10}}}

A minute's worth may be used at once and comes back evenly. Prompts are charged when they are known, answers as they come,
so tokens can run into debt by one request; the next ones wait for it. An answer that states its usage has been charged
that in the end. Each process of the router has its own count.
"""

import hmac
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.engine.http.errors import HttpError
from penstock.engine.options import Count
from penstock.router.backend import RouteError

BEARER = b"bearer "
# Of an answer's usage. (In a text of the model's the quotes would be escaped.) It may be cut by the end of a piece.
_USAGE = re.compile(rb'"(total_tokens|completion_tokens|output_tokens)" ?: ?(\d{1,9})')
USAGE_BYTES = 40
PRIORITIZED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})


class Quota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """None: as much as they like, and the priority that they ask for."""

    requests: Count | None = None  # a minute
    tokens: Count | None = None  # a minute
    concurrent: Count | None = None
    priority: Annotated[int, Meta(ge=-(2**31) + 1, le=2**31 - 1)] | None = None  # the smallest goes first


class Quotas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    default: Quota = Quota()  # of each client, by its key; those without a key are one
    keys: dict[Annotated[str, Meta(min_length=1)], Quota] = {}

    @classmethod
    def read(cls, path: str) -> "Quotas":
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except OSError as error:
            raise RouteError(f"quotas: {path}: {error.strerror}") from None
        except msgspec.MsgspecError as error:
            raise RouteError(f"quotas: {path}: {error}") from None


class Bucket:
    def __init__(self, per_minute: int, now_s: float) -> None:
        self._most = self._left = float(per_minute)
        self._per_s = per_minute / 60
        self._then_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """How long until so much is there."""
        self._left = min(self._left + (now_s - self._then_s) * self._per_s, self._most)
        self._then_s = now_s
        return max(amount - self._left, 0.0) / self._per_s

    def take(self, amount: float) -> None:
        self._left -= amount


class Account:
    """One client's."""

    def __init__(self, quota: Quota, now_s: float) -> None:
        self.quota = quota
        self.num_open = 0
        self.requests = None if quota.requests is None else Bucket(quota.requests, now_s)
        self.tokens = None if quota.tokens is None else Bucket(quota.tokens, now_s)

    def objection(self, now_s: float) -> HttpError | None:
        if self.quota.concurrent is not None and self.num_open >= self.quota.concurrent:
            return _refusal(f"{self.quota.concurrent} requests at a time are the limit of this key", 1.0)
        if self.requests is not None and (wait_s := self.requests.wait_s(1, now_s)) > 0:
            return _refusal(f"{self.quota.requests} requests a minute are the limit of this key", wait_s)
        if self.tokens is not None and (wait_s := self.tokens.wait_s(1, now_s)) > 0:
            return _refusal(f"{self.quota.tokens} tokens a minute are the limit of this key", wait_s)
        return None

    def begin(self) -> None:
        self.num_open += 1
        if self.requests is not None:
            self.requests.take(1)

    def charge(self, num_tokens: int) -> None:
        if self.tokens is not None:
            self.tokens.take(num_tokens)

    def end(self) -> None:
        self.num_open -= 1


class Bill:
    """What one request is charged: its prompt as the router counts it, its answer by events, and then what its usage
    says beyond that, or of an answer that came to its end also below."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self._charged = {b"total_tokens": 0, b"output_tokens": 0}
        self._said: dict[bytes, int] = {}
        self._rest = b""
        self.is_whole = False  # the answer has come to its end
        account.begin()

    def charge(self, num_prompt: int, num_answer: int) -> None:
        self._charged[b"total_tokens"] += num_prompt + num_answer
        self._charged[b"output_tokens"] += num_answer
        self.account.charge(num_prompt + num_answer)

    def read(self, data: bytes) -> None:
        """A piece of the answer. In a stream the last usage is the greatest."""
        if self.account.tokens is None:
            return
        text = self._rest + data
        for name, number in _USAGE.findall(text) if text.rfind(b'_tokens"') >= 0 else ():
            name = b"output_tokens" if name == b"completion_tokens" else name
            self._said[name] = max(self._said.get(name, 0), int(number))
        self._rest = text[-USAGE_BYTES:]

    def end(self) -> None:
        for name in self._charged:  # the total, or at least that of the answer
            if name in self._said:
                more = self._said[name] - self._charged[name]
                self.account.charge(more if self.is_whole else max(more, 0))
                break
        self.account.end()


class Accounts:
    def __init__(self, quotas: Quotas, clock: Callable[[], float] = time.monotonic) -> None:
        self._quotas, self._clock = quotas, clock
        self._known = {_digest(key.encode()): quota for key, quota in quotas.keys.items()}
        self._accounts: dict[bytes, Account] = {}

    def of(self, authorization: bytes) -> Account:
        """By digests: a key that is looked up itself would be found by the time it takes."""
        digest = _digest(authorization[len(BEARER) :].strip() if authorization[:7].lower() == BEARER else b"")
        account = self._accounts.get(digest)
        if account is None:
            if len(self._accounts) > 2**16:  # of keys that were made up
                self._accounts = {
                    each: account for each, account in self._accounts.items() if account.num_open or each in self._known
                }
            quota = self._known.get(digest, self._quotas.default)
            account = self._accounts[digest] = Account(quota, self._clock())
        return account

    def objection(self, authorization: bytes) -> HttpError | None:
        return self.of(authorization).objection(self._clock())


def _digest(key: bytes) -> bytes:
    return hmac.digest(b"penstock quotas", key, "sha256")


def _refusal(message: str, wait_s: float) -> HttpError:
    return HttpError(429, message, headers={"retry-after": str(max(math.ceil(wait_s), 1))})
