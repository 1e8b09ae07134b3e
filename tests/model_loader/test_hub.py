"""Hub ids: a cached snapshot needs no network, a local path never asks for it, and each failure says what to do."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects

from xla_engine.environment import embedded_model_directory
from xla_engine.errors import CheckpointError
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.model_loader.model_files import open_model

GOLDEN = Path(__file__).parents[1] / "golden"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was opened")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put(cache: Path, model: Path, *, without: str = "") -> Path:
    """A snapshot of `model` in the cache as "owner/name", as the hub's library lays it out."""
    repository = cache / "models--owner--name"
    snapshot = repository / "snapshots" / COMMIT
    shutil.copytree(model, snapshot, ignore=shutil.ignore_patterns(without) if without else None)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


@pytest.mark.full
@pytest.mark.usefixtures("no_network")
def test_a_local_path_never_touches_the_network_nor_the_library(tmp_path: Path) -> None:
    assert load_checkpoint(embedded_model_directory()).config.vocab_size == 4096
    code = (
        "import socket, sys\n"
        "socket.socket.connect = socket.getaddrinfo = None\n"
        "from xla_engine.model_loader.checkpoint import load_checkpoint\n"
        f"dict(load_checkpoint({str(GOLDEN / 'gqa_tied')!r}).weights)\n"
        "assert 'huggingface_hub' not in sys.modules and 'gguf' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.usefixtures("no_network")
def test_a_path_that_looks_like_an_id_goes_before_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(GOLDEN / "gqa_tied", tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    assert open_model("owner/name").path == Path("owner/name")


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("model", ["gqa_tied", "untied_odd_heads"])
def test_a_cached_snapshot_is_used_without_the_network(cache: Path, model: str) -> None:
    snapshot = put(cache, GOLDEN / model)
    assert open_model("owner/name").path == snapshot == open_model(Path("owner/name")).path
    assert open_model(f"owner/name@{COMMIT}").path == snapshot
    assert load_checkpoint("owner/name").fingerprint == load_checkpoint(GOLDEN / model).fingerprint


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json"])
def test_a_part_of_a_snapshot_is_completed_or_said_to_be_a_part(
    cache: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = put(cache, GOLDEN / "gqa_tied", without=missing)
    whole = huggingface_hub.snapshot_download

    def download(*names: str, local_files_only: bool = False, **options: Any) -> str:
        if not local_files_only:
            shutil.copy(GOLDEN / "gqa_tied" / missing, snapshot)
        return str(whole(*names, local_files_only=True, **options))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert (open_model("owner/name").path / missing).exists()


def test_a_missing_shard_is_noticed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(cache, GOLDEN / "untied_odd_heads", without="model-00002-of-00003.safetensors")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"not all of owner/name.*hf download owner/name"):
        open_model("owner/name")


def failing(error: Exception) -> Callable[..., str]:
    def download(*_: str, local_files_only: bool = False, **__: Any) -> str:
        raise errors.LocalEntryNotFoundError("not cached") if local_files_only else error

    return download


ANSWER: Any = SimpleNamespace(headers={}, request=None, status_code=403)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.GatedRepoError("gated", response=ANSWER), ["gated", "Accept its terms", "hf auth login"]),
        (errors.RepositoryNotFoundError("404", response=ANSWER), ["no such repository", "hf auth login"]),
        (errors.RevisionNotFoundError("404", response=ANSWER), ["no revision 'dev'"]),
        (errors.OfflineModeIsEnabled("offline"), ["HF_HUB_OFFLINE", "hf download owner/name"]),
        (errors.LocalEntryNotFoundError("no connection"), ["cannot be reached", "hf download"]),
        (errors.HfHubHTTPError("500", response=ANSWER), ["cannot be downloaded"]),
        (OSError("disk full"), ["disk full"]),
    ],
)
def test_each_failure_of_the_hub_is_one_error(
    error: Exception, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing(error))
    with pytest.raises(CheckpointError) as caught:
        open_model("owner/name@dev")
    for word in ("owner/name@dev", *words):
        assert word in str(caught.value)


def test_offline_mode_is_respected(cache: Path, no_network: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        open_model("owner/name")


def test_only_ids_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    for name in ("name", "./owner/name", "/owner/name", "a/b/c", "../b", "owner/name.gguf", "~/b", "a/b c"):
        with pytest.raises(CheckpointError, match=r"no such (directory|file)"):
            open_model(name)


def test_code_and_pickles_are_never_asked_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def download(*_: str, **options: Any) -> str:
        asked.append(options)
        return str(put(cache, GOLDEN / "gqa_tied") if len(asked) == 1 else cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    open_model("owner/name")
    names = ["config.json", "model-1.safetensors", "modeling.py", "pytorch_model.bin", "a/b.safetensors"]
    kept = filter_repo_objects(
        names, allow_patterns=asked[0]["allow_patterns"], ignore_patterns=asked[0]["ignore_patterns"]
    )
    assert list(kept) == ["config.json", "model-1.safetensors"]
    assert json.loads((cache / "models--owner--name" / "snapshots" / COMMIT / "config.json").read_text())


def put_gguf(cache: Path, *names: str) -> Path:
    """A snapshot with GGUF files, as "owner/name"."""
    repository = cache / "models--owner--name"
    snapshot = repository / "snapshots" / COMMIT
    for name in names:
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_bytes(b"GGUF")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("file", ["model-Q8_0.gguf", "model.q8_0.gguf", "Q8_0/Model-Q8_0.gguf"])
def test_a_gguf_file_of_a_kind_is_taken_from_the_cache(cache: Path, file: str) -> None:
    others = (
        "model-Q4_0.gguf",
        "model-IQ8_0.gguf",
        "mmproj-model-Q8_0.gguf",
        "model-Q8_0-00001-of-00002.gguf",
    )
    snapshot = put_gguf(cache, file, *others)
    for name in ("owner/name:Q8_0", "owner/name:q8_0", f"owner/name@{COMMIT}:Q8_0"):
        assert open_model(name).path == snapshot / file


@pytest.mark.usefixtures("no_network")
def test_a_split_file_of_a_kind_is_taken_when_all_its_parts_are_there(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [f"Q8_0/model-Q8_0-{part:05d}-of-00003.gguf" for part in (1, 2, 3)]
    snapshot = put_gguf(cache, *parts[:2])

    def download(*_: str, local_files_only: bool = False, **__: Any) -> str:
        if not local_files_only:
            (snapshot / parts[2]).write_bytes(b"GGUF")
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_model("owner/name:Q8_0").path == snapshot / parts[0]
    assert (snapshot / parts[2]).exists()


def test_a_gguf_file_is_fetched_and_nothing_else(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(*_: str, local_files_only: bool = False, **options: Any) -> str:
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not cached")
        asked.extend(options["allow_patterns"])
        return str(put_gguf(cache, "model-Q8_0.gguf"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_model("owner/name:Q8_0").path.name == "model-Q8_0.gguf"
    wanted = ["a-Q8_0.gguf", "a-q8_0.gguf", "a-Q8_0-00001-of-00002.gguf"]
    names = [*wanted, "a-Q4_0.gguf", "a-Q4_0-00001-of-00002.gguf", "config.json", "model.safetensors"]
    assert list(filter_repo_objects(names, allow_patterns=asked)) == wanted


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (("model-Q4_0.gguf", "mmproj-Q8_0.gguf"), ["no file", "owner/name"]),
        (("a-Q8_0.gguf", "b-Q8_0.gguf"), ["several files", "a-Q8_0.gguf", "b-Q8_0.gguf"]),
    ],
)
def test_a_kind_that_names_no_file_is_explained(
    cache: Path, files: tuple[str, ...], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = put_gguf(cache, *files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(snapshot))
    with pytest.raises(CheckpointError) as caught:
        open_model("owner/name:Q8_0")
    for word in ("owner/name:Q8_0", *words):
        assert word in str(caught.value)
