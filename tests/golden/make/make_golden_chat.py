"""Make `tests/golden/chat/golden.json`: what transformers' `apply_chat_template` gives. Needs the `oracle` extra.

Every template of the directory over every conversation below; where transformers refuses, the golden says null.
It imports nothing of this package.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parents[2] / "golden" / "chat"
TOKENIZER = Path(__file__).parents[3] / "xla_engine" / "embedded" / "tokenizer.json"

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather <now> & later",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "default": "Zürich"}}},
    },
}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one_question": [{"role": "user", "content": "What is 2 + 2?"}],
    "system_and_spaces": [
        {"role": "system", "content": "  Be brief.\n"},
        {"role": "user", "content": " \tHello  \n"},
    ],
    "several_turns": [
        {"role": "system", "content": "Answer in French."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Salut ! "},
        {
            "role": "user",
            "content": "<b>\"quotes\" & 'more'</b> \N{SLIGHTLY SMILING FACE} {{ not_a_variable }}",
        },
    ],
    "continued": [
        {"role": "user", "content": "Count"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\none, two, "},
    ],
    "roles_that_do_not_alternate": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    "tool_calls": [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "Weather in Zürich?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call("get_weather", city="Zürich", days=[1, 2.5, None])],
        },
        {"role": "tool", "name": "get_weather", "content": '{"t": 21}'},
        {"role": "assistant", "content": "21 degrees"},
        {"role": "user", "content": "Thanks"},
    ],
    "two_calls_at_once": [
        {"role": "user", "content": "Both"},
        {"role": "assistant", "content": "Sure.", "tool_calls": [call("a"), call("b", x=True)]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ],
}
OPTIONS: tuple[dict[str, Any], ...] = (
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": False, "continue_final_message": True},
    {"add_generation_prompt": True, "tools": [WEATHER]},
    {"add_generation_prompt": True, "enable_thinking": False, "date_string": "1 Jan 2026"},
)


def cases() -> list[dict[str, Any]]:
    """What transformers makes of every template, conversation and choice of options."""
    found = []
    for template, (name, messages), options in itertools.product(
        sorted(HERE.glob("*.jinja")), CONVERSATIONS.items(), OPTIONS
    ):
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER), bos_token="<s>", eos_token="</s>")
        tokenizer.chat_template = template.read_text(encoding="utf-8")
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except (TemplateError, ValueError, TypeError):
            text = None
        found.append({"template": template.stem, "conversation": name, "options": options, "text": text})
    return found


def main() -> None:
    golden = {"conversations": CONVERSATIONS, "cases": cases()}
    (HERE / "golden.json").write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
    print(f"{len(golden['cases'])} cases")


if __name__ == "__main__":
    main()
