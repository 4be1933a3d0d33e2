"""The files of deploy/: their commands are valid, and their times, ports and paths fit together.

No container engine or cluster is needed.
"""

import copy
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml  # type: ignore[import-untyped]

from penstock import health
from penstock.engine.options import size_bytes
from penstock.engine.server.server_config import ServerConfig
from penstock.router.config import RouterConfig
from tests.docs.test_pages import ROOT, check_penstock
from tests.support.refusals import cases
from tests.support.running_server import running

DEPLOY = ROOT / "deploy"
COMPOSE = sorted(DEPLOY.glob("compose*.yaml"))
DOCKERFILE = DEPLOY / "Dockerfile"
PORTS = {"serve": ServerConfig().port, "route": RouterConfig().port}
DRAIN_S = {"serve": ServerConfig().drain_timeout_s, "route": RouterConfig().timeouts.drain_s}


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", "")
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


class Pod:
    """The pods of a deployment, each with a container that runs one command of penstock."""

    def __init__(self, deployment: dict[str, Any]) -> None:
        self.selector = deployment["spec"]["selector"]["matchLabels"]
        self.metadata = deployment["spec"]["template"]["metadata"]
        self.spec = deployment["spec"]["template"]["spec"]
        (self.container,) = self.spec["containers"]
        self.command: list[str] = ["penstock", *self.container["args"]]
        self.volumes = {volume["name"]: volume for volume in self.spec.get("volumes", [])}


_MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
RESOURCES = [resource for path in _MANIFESTS for resource in yaml.safe_load_all(path.read_text())]
PODS = {each["metadata"]["name"]: Pod(each) for each in RESOURCES if each["kind"] == "Deployment"}
SCHEMAS = json.loads(Path(__file__).with_name("kubernetes_schemas.json").read_text())
REPLICA, ROUTER, BEHIND_PICKER = (PODS[f"penstock-{name}"] for name in ("replica", "router", "llm-d"))


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_services_of_compose_have_valid_commands_and_time_to_drain(path: Path) -> None:
    services = yaml.safe_load(path.read_text())["services"]
    for service in services.values():
        check_penstock(["penstock", *service["command"]])
        verb = service["command"][0]
        assert int(service["stop_grace_period"].removesuffix("s")) > DRAIN_S[verb] + 5
        assert all(port == f"127.0.0.1:{PORTS[verb]}:{PORTS[verb]}" for port in service.get("ports", []))
        for source in re.findall(r"dns:(\w+):", " ".join(service["command"])):
            assert source in services


@pytest.mark.parametrize("pod", PODS.values(), ids=PODS)
def test_pods_have_valid_commands_probes_of_served_routes_and_time_to_drain(pod: Pod) -> None:
    check_penstock(pod.command)
    verb, container = pod.command[1], pod.container
    assert container["ports"][0] == {"name": "http", "containerPort": PORTS[verb]}
    assert pod.metadata["annotations"]["prometheus.io/port"] == str(PORTS[verb])
    assert container["livenessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    waits = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod.spec["terminationGracePeriodSeconds"] > waits + DRAIN_S[verb] + 5
    assert {mount["name"] for mount in container.get("volumeMounts", [])} == pod.volumes.keys()


def kind_of(document: dict[str, Any]) -> str:
    return f"{document['apiVersion']} {document['kind']}"


def documents() -> dict[str, dict[str, Any]]:
    """Return all documents by kind and name, with that of the picker, which is a text in a ConfigMap."""
    found = {f"{kind_of(each)} {each['metadata']['name']}": each for each in RESOURCES}
    picker = yaml.safe_load(found["v1 ConfigMap penstock-picker"]["data"]["penstock.yaml"])
    return copy.deepcopy(found | {f"{kind_of(picker)} picker": picker})


def check_schema(document: dict[str, Any]) -> None:
    """Raise ValidationError if a document differs from the schema of its kind."""
    jsonschema.Draft202012Validator(SCHEMAS).validate({kind_of(document): document})


@pytest.mark.parametrize("name", documents())
def test_a_manifest_has_the_fields_and_types_of_the_published_api(name: str) -> None:
    check_schema(documents()[name])


@pytest.mark.parametrize(("name", "path", "key", "value"), cases(__file__, "wrong fields of manifests"))
def test_a_wrong_field_of_a_manifest_is_found(name: str, path: list[str | int], key: str | int, value: Any) -> None:
    document = documents()[name]
    part: Any = document
    for step in path:
        part = part[step]
    if value is None:
        del part[key]
    else:
        part[key] = value
    with pytest.raises(jsonschema.ValidationError):
        check_schema(document)


def test_the_memory_of_a_replica_holds_its_tiers() -> None:
    options = dict(zip(REPLICA.command, REPLICA.command[1:], strict=False))
    device, host, disk = (size_bytes(options[f"--kv-{tier}-bytes"]) for tier in ("cache", "host", "disk"))
    memory = {size_bytes(each["memory"] + "B") for each in REPLICA.container["resources"].values()}
    assert host >= 2 * device and disk > host
    assert memory == {max(memory)} and max(memory) >= device + host + 2**30
    claim = REPLICA.volumes["cache"]["ephemeral"]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"]
    assert disk < 0.95 * size_bytes(claim + "B"), "the file system needs space as well"


def test_services_and_budgets_select_the_pods_and_routers_find_the_replicas() -> None:
    selectors = [pod.selector for pod in PODS.values()]
    assert all(pod.selector.items() <= pod.metadata["labels"].items() for pod in PODS.values())
    services = {each["metadata"]["name"]: each["spec"] for each in RESOURCES if each["kind"] == "Service"}
    budgets = [each["spec"] for each in RESOURCES if each["kind"] == "PodDisruptionBudget"]
    assert [service["selector"] for service in services.values()] == selectors
    assert [budget["selector"]["matchLabels"] for budget in budgets] == selectors
    (name, port), *_ = re.findall(r"dns:(\w+):(\d+)", " ".join(ROUTER.command))
    assert services[name]["clusterIP"] == "None" and services[name]["selector"] == REPLICA.metadata["labels"]
    assert [each["port"] for each in services[name]["ports"]] == [int(port)]


def test_the_endpoint_picker_of_llm_d_finds_the_servers_their_tokens_and_their_events() -> None:
    pool, picker = (next(each for each in RESOURCES if each["kind"] == kind) for kind in ("InferencePool", "ConfigMap"))
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    assert pool["spec"]["selector"]["matchLabels"] == BEHIND_PICKER.selector
    assert pool["spec"]["targetPorts"] == [{"number": PORTS["serve"]}]
    config = yaml.safe_load(picker["data"]["penstock.yaml"])
    plugins = {each["type"]: each.get("parameters") for each in config["plugins"]}
    sources, (profile,) = config["dataLayer"]["sources"], config["schedulingProfiles"]
    used = [*sources, *(each for source in sources for each in source["extractors"]), *profile["plugins"]]
    assert {each["pluginRef"] for each in used} == plugins.keys() - {"token-producer"}
    options = dict(word.removeprefix("--").split("=", 1) for word in BEHIND_PICKER.command[2:])
    model, sent = options["served-model-name"], json.loads(options["kv-events-config"])
    renderer = {"url": f"http://penstock-render:{PORTS['serve']}"}
    assert plugins["token-producer"] == {"modelName": model, "vllm": renderer}
    assert sent["topic"] == f"kv@$(POD_IP):{PORTS['serve']}@{model}"
    index = plugins["precise-prefix-cache-producer"]
    assert index["tokenProcessorConfig"] == {"blockSizeTokens": int(options["block-size"])}
    ports = [int(sent[name].rpartition(":")[2]) for name in ("endpoint", "replay_endpoint")]
    found = index["kvEventsConfig"]["podDiscoveryConfig"]
    assert ports == [found["socketPort"], found["replaySocketPort"]]
    assert ports == [each["containerPort"] for each in BEHIND_PICKER.container["ports"][1:]]


def test_images_run_as_a_user_of_their_own_and_end_with_a_valid_command() -> None:
    lines = instructions(DOCKERFILE)
    last_stage = dict(lines[max(at for at, (word, _) in enumerate(lines) if word == "FROM") :])
    assert last_stage["USER"] == "10001"
    assert json.loads(last_stage["ENTRYPOINT"]) == ["/opt/penstock/bin/start.sh"]
    check_penstock(["penstock", *json.loads(last_stage["CMD"])])
    assert last_stage["HEALTHCHECK"].split("CMD ")[1] == '["python", "-m", "penstock.health"]'
    assert last_stage["EXPOSE"] == "8000"
    kept = dict(re.findall(r"(HF_HOME|TRITON_CACHE_DIR)=(\S+)", last_stage["ENV"]))
    assert kept["TRITON_CACHE_DIR"].startswith(kept["HF_HOME"] + "/") and "/penstock/models" in kept["HF_HOME"]
    assert all(f":{kept['HF_HOME']}" in path.read_text() for path in COMPOSE)
    for word, rest in lines:
        assert word != "ADD"
        assert word != "FROM" or re.match(r"python:\d+\.\d+-slim-\w+", rest)
        assert "install" not in rest or " gcc " not in rest or " python3-dev " in rest, "a compiler without headers"
        assert "apt-get install" not in rest or ("--no-install-recommends" in rest and "rm -rf /var/lib/apt" in rest)
        assert "pip install" not in rest or ("--no-cache-dir" in rest and "-c constraints.txt" in rest)


def test_a_container_adds_the_kernels_of_its_image_to_those_it_has(tmp_path: Path) -> None:
    image, kept = tmp_path / "opt/triton", tmp_path / "models/triton"
    for folder, name in ((image, "OLD/a.json"), (image, "NEW/b.json"), (kept, "OLD/a.json")):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("image" if folder is image else "volume")
    start, penstock = (tmp_path / "opt/bin" / name for name in ("start.sh", "penstock"))
    start.parent.mkdir()
    shutil.copy(DEPLOY / start.name, start)
    penstock.write_text("#!/bin/sh\nprintf '%s|' $$ \"$@\"\n")
    penstock.chmod(0o755)
    environment = {"PATH": f"{start.parent}:{os.environ['PATH']}", "TRITON_CACHE_DIR": str(kept)}
    with subprocess.Popen([start, "serve", "a b"], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate()[0] == f"{process.pid}|serve|a b|"
    assert [(kept / name).read_text() for name in ("OLD/a.json", "NEW/b.json")] == ["volume", "image"]


def test_the_context_of_images_has_every_file_of_the_package_and_no_other() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    allowed = {line.removeprefix("!") for line in lines if line.startswith("!")}
    rooms = {link.readlink().name for link in (ROOT / "src" / "penstock").iterdir() if link.is_symlink()}
    metadata = {"pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt"}
    compiling = {"deploy/compile_kernels.py", "deploy/start.sh"}
    compiling |= {"benchmarks/gpu/shapes.py", "benchmarks/gpu/shapes.json"}
    assert allowed == metadata | rooms | {"src", "csrc"} | compiling
    assert all((ROOT / name).exists() for name in allowed)


@pytest.mark.parametrize(("command", "address"), cases(__file__, "commands of images", PORTS=PORTS))
def test_the_health_check_asks_where_the_command_listens(command: str, address: tuple[str, int] | None) -> None:
    assert health.listening_address(command) == address


def test_the_health_check_of_images_tells_a_healthy_server_from_others() -> None:
    with running() as server:
        command = f"penstock serve --port {server.url.rpartition(':')[2]}"
        assert health.check(command) == ""
        server.engine.hang()
        assert health.check(command) == "status 503"
    assert health.check(command) != "" and health.check("penstock bench latency") == ""
