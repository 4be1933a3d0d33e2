"""Responses and conversations that clients come back to, in SQLite: a file, or memory. Knows nothing of what they say.

Bounded in number, bytes and age; what was not used for longest goes first. A store that fails (a full disk, a broken
file) fails the calls that need it and no others. Everything runs in one thread of its own, so that a slow disk holds up
nothing else.
"""

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from penstock.engine.http.errors import HttpError
from penstock.engine.server.server_config import Keeping

log = logging.getLogger("penstock.engine")

T = TypeVar("T")
Kept = dict[str, Any]
PAGE_BYTES = 4096
BUSY_S = 5.0  # how long another process may hold the file
LAYOUT = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = NORMAL",  # what a power cut takes is forgotten, and nothing else broken
    "CREATE TABLE IF NOT EXISTS kept(id TEXT PRIMARY KEY, tenant BLOB, used REAL, size INTEGER, body BLOB)",
    "CREATE INDEX IF NOT EXISTS kept_used ON kept(used, size)",  # the sum of sizes reads no rows, which are large
)


class StoreFailed(Exception):
    """The store cannot be read or written; the message says why."""


class ItemStore:
    """`tenant` is who asks: what one key's clients have kept does not exist for others."""

    def __init__(self, keeping: Keeping) -> None:
        self._keeping = keeping
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._opened: sqlite3.Connection | None = None

    async def put(self, tenant: bytes, kept_id: str, kept: Kept) -> bool:
        """Whether it is kept. If not, that is the operator's to know: the client gets its answer."""
        try:
            return await self._aside(lambda db: self._put(db, tenant, kept_id, kept))
        except StoreFailed as error:
            log.error("%s is not kept: %s", kept_id, error)
            return False

    async def get(self, tenant: bytes, kept_id: str) -> Kept | None:
        return await self._run(lambda db: self._get(db, tenant, kept_id))

    async def change(self, tenant: bytes, kept_id: str, change: Callable[[Kept], None]) -> Kept | None:
        """As it is after the change; None: it is not there, or too large now."""

        def work(db: sqlite3.Connection) -> Kept | None:
            kept = self._get(db, tenant, kept_id)
            if kept is None:
                return None
            change(kept)
            return kept if self._put(db, tenant, kept_id, kept) else None

        return await self._run(work)

    async def delete(self, tenant: bytes, kept_id: str) -> bool:
        what, args = "DELETE FROM kept WHERE id = ? AND tenant = ?", (kept_id, tenant)
        return await self._run(lambda db: db.execute(what, args).rowcount > 0)

    def try_out(self) -> None:
        """To find at the start that a file cannot be used; ValueError."""
        try:
            self._transaction(lambda db: db.execute("SELECT count(*) FROM kept").fetchone())
        except StoreFailed as error:
            raise ValueError(f"response_store: {self._keeping.response_store!r} cannot be used: {error}") from None
        self.close()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
        self._opened = None

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return await self._aside(work)
        except StoreFailed as error:
            log.error("the store of responses cannot be used: %s", error)
            raise HttpError(503, "the store of responses has failed; only requests that need none of it run") from None

    async def _aside(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transaction, work)

    def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            self._opened = self._opened or self._connected()
            with self._opened:
                return work(self._opened)
        except (sqlite3.Error, OSError) as error:
            raise StoreFailed(str(error)) from None

    def _connected(self) -> sqlite3.Connection:
        path = self._keeping.response_store or ":memory:"
        if path != ":memory:":
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # conversations are private
        db = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
        try:
            self._lay_out(db)
            pages = 2 * self._keeping.response_store_bytes // PAGE_BYTES + 64  # whatever our own counting says
            db.execute(f"PRAGMA max_page_count = {pages}")
        except sqlite3.Error:
            db.close()
            raise
        return db

    def _lay_out(self, db: sqlite3.Connection) -> None:
        """SQLite itself does not wait where two processes turn a new file to WAL at once."""
        until_s = time.monotonic() + BUSY_S
        while True:
            try:
                for line in LAYOUT:
                    db.execute(line)
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until_s:
                    raise
            time.sleep(0.01)

    def _put(self, db: sqlite3.Connection, tenant: bytes, kept_id: str, kept: Kept) -> bool:
        body, now_s = msgspec.json.encode(kept), time.time()
        limit = self._keeping.response_store_bytes
        if len(body) > limit:
            return False
        db.execute("DELETE FROM kept WHERE id = ? OR used <= ?", (kept_id, now_s - self._keeping.response_age_s))
        count, total = db.execute("SELECT count(*), ifnull(sum(size), 0) FROM kept").fetchone()
        while count >= self._keeping.max_responses or total + len(body) > limit:
            oldest, size = db.execute("SELECT id, size FROM kept ORDER BY used LIMIT 1").fetchone()
            db.execute("DELETE FROM kept WHERE id = ?", (oldest,))
            count, total = count - 1, total - size
        db.execute("INSERT INTO kept VALUES (?, ?, ?, ?, ?)", (kept_id, tenant, now_s, len(body), body))
        return True

    def _get(self, db: sqlite3.Connection, tenant: bytes, kept_id: str) -> Kept | None:
        now_s = time.time()
        args = (now_s, kept_id, tenant, now_s - self._keeping.response_age_s)
        used = "UPDATE kept SET used = ? WHERE id = ? AND tenant = ? AND used > ? RETURNING body"
        row = db.execute(used, args).fetchone()
        return None if row is None else dict(msgspec.json.decode(row[0]))
