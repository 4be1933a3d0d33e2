"""How large the house is: lines of Python, C, JavaScript, CSS and HTML per room, in all, and of what one chat loads.

`python -m tests.size` prints them beside the budgets of pyproject.toml and fails beyond one: `make size`, and part of
`make check`. A feature pays for its lines, best by removing others.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from pathlib import Path

from tests.support import text_samples

ROOT = Path(__file__).resolve().parent.parent
COUNTED = (".py", ".c", ".h", ".js", ".css", ".html")
ROOMS = ("engine", "executor", "cache", "eplb", "router", "csrc", "src")
# The C that a chat on a CPU runs through: its kernels, the block keys, the search for repeats, the masks.
CHAT_IN_C = ("csrc/cpu_", "csrc/keys.", "csrc/sha256.", "csrc/repeats.")
RECORDER = """
import os, sys
class Recorder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "penstock":
            with open(os.environ["PENSTOCK_IMPORTS"], "a") as file:
                file.write(name + "\\n")
sys.meta_path.insert(0, Recorder())
"""
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
CONFIG |= {"max_position_embeddings": 256, "vocab_size": 512, "torch_dtype": "bfloat16"}


def lines(paths: list[Path]) -> int:
    return sum(path.read_text().count("\n") for path in paths)


def counted(*folders: str) -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    paths = [ROOT / name for name in listed if name.endswith(COUNTED)]
    return [path for path in paths if path.is_file()]


def loaded_by_a_chat() -> list[Path]:
    """The files of ours behind one chat over HTTP: those that server and core import, and the C beneath them."""
    with tempfile.TemporaryDirectory() as folder:
        model, seen, log = (Path(folder) / name for name in ("model", "imports", "log"))
        model.mkdir()
        template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        text_samples.folder(
            model, text_samples.byte_level(), config=CONFIG, tokenizer_config={"chat_template": template}
        )
        (Path(folder) / "sitecustomize.py").write_text(RECORDER)
        ours = {"PYTHONPATH": f"{folder}:{ROOT / 'src'}", "PENSTOCK_IMPORTS": str(seen)}
        environment = os.environ | ours | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "penstock.cli", "serve", str(model), "--load-format", "dummy", "--port", "0"]
        with (
            log.open("w") as errors,
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as server,
        ):
            assert server.stdout is not None
            try:
                said = ""
                while not (found := re.search(r"http://[\d.]+:\d+", said)):
                    line = server.stdout.readline()
                    assert line, f"the server ended: {said}{log.read_text()}"
                    said += line
                ask(found[0])
            finally:
                server.send_signal(signal.SIGTERM)
                server.stdout.read()
        names = set(seen.read_text().split())
    modules = [ROOT.joinpath("src", *name.split(".")) for name in names]
    files = [
        path for module in modules for path in (module.with_suffix(".py"), module / "__init__.py") if path.is_file()
    ]
    return [path.resolve() for path in files] + [
        path for path in counted("csrc") if str(path.relative_to(ROOT)).startswith(CHAT_IN_C)
    ]


def ask(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": True}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")


def sizes() -> dict[str, int]:
    found = {room: lines(counted(room)) for room in ROOMS}
    found["product"] = sum(found.values())
    found["chat"] = lines(loaded_by_a_chat())
    found["benchmarks"] = lines(counted("benchmarks"))
    return found


def main() -> int:
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["penstock"]["size"]
    found = sizes()
    assert budgets.keys() == found.keys(), "pyproject.toml has a budget for every line of this table, and no other"
    for name, size in found.items():
        print(f"{name:<12}{size:>8,} of {budgets[name]:>7,}{'   beyond its budget' if size > budgets[name] else ''}")
    return int(any(size > budgets[name] for name, size in found.items()))


if __name__ == "__main__":
    sys.exit(main())
