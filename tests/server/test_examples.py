"""Operators' example files: every metric in the dashboard exists, and every flag is one of the command."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from xla_engine.cli.serve import serve

FOLDER = Path(__file__).parents[2] / "examples" / "server"


def test_the_dashboard_asks_for_metrics_that_exist(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
    shown = set(re.findall(r"^([a-z0-9_:]+)(?:\{| )", http.get("/metrics").text, re.MULTILINE))
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"(?:vllm:|xla_engine_)[a-z_0-9]+", target["expr"])
    }
    assert len(asked) >= 10 and asked <= shown, asked - shown


def test_the_files_name_flags_of_the_command() -> None:
    known = {name for parameter in serve.params for name in parameter.opts}
    files = ["Dockerfile", "Dockerfile.cuda", "compose.yaml", "xla-engine.service"]
    used = {
        flag
        for file in files
        for line in (FOLDER / file).read_text().splitlines()
        if line.strip().startswith(("ENTRYPOINT", "ExecStart=", "command:"))
        for flag in re.findall(r"(?<=[ \"])--[a-z-]+", line)
    }
    assert {"--batch-dir", "--host", "--uds", "--max-num-seqs", "--api-key-file"} <= used <= known


def test_each_example_serves_a_mounted_model_with_arguments_that_the_command_takes() -> None:
    yaml = pytest.importorskip("yaml")
    engine = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]["engine"]
    (mount,) = [volume for volume in engine["volumes"] if volume.startswith("${MODEL")]
    assert mount.endswith(":/model:ro") and engine["command"][0] == "/model"
    for name in ("Dockerfile", "Dockerfile.cuda"):
        text = (FOLDER / name).read_text()
        assert re.search(r"docker run .*-v /path/to/model:/model:ro \S+ /model\n", text)
        (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
        assert _model([*json.loads(entry)[2:], *engine["command"]]) == "/model"
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(FOLDER / "xla-engine.service")
    command = shlex.split(unit["Service"]["ExecStart"])
    assert command[:2] == ["/opt/xla-engine/bin/xla-engine", "serve"] and _model(command[2:]) == "${MODEL}"
    assert "Environment=MODEL=/" in (FOLDER / "xla-engine.service").read_text()


def _model(arguments: list[str]) -> str | None:
    """The model that `xla-engine serve` would take with these arguments."""
    context = serve.make_context("serve", arguments, resilient_parsing=True)
    model: str | None = context.params["model_argument"]
    return model


@pytest.mark.skipif(shutil.which("docker") is None, reason="no docker on this machine")
def test_compose_reads_the_file() -> None:
    command = ["docker", "compose", "-f", FOLDER / "compose.yaml", "config", "--quiet"]
    if subprocess.run([*command[:2], "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker has no compose plugin")
    for model, status in (({"MODEL": "/m"}, 0), ({"MODEL": ""}, 1)):
        done = subprocess.run(command, env=os.environ | model, capture_output=True, text=True, check=False)
        assert bool(done.returncode) == bool(status), done.stderr
    assert "set MODEL to the path of a model" in done.stderr


def test_the_documentation_names_every_flag_that_operators_set() -> None:
    page = (FOLDER.parents[1] / "docs" / "server.md").read_text()
    engine = {"--seed", "--temperature", "--generation-config", "--override-generation-config"}
    engine |= {"--no-access-log", "model_argument"}
    own = {parameter.opts[0] for parameter in serve.params[: [p.name for p in serve.params].index("model")]}
    assert {flag for flag in own - engine if flag not in page} == set()


def test_compose_prometheus_and_grafana_fit_together() -> None:
    """Every mounted file exists, Prometheus scrapes the server's address, and the panels find Prometheus."""
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    assert set(services) == {"engine", "prometheus", "grafana"}
    mounts = [volume.split(":") for each in services.values() for volume in each.get("volumes", ())]
    files = {source: target for source, target, *_ in mounts if source.startswith("./")}
    assert len(files) == 4 and all((FOLDER / source).is_file() for source in files)
    assert files["./prometheus.yml"] == "/etc/prometheus/prometheus.yml"
    build = services["engine"]["build"]
    docker = (FOLDER / build["context"] / build["dockerfile"]).read_text()
    (port,) = re.findall(r"^EXPOSE (\d+)$", docker, re.MULTILINE)
    (flag,) = [parameter for parameter in serve.params if parameter.name == "port"]
    assert int(port) == flag.default and services["engine"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"engine:{port}"]}] and "metrics_path" not in job
    (source,) = yaml.safe_load((FOLDER / "grafana_sources.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    assert {(panel["datasource"]["type"], panel["datasource"]["uid"]) for panel in panels} == {
        (source["type"], source["uid"])
    }
    (provider,) = yaml.safe_load((FOLDER / "grafana_dashboards.yaml").read_text())["providers"]
    assert Path(files["./dashboard.json"]).parent == Path(provider["options"]["path"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd on this machine")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "xla-engine.service"
    text = (FOLDER / "xla-engine.service").read_text()
    unit.write_text(text.replace("/opt/xla-engine/bin/xla-engine", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
