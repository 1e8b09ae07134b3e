"""A pytest plugin for test suites of other projects: they meet a server that runs already, at JUDGED_URL.

It is loaded by name into their pytest, without this repository on the path, and replaces what they import from
their own project: helpers that start a server, tokenizers, names that only their unit tests use.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
import urllib.request
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import openai
import pytest

URL = os.environ["JUDGED_URL"]
SKIPS: list[tuple[str, str]] = json.loads(os.environ.get("JUDGED_SKIPS", "[]"))


class RemoteServer:
    """vLLM's `RemoteOpenAIServer`, whose server is there before and after."""

    DUMMY_API_KEY = "none"

    def __init__(self, model: str, *_: Any, **__: Any) -> None:
        self.model, self.url_root = model, URL
        self.host, _, port = URL.removeprefix("http://").partition(":")
        self.port = int(port)

    def __enter__(self) -> RemoteServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join([URL, *parts])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, **options)

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, **options)


class RemoteTokenizer:
    """The tokenizer of the server's model."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.vocab_size = _ask("tokenizer_info")["vocab_size"]
        self.all_special_ids: list[int] = []

    def __len__(self) -> int:
        return int(self.vocab_size)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        body = {"prompt": text, "add_special_tokens": add_special_tokens}
        ids: list[int] = _ask("tokenize", body)["tokens"]
        return ids

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return str(_ask("detokenize", {"tokens": list(ids)})["prompt"])

    def __call__(self, text: str, **_: Any) -> Any:
        return types.SimpleNamespace(input_ids=self.encode(text))


def _ask(path: str, body: object = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(f"{URL}/{path}", data) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of these packages, with whatever name is imported from them."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = lambda _: MagicMock()  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "vllm.tokenizers":
            module.get_tokenizer = RemoteTokenizer  # type: ignore[attr-defined]
        if module.__name__ == "ogx_api":
            module.OpenAIFilePurpose = types.SimpleNamespace(BATCH="batch")  # type: ignore[attr-defined]


# First, because an archive's top folder, from which tests run, contains the package itself.
sys.meta_path.insert(0, _StandIns(("vllm", "torch", "transformers", "ogx_api", "fastapi")))
_helpers = types.ModuleType("tests.utils")
_helpers.RemoteOpenAIServer = RemoteServer  # type: ignore[attr-defined]
_helpers.__getattr__ = lambda _: MagicMock()  # type: ignore[method-assign]
sys.modules["tests.utils"] = _helpers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what the list names, and say why. A pattern that no test has is an error: the list has aged."""
    unused = {pattern for pattern, _ in SKIPS}
    for item in items:
        found = next(((pattern, reason) for pattern, reason in SKIPS if _fits(item, pattern)), None)
        if found is not None:
            unused.discard(found[0])
            item.add_marker(pytest.mark.skip(reason=found[1]))
    if unused:
        raise pytest.UsageError(f"no test is named {', '.join(sorted(unused))}")


def _fits(item: pytest.Item, pattern: str) -> bool:
    module = Path(str(item.fspath)).stem.removeprefix("test_")
    name = f"{module}::{item.name.removeprefix('test_')}".replace("[", "(").replace("]", ")")
    pattern = pattern.replace("[", "(").replace("]", ")")  # which say something else to fnmatch
    return fnmatch(name, pattern) or fnmatch(name.partition("(")[0], pattern)


@pytest.fixture(autouse=True)
def _paths_of_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's tests leave out the /v1 of some paths, which its server takes with and without."""
    helpers = sys.modules.get("utils")
    if hasattr(helpers, "ServerProcess"):
        short = ("/chat/completions", "/completions", "/models", "/responses")

        def make_url(_: object, path: str, host: str | None = None) -> str:
            return URL + ("/v1" if path.startswith(short) else "") + path

        monkeypatch.setattr(helpers.ServerProcess, "make_url", make_url)


@pytest.fixture
def openai_client() -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def text_model_id() -> str:
    return "embedded"


@pytest.fixture
def embedding_model_id() -> str:
    return "none"
