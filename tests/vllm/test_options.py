"""A script written for vLLM, with only its import changed."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from xla_engine import LLM, SamplingParams
from xla_engine.config import EngineConfig, OtherOption, own_options
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ConfigError, InvalidRequestError
from xla_engine.vllm_options import _DEFAULT_ONLY, _HARMLESS, _TABLE, VLLM_OPTIONS

PAGE = Path(__file__).parents[2] / "docs" / "from_vllm.md"


def test_options_of_vllm_are_taken() -> None:
    with LLM(
        max_num_seqs=8,
        max_model_len=128,
        gpu_memory_utilization=0.5,
        tensor_parallel_size=1,
        trust_remote_code=True,
        enforce_eager=True,
        enable_chunked_prefill=True,
        tokenizer=None,
        seed=None,  # vLLM's callers leave options out with None
        enable_prefix_caching=None,
        attention_backend=None,
        revision="main",
        limit_mm_per_prompt={},
        generation_config="vllm",
        prefill_lanes=(2,),
        self_check=False,
    ) as llm:
        assert llm.engine.config.memory_utilization == 0.5 and llm.engine.config.generation_config == "engine"
        assert llm.generate("import", use_tqdm=False)[0].finished


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pipeline_parallel_size": 2},
            r"pipeline_parallel_size=2 is not possible here \(1 is\): use `tensor_parallel_size` to split",
        ),
        ({"lora_dtype": "float32"}, "the dtype of the weights"),
        ({"revision": "v2"}, "OWNER/NAME@REVISION"),
        (
            {"kv_transfer_config": {"kv_connector": "X"}},
            "is not possible here: KV caches are not transferred",
        ),
        ({"watermark": 0.5}, "this engine has its own scheduler"),
        ({"max_logprobs": 100}, "0 to 20"),
        ({"gpu_memory_utilisation": 0.5}, "did you mean 'gpu_memory_utilization'"),
        (
            {"gpu_memory_utilization": 0.5, "memory_utilization": 0.5},
            "utilization and memory_utilization are",
        ),
        ({"no_such_thing": 1}, "unknown option 'no_such_thing'"),
    ],
)
def test_options_without_an_effect_are_refused_with_the_reason(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**options)  # type: ignore[arg-type]


def test_every_option_says_why_and_takes_its_first_value_and_none() -> None:
    for name, option in VLLM_OPTIONS.items():
        assert option.why
        assert own_options({name: None}, VLLM_OPTIONS) == {}
        if option.accepted != ():
            value = option.accepted[0] if option.accepted else 1
            assert set(own_options({name: value}, VLLM_OPTIONS)) == (
                {option.becomes} if option.becomes else set()
            )
    assert own_options({"max_model_len": -1}, VLLM_OPTIONS) == {"max_model_len": None}


def test_no_row_hides_an_option_there_is() -> None:
    own = {entry.name for entry in fields(EngineConfig)} & VLLM_OPTIONS.keys()
    assert all(VLLM_OPTIONS[name].becomes == name for name in own)


def options_table() -> str:
    """The table as Markdown; options that have one answer share a row."""
    rows = [([name], values(option), option.why) for name, option in _TABLE.items()]
    rows += [(names.split(), "any value", why) for why, names in _HARMLESS.items()]
    rows += [(list(names), "vLLM's default", why) for why, names in _DEFAULT_ONLY.items()]
    lines = [
        f"| {', '.join(f'`{name}`' for name in names)} | {taken} | {why} |" for names, taken, why in rows
    ]
    return "\n".join(["| option of vLLM | accepted | here |", "|---|---|---|", *lines]) + "\n"


def values(option: OtherOption) -> str:
    if option.accepted is None:
        return "any value"
    return ", ".join(f"`{value!r}`" for value in option.accepted) if len(option.accepted) < 9 else "0 to 20"


def test_docs_print_the_table() -> None:
    assert options_table() in PAGE.read_text("utf-8")


def test_params_are_cloned_and_built_from_optional_fields() -> None:
    params = SamplingParams.from_optional(temperature=None, top_p=0.5, stop=None, seed=None, max_tokens=5)
    assert params == SamplingParams(top_p=0.5, max_tokens=5)
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    clone = params.clone(max_tokens=9)
    assert (params.max_tokens, clone.max_tokens, clone.top_p) == (5, 9, 0.5) and params.clone() == params
    with pytest.raises(InvalidRequestError, match="did you mean 'top_p'"):
        SamplingParams.from_optional(topp=0.5)


def test_tokenizer_and_defaults_are_there(embedded: XlaBatchEngine) -> None:
    llm = LLM.from_engine(embedded)
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("def main():")) == "def main():"
    assert llm.get_default_sampling_params() == SamplingParams()
