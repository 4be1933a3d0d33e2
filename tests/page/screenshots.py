"""Takes the pictures of docs/page.md: the default model at work.

python -m tests.page.screenshots docs
"""

import sys
import threading
from pathlib import Path

import httpx

from tests.support.default_model import default_model
from tests.support.page_browser import started, visit

SIZE = {"width": 1180, "height": 740}
TALE = "Write a long story about a river, a bridge and the people who built it."


def main() -> None:
    folder = Path(sys.argv[1])
    with started() as browser, default_model("SmolLM2-135M-Instruct") as server:
        with visit(browser, server.url, color_scheme="light", viewport=SIZE) as page:
            page.set_default_timeout(300_000)  # on a busy machine too
            page.set_fields(temperature="0", max_tokens="90")
            for question in ("Give me three tips for a good night's sleep.", "What is the capital of France?"):
                page.ask(question)
                page.click("#new")
            page.ask("Write a Python function that adds two numbers.")
            page.screenshot(path=folder / "page-chat.png")
        with visit(browser, f"{server.url}/#watch", color_scheme="dark", viewport=SIZE) as page:
            asking = [threading.Thread(target=ask, args=(server.url, number)) for number in range(6)]
            for thread in asking:
                thread.start()
                page.wait_for_timeout(900)
            page.screenshot(path=folder / "page-live.png")
            for thread in asking:
                thread.join()


def ask(url: str, number: int) -> None:
    body = {"messages": [{"role": "user", "content": f"{TALE} It is number {number}."}], "max_tokens": 120}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()


if __name__ == "__main__":
    main()
