"""Our own servers, proven: the scheduler over the oracle executor; the default model, every world and every fault. The wheel
penstock-prove, built as `make prove-wheel` does and run in an environment without any package. The metrics that are read are
those that the server's library writes."""

import asyncio
import json
import math
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from benchmarks.export import write_folder
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from penstock.cli import main
from penstock.engine.model_files import resolve_model
from penstock.executor.gguf_header import GgufHeader
from penstock.prove.metrics import Metrics
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
    torch.manual_seed(0)
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
@pytest.mark.parametrize("name", [*WORLDS, *FAULTS])
def test_no_world_and_no_fault_has_findings(name: str, tmp_path: Path) -> None:
    words = ["prove", "--fault" if name in FAULTS else "--world", name, "--requests", "200", "--duration", "600"]
    if (FAULTS[name].world if name in FAULTS else name) in ("uniproc", "ranks", "tiers"):
        write_adapter(tmp_path)
        words += ["--serve-options", f"--enable-lora --lora-modules random={tmp_path}"]
    assert main(words) == 0


@needs_model
@pytest.mark.nightly
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


def test_every_sample_is_read_as_the_library_reads_it() -> None:
    registry = CollectorRegistry()
    Counter("tokens", "with a \\ and\na line", ["model"], registry=registry).labels('a "}model\\" \n').inc(3)
    Gauge("blocks", "", ["state"], registry=registry).labels("held").set(math.inf)
    Gauge("blocks_used", "", registry=registry).set(1.5e-7)
    Histogram("seconds", "", registry=registry).observe(0.2)
    text = generate_latest(registry).decode()
    theirs = [(sample.name, sample.value) for each in text_string_to_metric_families(text) for sample in each.samples]
    ours = Metrics.of(text).samples
    assert [(name, value) for name, _, value in ours] == theirs and len(theirs) > 5
    assert ("blocks", 'state="held"', math.inf) in ours


def test_sums_are_over_all_labels_or_by_one_and_lines_in_another_format_are_skipped() -> None:
    snapshot = Metrics.of('a{x="1",y="2"} 3\na{x="1",y="3"} 4 1700000000000\na{x="2"} 5\n\n# a comment\nb 7\n')
    assert (snapshot.total("a"), snapshot.total("b"), snapshot.total("c")) == (12, 7, None)
    assert [snapshot.total("a", label) for label in ('x="1"', 'x="2"', 'y="4"')] == [7, 5, None]
    assert Metrics.of("<html>\na{\na b\na\na 1.2.3\n").samples == []
