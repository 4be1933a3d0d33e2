"""Runs `penstock prove` against several servers in turn, and prints a table of how much each could be asked.

    make grid ARGS="--server NAME=COMMAND ... [--self-test] [--write docs/trust.md] [-- options of penstock prove]"

A command has {port} in it, {model} for the default model's file and {folder} for its weights in float32 as a folder;
`docs/decisions/server-as-reference.md` has those of Penstock, vLLM and llama.cpp. Each server is its own reference, so
the commands may differ. The servers run one after the other, and each is restarted once. With --write, the table
replaces the one in that page, unless Penstock is the only server with nothing refused and nothing left out: such a
table compares what we thought of.
"""

import argparse
import contextlib
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.prove.own.server import STOP_GRACE_S, free_port, group_of, stop
from tests.support.default_file import default_file

ROOT = Path(__file__).resolve().parents[1]
START_S = 900.0
BEGIN, END = "<!-- grid -->\n", "<!-- end of grid -->\n"
HEAD = "| server | asked | findings | refused by the server | left out |\n|---|---|---|---|---|\n"


def fetch(url: str) -> Any:
    """Return the JSON at a URL, or nothing."""
    with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)
    return {}


@contextlib.contextmanager
def serving(command: str, names: dict[str, str], folder: Path) -> Iterator[str]:
    """Start a server, wait until it lists its model, and yield its URL. `folder` gets its output, the process id, and a
    script that starts it again."""
    port = free_port()
    url, words = f"http://127.0.0.1:{port}", [word.format(port=port, **names) for word in shlex.split(command)]
    start, leader, log = folder / "start", folder / "leader", folder / "log"
    start.write_text(f"echo $$ > {leader}\nexec {shlex.join(words)} > {log} 2>&1 < /dev/null\n")
    process = subprocess.Popen(["sh", start], start_new_session=True)
    try:
        until_s = time.monotonic() + START_S
        while not fetch(f"{url}/v1/models"):
            if process.poll() is not None or time.monotonic() > until_s:
                raise SystemExit(f"server: `{command}` did not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.5)
        yield url
    finally:
        stop(process)
        end_group(int(leader.read_text()))


def end_group(leader: int) -> None:
    """End the processes of a server that `prove` has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGTERM)
        until_s = time.monotonic() + STOP_GRACE_S
        while group_of(leader) and time.monotonic() < until_s:
            time.sleep(0.1)
        os.killpg(leader, signal.SIGKILL)


def restart_options(folder: Path) -> list[str]:
    """Return the options of `prove` that restart the server. It has ended when it is gone or a zombie."""
    wait = "while grep -qs '^State:.[RSDT]' /proc/$leader/status; do sleep 0.1; done"
    return ["--stop", f"leader=$(cat {folder}/leader); kill $leader; {wait}", "--start", f"exec sh {folder}/start"]


def version_of(url: str) -> str:
    """Return what the server calls its version: at /version, or in llama.cpp's /props."""
    return str(fetch(f"{url}/version").get("version") or fetch(f"{url}/props").get("build_info") or "unknown")


def row(name: str, version: str, result: dict[str, Any]) -> str:
    """Return the table's row of a server."""
    found = ", ".join(f"{count} {kind}" for kind, count in result["findings"].items()) or "none"
    refused, left_out = (
        ", ".join(each.removeprefix("load: ") for each in result[of]) for of in ("refused", "left_out")
    )
    asked = f"{result['asked']} of {result['checks']}"
    return f"| {name} {version} | {asked} | {found} | {refused or 'nothing'} | {left_out or 'nothing'} |\n"


def is_fair(results: dict[str, dict[str, Any]]) -> bool:
    """Tell whether Penstock is not the only server that could be asked everything."""
    whole = [name for name, result in results.items() if result["asked"] == result["checks"]]
    return whole != ["Penstock"]


def with_table(page: str, table: str) -> str:
    """Return the page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise SystemExit(f"write: the page has no lines {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}{table}{END}{after}"


def main() -> None:
    words = sys.argv[1:]
    own, options = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    parser.add_argument("--self-test", action="store_true", help="first find the planted defects (some minutes)")
    args = parser.parse_args(own)
    servers = dict(text.split("=", 1) for text in args.server if "=" in text)
    if not servers or len(servers) < len(args.server):
        raise SystemExit("server: NAME=COMMAND is expected, each with another name")
    rate = f"; the self-test's {kill_rate()}" if args.self_test else ""
    results, rows = dict[str, dict[str, Any]](), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        names = {"model": str(default_file()), "folder": str(folder / "model")}
        if any("{folder}" in command for command in servers.values()):
            export = [sys.executable, f"{ROOT}/benchmarks/export.py", "--output", names["folder"], "--dtype", "float32"]
            subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
        for name, command in servers.items():
            with serving(command, names, folder) as url:
                print(f"== {name} {version_of(url)}", flush=True)
                results[name] = prove(url, [*options, *restart_options(folder)], folder / "json")
                rows.append(row(name, version_of(url), results[name]))
    command = shlex.join(["penstock", "prove", "URL", *options])
    table = f"{datetime.date.today()}, `{command}`, each server restarted once{rate}:\n\n{HEAD}{''.join(rows)}"
    print(table)
    if args.write and not is_fair(results):
        raise SystemExit("write: Penstock alone could be asked everything; the table is not written")
    if args.write:
        args.write.write_text(with_table(args.write.read_text(), table))


def kill_rate() -> str:
    """Run the self-test and return its last line: how many of the planted defects it found."""
    program = "import penstock.prove as p, tests.support.reference_server as r; r.self_test(p.prove, p.ProveOptions())"
    output = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return output.stdout.splitlines()[-1]


def prove(url: str, options: Sequence[str], path: Path) -> dict[str, Any]:
    """Prove the server; return the result, which is written to `path`. Findings are no failure of this program."""
    words = ["prove", url, *options, "--json", str(path)]
    process = subprocess.run([sys.executable, "-P", "-m", "penstock.cli", *words], check=False)
    if process.returncode not in (0, 1, 3):
        raise SystemExit(process.returncode)
    return json.loads(path.read_text())  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
