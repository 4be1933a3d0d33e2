"""What may stand in a deployment's file, and what is said of everything else."""

import re
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.engine.commands import serve
from penstock.router import serve as route
from penstock.router.deploy.file import Command, DeployError, Deployment, Restart, Rollout, read

SERVE = Command(("penstock.cli", "serve"), serve)
ROUTE = Command(("penstock.cli", "route"), route)
DOCS = Path(__file__).resolve().parents[3] / "docs"


def parse(folder: Path, text: str) -> Deployment:
    file = folder / "chat.toml"
    file.write_text(text)
    return read(file, SERVE, ROUTE)


def test_an_empty_file_is_one_replica_of_the_default_model(tmp_path: Path) -> None:
    deployment = parse(tmp_path, "")
    assert (deployment.name, deployment.count) == ("penstock", 1)
    assert deployment.template.words == ("penstock.cli", "serve")
    assert deployment.router_words == ("penstock.cli", "route")
    assert (deployment.template.cpus, deployment.template.gpus, deployment.router_cpus) == (1.0, None, 0.0)
    assert (deployment.rollout, deployment.restart) == (Rollout(), Restart())


def test_flags_go_to_their_commands_and_files_beside_it_by_their_whole_path(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    deployment = parse(
        tmp_path,
        """
        [model]
        model = "weights"
        served-model-name = ["a", "b"]
        max-model-len = 100
        kv-cache-bytes = "8MiB"
        gpu_memory_utilization = 0.5
        enforce-eager = true
        enable-prefix-caching = false
        max-num-seqs = 16
        hf-overrides = { rope_theta = 1000 }
        [router]
        cpus = 2
        policy = "prefix"
        tokenizer = "weights"
        """,
    )
    model = str(tmp_path / "weights")
    assert deployment.template.words[2:] == (
        *(model, "--no-enable-prefix-caching", "--enforce-eager", "--gpu-memory-utilization=0.5"),
        *('--hf-overrides={"rope_theta": 1000}', "--kv-cache-bytes=8MiB"),
        *("--max-model-len=100", "--max-num-seqs=16", "--served-model-name", "a", "b"),
    )
    assert deployment.router_words[2:] == ("--policy=prefix", f"--tokenizer={model}")
    assert deployment.router_cpus == 2.0


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        ("", None),
        ("device = 'cpu'", 0.0),
        ("executor = 'ray'\ntensor-parallel-size = 4", 0.0),
        ("[replicas]\ngpus = 0.5", 0.5),
    ],
)
def test_gpus_are_the_clusters_to_say_unless_a_replica_needs_none(
    tmp_path: Path, options: str, gpus: float | None
) -> None:
    assert parse(tmp_path, f"[model]\n{options}").template.gpus == gpus


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[replicas", "not TOML"),
        ("[replica]", "replica: there is no such key; did you mean replicas?"),
        ("replicas = 3", "replicas: 3 given; a table is expected: [replicas]"),
        ("name = 'a b'", "name: 'a b' given; expected `str` matching regex"),
        ("[replicas]\ncount = 0", "replicas.count: 0 given; expected `int` >= 1"),
        ("[replicas]\ncount = 2000", "replicas.count: 2000 given; expected `int` <= 1024"),
        ("[replicas]\ncount = '2'", "replicas.count: '2' given; expected `int`, got `str`"),
        ("[replicas]\ncuont = 2", "replicas.cuont: there is no such key; did you mean replicas.count?"),
        ("[replicas]\nfrobs = 2", "replicas.frobs: there is no such key; known are replicas.count, replicas.cpus"),
        ("[replicas]\nresources = { disk = 0 }", "replicas.resources: {'disk': 0} given; expected `float` > 0.0"),
        ("[replicas]\nresources = { CPU = 2 }", "replicas.resources.CPU: Ray counts it itself"),
        ("[replicas]\ngpus = 1.5", "replicas.gpus: 1.5 given; beyond 1 Ray gives whole ones"),
        ("[replicas]\nenv = { 'A=B' = 'x' }", "replicas.env.'A=B': neither a name with ="),
        ('[replicas]\nenv = { A = "x\\u0000" }', "replicas.env.'A': neither"),
        ("[replicas]\nenv = { A = 1 }", "replicas.env: {'A': 1} given; expected `str`, got `int`"),
        ("[replicas.env]\nPENSTOCK_API_KEY = 'x'", "replicas.env.PENSTOCK_API_KEY: keys are not written here"),
        ("[rollout]\nsurge = 0", "rollout.surge: 0 given, and max-unavailable is 0 too"),
        ("[rollout]\nmax-unavailable = 2", "rollout.max-unavailable: 2 given; at most replicas.count, 1"),
        ("[rollout]\nready_s = nan", "rollout.ready-s: nan given; expected `float` >= 0.0"),
        ("[rollout]\nready_s = 1\nready-s = 1", "rollout.ready-s: given twice, with '-' and with '_'"),
        ("[restart]\nlimit = true", "restart.limit: True given; expected `int`, got `bool`"),
        (
            "[model]\nmax-model-length = 3",
            "model.max-model-length: there is no such key; did you mean model.max-model-len?",
        ),
        ("[model]\nmax-num-seqs = '3'", "model.max-num-seqs: '3' given; expected `int`, got `str`"),
        ("[model]\nmax-model-len = '3 k'", "model.max-model-len: '3 k' is not a number of tokens"),
        ("[model]\nswap-space = 4", "model.swap-space: use --kv-host-bytes"),
        ("[model]\nmax-model-len = 0", "model.max_model_len: 0 given; expected `int` >= 1"),
        ("[model]\nkv-cache-bytes = '8 gigs'", "model.kv-cache-bytes: '8 gigs' is not a size"),
        ("[model]\nkv-cache-bytes = 1\nkv-cache-memory-bytes = 1", "model.kv-cache-memory-bytes: not allowed with"),
        ("[model]\ndtype = 'int3'", "model.dtype: invalid choice: 'int3' (choose from"),
        ("[model]\nenforce-eager = 1", "model.enforce-eager: 1 given; expected `bool`, got `int`"),
        ("[model]\nray-allow-open-dashboard = false", "model.ray-allow-open-dashboard: false given; leave the key out"),
        ("[model]\nno-enable-prefix-caching = true", "model.no-enable-prefix-caching: there is no such key"),
        ("[model]\nport = 8000", "model.port: deploy sets this itself"),
        ("[model]\napi-key = 'x'", "model.api-key: deploy sets this itself; clients' key is PENSTOCK_API_KEY"),
        ("[model]\nmodel = '--port'", "model."),
        ("[model]\nmodel = ''", "model.model: '' given; expected `str` of length >= 1"),
        ("[model.hf-overrides]\na = 2026-01-01", "model.hf-overrides: {'a': datetime.date(2026, 1, 1)} given; no date"),
        ("[router]\nbackend = ['http://x']", "router.backend: deploy sets this itself; replicas.count says how many"),
        ("[router]\nport = 70000", "router.port: 70000 given; expected `int` <= 65535"),
        ("[router]\npolicy = 'best'", "router.policy: invalid choice: 'best' (choose from"),
        ("[router]\ncpus = -1", "router.cpus: -1 given; expected `float` >= 0.0"),
    ],
)
def test_a_mistake_is_named_with_its_field_value_and_limit(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(DeployError) as error:
        parse(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path}/chat.toml: {said}")


def test_the_example_of_the_page_is_read_as_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```toml\n(.*?)```", (DOCS / "deploy.md").read_text(), re.DOTALL)
    assert len(examples) >= 2
    for number, text in enumerate(examples):
        file = tmp_path / f"{number}.toml"
        file.write_text(text)
        assert main(["deploy", str(file), "--check"]) == 0, text
    assert " of serve" in capsys.readouterr().out


def test_a_mistake_in_the_file_is_one_line_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", str(tmp_path / "none.toml")]) == 2
    assert capsys.readouterr().err == f"penstock: {tmp_path}/none.toml: No such file or directory\n"
