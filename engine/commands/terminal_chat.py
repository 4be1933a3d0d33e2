"""The command `penstock chat`: a conversation in the terminal, with a server at a URL or with one that it starts.

Ctrl-C stops an answer and Ctrl-D ends the conversation. A failed answer is reported, and the conversation goes on
without the question.
"""

import argparse
import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from penstock.engine.model_files import DEFAULT_NAME
from penstock.prove.http_client import key_header
from penstock.prove.own.server import DIE_WITH, PENSTOCK, stop

WITHOUT_PROXY = build_opener(ProxyHandler({}))


class ChatError(Exception):
    """An invalid argument, or a server that does not answer."""


USER_ERRORS = (ChatError,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = f"URL of an OpenAI-compatible server, or a model to serve meanwhile (default: {DEFAULT_NAME})"
    parser.add_argument("server", nargs="?", metavar="URL|MODEL", help=text)
    parser.add_argument("--system-prompt", metavar="TEXT", help="instructions to the model (default: none)")
    parser.add_argument("--model", metavar="NAME", help="the model at the URL (default: the first that it lists)")


def run(args: argparse.Namespace) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` line editing and a history
    if (args.server or "").startswith(("http://", "https://")):
        return TerminalChat(args.server.rstrip("/").removesuffix("/v1"), key_header(), args).run()
    if args.model:
        raise ChatError("model: given; only a server at a URL has several")
    with own_server(args) as (url, key):
        return TerminalChat(url, key, args).run()


@contextlib.contextmanager
def own_server(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, str]]]:
    """Start `penstock serve` on a free port with a secret key; yield its URL and the header with the key.

    Its session is its own, so that Ctrl-C does not reach it. Its errors appear on our standard error.
    """
    key, model = secrets.token_hex(16), [args.server] if args.server else []
    words = [*DIE_WITH, str(os.getpid()), *PENSTOCK, "serve", *model, "--port", "0", "--log-level", "warning"]
    print(f"Starting {args.server or DEFAULT_NAME}", file=sys.stderr)
    pipe, null, environment = subprocess.PIPE, subprocess.DEVNULL, os.environ | {"PENSTOCK_API_KEY": key}
    with subprocess.Popen(words, stdin=null, stdout=pipe, env=environment, start_new_session=True) as server:
        try:
            assert server.stdout is not None
            urls = (re.match(rb"Ready after .*: (http\S+)", line) for line in server.stdout)
            url = next(filter(None, urls), None)
            if url is None:
                raise ChatError("the server ended before it was ready")
            yield url[1].decode(), {"Authorization": f"Bearer {key}"}
        finally:
            stop(server)


class TerminalChat:
    """The messages so far, and the server that answers."""

    def __init__(self, url: str, key: dict[str, str], args: argparse.Namespace) -> None:
        self._url, self._headers = url, {"Content-Type": "application/json", **key}
        self._messages: list[dict[str, str]] = []
        if args.system_prompt:
            self._messages.append({"role": "system", "content": args.system_prompt})
        self._model = args.model or self._first_model()

    def run(self) -> int:
        """Answer questions until the end of the input; return 1 if the last answer failed."""
        print(f"{self._model}: Ctrl-C stops an answer, Ctrl-D ends the conversation", file=sys.stderr)
        failure = None
        while True:
            try:
                question = input("> " if sys.stdin.isatty() else "")
            except EOFError:
                return 0 if failure is None else 1
            except KeyboardInterrupt:  # discards the line, as in a shell
                print()
                continue
            if question.strip() and (failure := self._ask(question)):
                print(f"penstock: {failure}", file=sys.stderr)

    def _ask(self, question: str) -> Exception | None:
        """Print the answer as it arrives; return why it failed. The part of a stopped answer remains in the conversation."""
        pieces, failure = list[str](), None
        self._messages.append({"role": "user", "content": question})
        try:
            for delta in self._stream():
                pieces.append(delta.get("content") or "")
                shown = delta.get("reasoning") or pieces[-1]
                print("".join(char for char in shown if char.isprintable() or char in "\n\t"), end="", flush=True)
        except KeyboardInterrupt:
            print(" (stopped)", end="")
        except (ChatError, HTTPException, OSError, ValueError, LookupError) as error:
            failure = error
        print()
        if failure is None and any(pieces):
            self._messages.append({"role": "assistant", "content": "".join(pieces)})
        else:
            self._messages.pop()
        return failure

    def _stream(self) -> Iterator[dict[str, Any]]:
        """Yield the pieces of the answer to the last message."""
        has_ended = False
        body = {"model": self._model, "messages": self._messages, "stream": True}
        with self._open("/v1/chat/completions", body) as lines:
            for line in lines:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ChatError(f"the answer failed: {event['error']}"[:300])
                for choice in event["choices"]:
                    has_ended = has_ended or choice.get("finish_reason") is not None
                    yield choice["delta"]
        if not has_ended:
            raise ChatError("the server ended in the middle of the answer")

    def _first_model(self) -> str:
        try:
            with self._open("/v1/models") as answer:
                return str(json.load(answer)["data"][0]["id"])
        except (HTTPException, ValueError, LookupError, TypeError) as error:
            raise ChatError(f"{self._url}/v1/models lists no model ({error})") from None

    def _open(self, path: str, body: Any = None) -> Any:
        """Send a request and return the response; raise ChatError with the server's own message if it is an error."""
        request = Request(self._url + path, json.dumps(body).encode() if body else None, self._headers)
        try:
            return WITHOUT_PROXY.open(request)
        except HTTPError as error:
            text = error.read(2000).decode(errors="replace")
            with contextlib.suppress(ValueError, LookupError, TypeError):
                text = json.loads(text)["error"]["message"]
            raise ChatError(f"HTTP {error.code}: {text[:300]}") from None
        except OSError as error:
            raise ChatError(f"no server answers at {self._url} ({getattr(error, 'reason', error)})") from None
