"""Our own servers, proven: the scheduler over the oracle executor; the default model, every world and every fault. And the wheel
penstock-prove, built as `make prove-wheel` does and run in an environment without any package."""

import asyncio
import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from benchmarks.export import write_folder

from penstock.cli import main
from penstock.engine.model_files import resolve_model
from penstock.executor.gguf_header import GgufHeader
from penstock.prove.own.faults import FAULTS
from penstock.prove.own.server import WORLDS
from tests.support import adapters
from tests.support.default_file import needs_model
from tests.support.reference_server import DEFECTS, ReferenceServer
from tests.support.router_fleet import mock_replicas
from tests.support.small_models import RECURRENT, random_model


def write_adapter(folder: Path) -> None:
    """Write a small random adapter for the default model, as PEFT does; it changes the answers."""
    metadata = GgufHeader(resolve_model().path).metadata
    name = metadata["general.architecture"]
    width, num_layers = metadata[f"{name}.embedding_length"], metadata[f"{name}.block_count"]
    modules = [f"model.layers.{layer}.self_attn.o_proj" for layer in range(num_layers)]
    factors = {name: (torch.randn(2, width) * width**-0.5, torch.randn(width, 2) * 2**-0.5) for name in modules}
    adapters.write(folder, factors, rank=2, alpha=1.0)


@pytest.mark.slow
def test_no_block_of_a_pool_that_is_far_too_small_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """The oracle's tokens are hashes of all KV that they read, so a foreign block changes the answer."""
    with mock_replicas(kv_tokens=560, max_model_len=320, max_num_seqs=8, kv_host_bytes=20000) as (replica,):
        code = main(["prove", replica.url, "--exact", "--requests", "300", "--rate", "300"])
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert code == 0 and result["findings"] == {} and result["answers"]["same"] > 200


@needs_model
@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [*WORLDS, *FAULTS])
def test_no_world_and_no_fault_has_findings(name: str, tmp_path: Path) -> None:
    words = ["prove", "--fault" if name in FAULTS else "--world", name, "--requests", "200", "--duration", "600"]
    if (FAULTS[name].world if name in FAULTS else name) in ("uniproc", "ranks", "tiers"):
        write_adapter(tmp_path)
        words += ["--serve-options", f"--enable-lora --lora-modules random={tmp_path}"]
    assert main(words) == 0


@needs_model
@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["qwen3.5", "granite4-mamba", "lfm2"])
def test_models_that_keep_states_have_no_findings(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Small random ones behind the default model's tokenizer."""
    write_folder(None, tmp_path)
    name, fields = RECURRENT[case]
    sizes, ends = {"vocab_size": 49_152, "max_position_embeddings": 2048}, {"bos_token_id": 1, "eos_token_id": 2}
    random_model(name, {**fields, **sizes, **ends, "pad_token_id": 2}).save_pretrained(tmp_path)
    capsys.readouterr()
    code = main(["prove", "--model", str(tmp_path), "--exact", "--requests", "100", "--concurrency", "6"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0 and result["findings"] == {} and result["reached"]["cached tokens"] > 1000


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_wheel_needs_no_package_and_finds_every_planted_defect(tmp_path: Path) -> None:
    subprocess.run(["make", "prove-wheel"], cwd=ROOT, check=True)
    (wheel,) = (ROOT / "dist").glob("penstock_prove-*.whl")
    venv.create(tmp_path / "venv", with_pip=False)
    python, command = tmp_path / "venv/bin/python", str(tmp_path / "venv/bin/penstock-prove")
    install = [sys.executable, "-m", "pip", "-q", "--python", str(python), "install", "--no-index", str(wheel)]
    subprocess.run(install, check=True)

    async def run(defect: str) -> int | None:
        async with ReferenceServer(defect) as url:
            process = await asyncio.create_subprocess_exec(command, url, "--requests", "40", "--rate", "500", env={})
            return await process.wait()

    assert [asyncio.run(run(defect)) for defect in ("", "positions-shifted")] == [0, 1]
    tested = subprocess.run([command, "--self-test"], env={}, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout
    assert f"kill rate: {len(DEFECTS)} of {len(DEFECTS)}, 0 false alarms" in tested.stdout
    without_url = subprocess.run([command], env={}, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert without_url.returncode == 2 and "only `penstock prove` starts servers" in without_url.stderr
