"""Chat templates: what transformers renders, in a process that no template can hang or exhaust."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiers import default
from xla_engine import LLM, SamplingParams
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ChatTemplateError, CheckpointError, InvalidRequestError
from xla_engine.model_loader.chat_templates import ChatTemplate
from xla_engine.model_loader.model_files import open_model
from xla_engine.text.chat_template import PROCESS, Message, chosen_template, render_chat

GOLDEN = Path(__file__).parents[1] / "golden" / "chat"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
HELLO = [{"role": "user", "content": "Hello"}]
SHOWN = "{{ messages[0].content }}"
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def test_rendering_is_transformers() -> None:
    """Texts equal those of `apply_chat_template` (make_golden_chat.py), unless it drops a text or a call, which ours
    has. Chats that it refuses are refused, except calls and roles in another order, which are told in another form."""
    golden = json.loads((GOLDEN / "golden.json").read_text(encoding="utf-8"))
    counts = Counter[str]()
    for case in golden["cases"]:
        source = (GOLDEN / f"{case['template']}.jinja").read_text(encoding="utf-8")
        template = ChatTemplate(sources={"default": source}, special_tokens=TOKENS)
        known = {"add_generation_prompt", "continue_final_message", "tools"}
        options = {name: value for name, value in case["options"].items() if name in known}
        extra = {name: value for name, value in case["options"].items() if name not in known}
        messages = golden["conversations"][case["conversation"]]
        said = [message["content"].split("</think>")[-1].strip() for message in messages]
        calls = [call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()]
        try:
            text = render_chat(messages, template, chat_template_kwargs=extra, **options)
        except ChatTemplateError:
            assert case["text"] is None and (not calls or options.get("continue_final_message")), case
            counts["refused"] += 1
            continue
        assert all(each in text for each in (*said, *calls)), case
        if case["text"] is None:
            assert calls or case["conversation"] == "roles_that_do_not_alternate", case
            counts["told in another form"] += 1
        elif text == case["text"]:
            counts["equal"] += 1
        else:
            assert any(case["text"].count(each) < text.count(each) for each in (*said, *calls)), case
            counts["dropped by the template"] += 1
    assert counts["refused"] >= 1 and counts["equal"] > 100
    assert counts["told in another form"] > 10 and counts["dropped by the template"] > 5


BOMBS = {
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop that writes": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "doubling": "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "a big number": "{{ 10 ** (10 ** 10) }}",
    "a long string": "{{ 'a' * 10 ** 12 }}",
    "a wide field": "{{ '%2000000000d' % 1 }}",
    "long output": "{{ 'a' * 30000000 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


def test_a_template_in_place_of_the_checkpoints_sees_its_special_tokens() -> None:
    own = ChatTemplate(sources={"default": PLAIN}, special_tokens=TOKENS)
    assert chosen_template(own, None) is own
    other = chosen_template(own, "{{ bos_token }}{{ messages[0].content }}")
    assert render_chat(HELLO, other) == "<s>Hello"


@pytest.mark.parametrize("name", default(BOMBS, 2))
def test_a_bomb_is_an_error_and_the_next_rendering_is_fine(name: str) -> None:
    with pytest.raises(ChatTemplateError):
        render_chat(HELLO, BOMBS[name], cpu_limit_s=0.2)
    assert render_chat(HELLO, PLAIN) == "user: Hello\n>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ raise_exception.__globals__.sys }}",
        "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ dict.mro() }}",
    ],
)
def test_nothing_of_python_is_within_reach(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render_chat(HELLO, source)


def test_a_refusal_by_the_template_carries_its_words() -> None:
    with pytest.raises(ChatTemplateError, match="only user messages here"):
        render_chat(HELLO, "{{ raise_exception('only user messages here') }}")
    with pytest.raises(ChatTemplateError, match="TemplateSyntaxError"):
        render_chat(HELLO, "{% for %}")


def test_a_template_of_tools_takes_chats_without_them_and_tools_without_descriptions() -> None:
    source = """{% for tool in tools %}{{ tool.function.name }}: {{ tool.function.description + '' }}
{% for name, each in tool.function.parameters.properties.items() %}{{ name + each.description }}{% endfor %}
{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"""
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    assert render_chat(HELLO, source) == "Hello"
    text = render_chat(HELLO, source, tools=[{"type": "function", "function": tool}])
    assert text.split() == ["f:", "cityHello"]
    shown = "{{ tools | map(attribute='function') | tojson }}" + SHOWN
    assert '[{"name": "f"' in render_chat(HELLO, shown, tools=[{"type": "function", "function": tool}])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        ("Hello", "must be a list"),
        ({"role": "user", "content": "x"}, "must be a list"),
        ([{"content": "x"}], r"messages\[0\] must be an object with a 'role'"),
        ([*HELLO, "x"], r"messages\[1\] must be an object"),
        ([{"role": "user"}], "has no content"),
        ([{"role": "user", "content": 5}], "must be text or a list"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url'; only parts"),
        ([{"role": "user", "content": "x", "extra": {1, 2}}], "plain JSON"),
        ([{"role": "assistant", "tool_calls": "f()"}], "tool_calls must be a list"),
        ([{"role": "assistant", "function_call": {"arguments": {1, 2}}}], "plain JSON"),
    ],
)
def test_bad_messages_are_refused_by_place(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        render_chat(messages, PLAIN)


def test_hostile_values_are_errors_or_pass_through() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequestError):
        render_chat([{"role": "user", "content": "x", "deep": deep}], PLAIN)
    assert render_chat([{"role": "user", "content": "\ud800\n\0"}], PLAIN) == "user: \ud800\n\0\n>"
    with pytest.raises(InvalidRequestError, match="must not set 'messages'"):
        render_chat(HELLO, PLAIN, chat_template_kwargs={"messages": []})
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        render_chat(HELLO, PLAIN, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="bytes as JSON"):
        render_chat([{"role": "user", "content": "x" * (1 << 26)}], PLAIN)
    with pytest.raises(ChatTemplateError, match="characters; at most"):
        render_chat(HELLO, "x" * (1 << 21))


def test_text_parts_are_joined_and_json_arguments_are_objects() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render_chat([{"role": "user", "content": parts}], PLAIN) == "user: a\nb\n>"
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    source = "{{ messages[0].tool_calls[0].function.arguments.x + 1 }}"
    assert render_chat([{"role": "assistant", "content": None, "tool_calls": [call]}], source) == "2"
    assert call["function"]["arguments"] == '{"x": 1}'  # the caller's messages are as they were


def test_an_interrupted_rendering_leaves_no_answer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    render_chat(HELLO, PLAIN)
    process = PROCESS.process
    assert process is not None and process.stdout is not None

    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(process.stdout, "readline", interrupted)
    with pytest.raises(KeyboardInterrupt):
        render_chat([{"role": "user", "content": "stale"}], PLAIN)
    assert render_chat(HELLO, PLAIN) == "user: Hello\n>"


def test_a_process_killed_from_outside_is_replaced() -> None:
    render_chat(HELLO, PLAIN)
    assert isinstance(PROCESS.process, subprocess.Popen)
    os.kill(PROCESS.process.pid, signal.SIGKILL)
    PROCESS.process.wait()
    assert render_chat(HELLO, PLAIN) == "user: Hello\n>"


# -- where templates come from -----------------------------------------------------------------------------


def test_templates_of_a_directory(tmp_path: Path) -> None:
    assert open_model(tmp_path).chat_template() is None
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "chat_template": PLAIN}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = open_model(tmp_path).chat_template()
    assert template == ChatTemplate(sources={"default": PLAIN}, special_tokens=TOKENS)

    named = [{"name": "default", "template": "d" + SHOWN}, {"name": "tool_use", "template": "t" + SHOWN}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = open_model(tmp_path).chat_template()
    assert render_chat(HELLO, template) == "dHello"
    assert render_chat(HELLO, template, tools=[{"type": "function"}]) == "tHello"

    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor" + SHOWN}))
    assert render_chat(HELLO, open_model(tmp_path).chat_template()) == "processorHello"

    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}file" + SHOWN)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<e>"}))
    template = open_model(tmp_path).chat_template()
    assert template is not None and set(template.sources) == {"default", "rag"}
    assert render_chat(HELLO, template) == "<e>fileHello"

    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ChatTemplateError, match="no default chat template, only rag"):
        render_chat(HELLO, open_model(tmp_path).chat_template())


@pytest.mark.parametrize("value", [5, [], {"a": 1}, ["x"], [{"name": "default"}]])
def test_broken_template_entries_are_checkpoint_errors(tmp_path: Path, value: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    if value == []:
        assert open_model(tmp_path).chat_template() is None
    else:
        with pytest.raises(CheckpointError, match="chat_template must be"):
            open_model(tmp_path).chat_template()


# -- through the engine ------------------------------------------------------------------------------------


def test_chat_completes_the_rendered_prompt(embedded: XlaBatchEngine) -> None:
    llm = LLM.from_engine(embedded)
    params = SamplingParams(temperature=0, max_tokens=5)
    conversations = [HELLO, [{"role": "user", "content": "import os"}]]
    outputs = llm.chat(conversations, params, chat_template=PLAIN, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["user: Hello\n>", "user: import os\n>"]
    (single,) = llm.chat(HELLO, params, chat_template=PLAIN, use_tqdm=False)
    assert single.outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert embedded.tokenizer is not None
    text = embedded.tokenizer.encode("user: Hello\n>", add_special_tokens=False)
    assert single.prompt_token_ids == tuple(text)


def test_the_embedded_model_answers_chats(embedded: XlaBatchEngine) -> None:
    """It turns the user's message into a comment, and the answer into a function."""
    said = [{"type": "text", "text": "Add two\nnumbers."}]
    asked: list[Message] = [{"role": "user", "content": said}]
    params = SamplingParams(temperature=0, max_tokens=8)
    [first] = LLM.from_engine(embedded).chat(asked, params, use_tqdm=False)
    assert first.prompt == "# Add two\n# numbers.\ndef"
    answer: Message = {"role": "assistant", "content": first.outputs[0].text}
    [second] = LLM.from_engine(embedded).chat([*asked, answer, *HELLO], params, use_tqdm=False)
    assert str(second.prompt).startswith(first.prompt + first.outputs[0].text + "\n")


def test_a_model_without_a_template_says_so_before_anything_runs(
    embedded: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "chat_template", None)
    with pytest.raises(
        ChatTemplateError, match=r"conversation 0: the model has no chat template.*pass chat_template"
    ):
        LLM.from_engine(embedded).chat(HELLO, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=r"conversation 1: messages\[0\] has no content"):
        LLM.from_engine(embedded).chat([HELLO, [{"role": "user"}]], chat_template=PLAIN, use_tqdm=False)
    assert not embedded.has_unfinished
