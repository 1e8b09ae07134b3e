"""Tokenizers and models with the tokens of the formats in which models write tool calls and reasoning.

A format's tokens are those of popular checkpoints: some are special, so that decoding skips them; others are added
tokens that are text, as `<tool_call>` of Qwen and Hermes.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers

from xla_engine.text.tokenizer import Tokenizer

EMBEDDED = Path(__file__).parents[2] / "xla_engine" / "embedded"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatTokens:
    """The added tokens of a format.

    special: decoding skips them. text: decoding shows them. ends: those of the special ones that end an answer.
    sign: what the chat template prints, from which the server recognises the format.
    """

    special: tuple[str, ...]
    text: tuple[str, ...] = ()
    ends: tuple[str, ...]
    sign: str


_CHATML = ("<|im_start|>", "<|im_end|>")
_THINK = ("<think>", "</think>")
FORMATS = {
    "hermes": FormatTokens(  # Qwen2.5, Qwen3 and Hermes
        special=_CHATML, text=("<tool_call>", "</tool_call>", *_THINK), ends=_CHATML[1:], sign="<tool_call> <think>"
    ),
    "qwen3_coder": FormatTokens(
        special=_CHATML, text=("<tool_call>", "</tool_call>", *_THINK), ends=_CHATML[1:], sign="<function="
    ),
    "glm": FormatTokens(  # GLM 4.5 to 4.7
        special=("<|user|>", "<|assistant|>", "<|observation|>"),
        text=(
            *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), *_THINK
        ),
        ends=("<|user|>", "<|observation|>"),
        sign="<arg_key> <think>",
    ),
    "llama3": FormatTokens(
        special=("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
        ends=("<|eom_id|>", "<|eot_id|>"),
        sign="<|python_tag|>",
    ),
    "mistral": FormatTokens(
        special=("</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_RESULTS]"),
        ends=("</s>",),
        sign="[TOOL_CALLS]",
    ),
    "deepseek": FormatTokens(  # as in the tokenizer of DeepSeek V3, where only the end is special
        special=("<｜end▁of▁sentence｜>",),
        text=(
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"),
            *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        ),
        ends=("<｜end▁of▁sentence｜>",),
        sign="<｜tool▁calls▁begin｜>",
    ),
    "kimi_k2": FormatTokens(
        special=(
            "<|im_end|>",
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_argument_begin|>"),
            *("<|tool_call_begin|>", "<|tool_call_end|>"),
        ),
        ends=("<|im_end|>",),
        sign="<|tool_calls_section_begin|>",
    ),
    "gemma4": FormatTokens(  # as in its GGUF files, where only the turns are special
        special=("<|turn>", "<turn|>"),
        text=(
            *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
            *("<|channel>", "<channel|>"),
        ),
        ends=("<turn|>",),
        sign="<|tool_call>call: <|channel>thought",
    ),
    "harmony": FormatTokens(  # gpt-oss
        special=(
            "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>",
        ),
        ends=("<|return|>", "<|call|>"),
        sign="<|channel|>",
    ),
}  # fmt: skip
TEMPLATE = (
    "{{# {sign} #}}{{% if tools %}}{{% for tool in tools %}}{{{{ tool | tojson }}}}\n{{% endfor %}}{{% endif %}}"
    "{{% for message in messages %}}<{{{{ message.role }}}}>{{{{ message.content or '' }}}}"
    "{{% for call in message.tool_calls or [] %}}{{{{ call.function | tojson }}}}{{% endfor %}}\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<assistant>{{% endif %}}"
)


@cache
def format_tokenizer(name: str) -> Tokenizer:
    """The embedded model's tokenizer with the tokens of a format in place of its last ones."""
    state, _ = _state(name)
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(state)))


def end_ids(name: str) -> list[int]:
    """The ids that end an answer of the format's model; the first is the embedded model's own."""
    _, ids = _state(name)
    return [0, *(ids[token] for token in FORMATS[name].ends)]


def format_model(name: str, folder: Path) -> Path:
    """Write the embedded model with the tokens of a format into a new folder; returns the folder."""
    shutil.copytree(EMBEDDED, folder, ignore=shutil.ignore_patterns("draft", "*.py", "__pycache__"))
    state, _ = _state(name)
    (folder / "tokenizer.json").write_text(json.dumps(state))
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 0, "eos_token_id": end_ids(name)})
    )
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE.format(sign=FORMATS[name].sign)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _state(name: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The content of tokenizer.json, and the ids of the format's tokens."""
    state: dict[str, Any] = json.loads((EMBEDDED / "tokenizer.json").read_text())
    vocabulary, tokens = state["model"]["vocab"], FORMATS[name]
    added = [*tokens.special, *tokens.text]
    replaced = sorted(vocabulary, key=vocabulary.__getitem__)[-len(added) :]
    ids = {}
    for token, old in zip(added, replaced, strict=True):
        ids[token] = vocabulary[token] = vocabulary.pop(old)
        state["added_tokens"].append(
            {
                "id": ids[token],
                "content": token,
                "special": token in tokens.special,
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
            }
        )
    gone = set(replaced)
    state["model"]["merges"] = [
        merge for merge in state["model"]["merges"] if gone.isdisjoint(("".join(merge), *merge))
    ]
    return state, ids
