"""What each client may ask for: requests and tokens a minute, requests at a time. `--quotas FILE`:

    {"default": {"requests": 600, "concurrent": 16},
     "keys": {"sk-…": {"requests": 60, "tokens": 100000, "concurrent": 4}, "sk-other…": {}}}

A minute's worth may be used at once and comes back evenly. Prompts are charged when they are known, answers as they come,
so tokens can run into debt by one request; the next ones wait for it. Each process of the router has its own count.
"""

import hmac
import math
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


class Quota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """None: as much as they like."""

    requests: Count | None = None  # a minute
    tokens: Count | None = None  # a minute
    concurrent: Count | None = None


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
                self._accounts = {each: account for each, account in self._accounts.items() if account.num_open}
            quota = self._known.get(digest, self._quotas.default)
            account = self._accounts[digest] = Account(quota, self._clock())
        return account

    def objection(self, authorization: bytes) -> HttpError | None:
        return self.of(authorization).objection(self._clock())


def _digest(key: bytes) -> bytes:
    return hmac.digest(b"penstock quotas", key, "sha256")


def _refusal(message: str, wait_s: float) -> HttpError:
    return HttpError(429, message, headers={"retry-after": str(max(math.ceil(wait_s), 1))})
