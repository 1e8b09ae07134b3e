"""What tests of GGUF files compare with."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest

from xla_engine.environment import embedded_model_directory
from xla_engine.errors import CheckpointError
from xla_engine.model_loader.checkpoint import load_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"


def assert_refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        dict(load_checkpoint(path).weights)
    for word in (str(path), *words):
        assert word in str(caught.value)


def embedded_tokenizer(writer: gguf.GGUFWriter) -> None:
    """The embedded model's byte-level tokenizer as llama.cpp's converter writes one."""
    state = json.loads((embedded_model_directory() / "tokenizer.json").read_text())
    special = {token["content"] for token in state["added_tokens"]}
    vocabulary = sorted(state["model"]["vocab"], key=state["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in special else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
