"""What operators start from: every metric that the dashboard asks for exists, and the flags are the command's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx

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


def test_the_documentation_names_every_flag_that_operators_set() -> None:
    page = (FOLDER.parents[1] / "docs" / "server.md").read_text()
    engine = {"--seed", "--temperature", "--generation-config", "--no-access-log"}
    own = {parameter.opts[0] for parameter in serve.params[: [p.name for p in serve.params].index("model")]}
    assert {flag for flag in own - engine if flag not in page} == set()
