"""A tokenizer.json that would never finish, or would crash the process, is refused when it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, normalizers

from tests.support.tokenizers import byte_level, sentencepiece
from xla_engine.errors import CheckpointError
from xla_engine.model_loader import tokenizer_json
from xla_engine.text import tokenizer as texts
from xla_engine.text import trials
from xla_engine.text.tokenizer import Tokenizer

DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


def written(directory: Path, **fields: Any) -> Path:
    """A model directory with a tokenizer.json that has these fields, and an added token that is normalised."""
    state = json.loads(byte_level().to_str()) | fields
    token = {"content": "<a>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
    state["added_tokens"].append({"id": 10**4, "special": False, **token})
    (directory / "tokenizer.json").write_text(json.dumps(state))
    return directory


@pytest.mark.parametrize(
    "fields",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 40}},
        {"normalizer": {"normalizers": [{"normalizers": [DOUBLE] * 20}, {"normalizers": [DOUBLE] * 20}]}},
        {"decoder": {"type": "Sequence", "decoders": [DOUBLE] * 40}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 100}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}] * 5000}},
    ],
)
def test_a_tokenizer_that_would_grow_texts_for_ever_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """Forty normalisers that double the text never returned; their growth is detected without running them."""
    monkeypatch.setattr(texts, "why_not_load", lambda _: pytest.fail("it was tried"))
    with pytest.raises(CheckpointError, match=r"times as long.*authors"):
        Tokenizer.from_pretrained(written(tmp_path, **fields))


@pytest.mark.full
def test_what_the_size_does_not_show_a_trial_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bound, the trial runs the forty normalisers, and exhausts its memory or processor time."""
    monkeypatch.setattr(tokenizer_json, "MAX_GROWTH", 2**50)
    monkeypatch.setattr(trials, "TOKENIZER_CPU_S", 1.0)
    fields = {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 40}}
    with pytest.raises(CheckpointError, match=r"authors \(trying it (used more|ended its process)"):
        Tokenizer.from_pretrained(written(tmp_path, **fields))


def test_growth_of_regular_expressions_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MAX_GROWTH", 2)
    fields = {"normalizer": {"type": "Replace", "pattern": {"Regex": "[a-z]"}, "content": "abcdefghijkl"}}
    with pytest.raises(CheckpointError, match="characters of 100"):
        Tokenizer.from_pretrained(written(tmp_path, **fields))


def test_usual_tokenizers_are_loaded_without_a_trial_and_odd_ones_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Path] = []
    real = trials.why_not_load
    monkeypatch.setattr(texts, "why_not_load", lambda path: tried.append(path) or real(path))
    for make in (byte_level, sentencepiece):
        make().save(str(tmp_path / "tokenizer.json"))
        Tokenizer.from_pretrained(tmp_path)
    assert not tried
    backend = byte_level()
    backend.normalizer = normalizers.Replace(Regex(" +"), " ")
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.from_pretrained(tmp_path)
    assert tried and loaded.encode("the  cat") == loaded.encode("the cat")
