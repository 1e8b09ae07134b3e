"""Pictures come in through prompts, chats, lines and HTTP, in one form; an engine without a tower refuses all."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_engine import FakeEngine
from xla_engine import LLM
from xla_engine.batch.datasets.rows import RowColumns, row_lines
from xla_engine.batch.datasets.tables import Table, _arrow_batches
from xla_engine.batch.lines import LineReader, read_lines
from xla_engine.batch.run import BatchRun
from xla_engine.cli._input import open_lines
from xla_engine.cli._table_options import TableOptions
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import InvalidImageError, InvalidRequestError
from xla_engine.openai.requests import LineError, LineRequest, parse_line
from xla_engine.openai.results import ResultHeader
from xla_engine.prompts import Picture, chat_prompt, content_of, prompt_parts
from xla_engine.text.chat_template import render_chat

# Prints parts only, as that of SmolVLM; text as content is lost.
PARTS = (
    "{% for m in messages %}{{ m['role'] }}:{% for part in m['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
BOTH = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
DATA = "data:image/png;base64,AAAA"


def url_part(url: str = DATA, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def said(*parts: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}
    ]


def test_a_template_gets_the_form_that_it_prints() -> None:
    text = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert render_chat(text, PARTS) == "user:a\nassistant:b\n>"
    assert render_chat(text, BOTH) == "ab"
    two = said("a", "b")
    assert render_chat(two, PARTS) == "user:ab\n>" and render_chat(two, BOTH) == "a\nb"
    mixed = said({"type": "image"}, "a", {"type": "image"})
    assert render_chat(mixed, PARTS) == "user:<image>a<image>\n>"
    assert render_chat(mixed, BOTH) == "<image>a<image>"
    for template, end in ((PARTS, "user:"), (BOTH, "")):
        for given in (said("a"), said({"type": "image"}, "a"), said("a", {"type": "image"})):
            found = render_chat(given, template, add_generation_prompt=False, continue_final_message=True)
            image = ["", "<image>"][len(given[0]["content"]) - 1]
            wanted = f"{end}a{image}" if given[0]["content"][0].get("text") else f"{end}{image}a"
            assert found == wanted


def test_pictures_leave_a_chat_in_order() -> None:
    seen = []

    def render(messages: Any, **options: Any) -> str:
        seen.append((messages, options))
        return render_chat(messages, PARTS)

    image = object()
    conversation = [
        {"role": "system", "content": "s"},
        *said(url_part("data:1"), "a", {"type": "image_pil", "image_pil": image}),
        *said(
            {"type": "image", "image": b"x"},
            {"type": "image_url", "image_url": "data:2"},
            url_part(detail="auto"),
        ),
    ]
    prompt = chat_prompt(render, conversation, tools=None)
    assert seen[0][1] == {"tools": None}
    parts = prompt_parts(prompt)
    assert parts.content == "system:s\nuser:<image>a<image>\nuser:<image><image><image>\n>"
    assert [each.source for each in parts.pictures] == ["data:1", image, b"x", "data:2", DATA]
    assert [each.name for each in parts.pictures][:2] == ["messages[1].content[0]", "messages[1].content[2]"]
    assert conversation[1]["content"][0] == url_part("data:1")  # the caller's messages are as they were
    plain = [{"role": "user", "content": "a"}]
    assert chat_prompt(lambda messages: messages, plain) is plain


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (url_part(detail="high"), "detail must be 'auto'"),
        (url_part(size=3), "has 'size'"),
        ({"type": "image_url", "image_url": {}}, "has no picture"),
        ({"type": "image_url", "image_url": 3}, "has no picture"),
        ({"type": "image"}, "has no picture"),
        ({"type": "image", "image": b"x", "uuid": "y"}, "has 'uuid'"),
        ({"type": "input_audio", "input_audio": {}}, "'input_audio'; only text and pictures"),
        ({"type": "video_url", "video_url": {}}, "'video_url'; only text and pictures"),
        ({"type": "file", "file": {}}, "'file'; only text and pictures"),
        ({"type": "other"}, "'other'; only parts"),
    ],
)
def test_other_parts_are_refused_by_place_and_name(part: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"messages\[0\]\.content\[1\].*{message}"):
        chat_prompt(lambda messages: render_chat(messages, PARTS), said("a", part))


def test_multi_modal_data() -> None:
    one = prompt_parts({"prompt": "<image>", "multi_modal_data": {"image": b"x"}})
    assert one.pictures == (Picture(b"x", "multi_modal_data.image[0]"),)
    many = prompt_parts({"prompt": "<image><image>", "multi_modal_data": {"image": [b"x", "y"]}})
    assert [each.source for each in many.pictures] == [b"x", "y"]
    for nothing in (None, {}, {"image": None}, {"image": []}):
        assert prompt_parts({"prompt": "a", "multi_modal_data": nothing}).pictures == ()
    for wrong, message in (
        ({"prompt": "a", "multi_modal_data": {"audio": b"x"}}, "'audio'; only 'image'"),
        ({"prompt": "a", "multi_modal_data": b"x"}, "must be {'image'"),
        ({"prompt_token_ids": [1], "multi_modal_data": {"image": b"x"}}, "of token ids"),
        ({"prompt": "a", "multi_modal_uuids": {}}, "remove 'multi_modal_uuids'"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            prompt_parts(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="takes no pictures"):
        content_of({"prompt": "<image>", "multi_modal_data": {"image": b"x"}})


def parsed(line: dict[str, Any], **defaults: Any) -> LineRequest | LineError:
    return parse_line(json.dumps(line).encode(), 1, defaults)


def test_lines() -> None:
    plain = parsed({"prompt": "<image>a", "images": [DATA], "max_tokens": 3})
    assert isinstance(plain, LineRequest)
    parts = prompt_parts(plain.prompts[0])  # type: ignore[arg-type]
    assert (parts.content, parts.pictures) == ("<image>a", (Picture(DATA, "images[0]"),))
    chat = parsed({"prompt": "a", "images": [DATA]}, chat_system="s")
    assert isinstance(chat, LineRequest)
    assert chat.prompts[0].messages[1]["content"] == [  # type: ignore[union-attr]
        {"type": "image", "image": DATA},
        {"type": "text", "text": "a"},
    ]
    for line, message in (
        ({"prompt": "a", "images": DATA}, "images must be a list"),
        ({"prompt": [1], "images": [DATA]}, "images need a prompt that is text"),
        ({"messages": said("a"), "images": [DATA]}, "1 images for 0 parts"),
        ({"messages": said("a"), "images": DATA}, "images must be a list"),
        ({"url": "/v1/completions", "body": {"prompt": "a", "images": [DATA]}}, "images"),
    ):
        found = parsed(line)
        assert isinstance(found, LineError) and message in found.message, found
    wrong = parsed({"prompt": "a", "images": DATA}, chat_system="")
    assert isinstance(wrong, LineError) and "images must be a list" in wrong.message


def test_an_engine_without_a_tower_refuses_pictures(embedded: XlaBatchEngine) -> None:
    llm, message = LLM.from_engine(embedded), "reads no pictures"
    with pytest.raises(InvalidRequestError, match=f"prompt 0: .*{message}"):
        llm.generate({"prompt": "<image>", "multi_modal_data": {"image": DATA}}, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=message):
        llm.chat(said(url_part()), chat_template=PARTS, use_tqdm=False)
    lines = [
        {"prompt": "<image>", "images": [DATA]},
        {"messages": said(url_part())},
        {"method": "POST", "url": "/v1/chat/completions", "body": {"messages": said(url_part(), "a")}},
        {"prompt": "def", "max_tokens": 1},
    ]
    source = io.BytesIO(b"\n".join(json.dumps(line).encode() for line in lines))
    sink = io.BytesIO()
    header = ResultHeader(created=0, model="m")
    BatchRun(
        embedded, read_lines(source), sink, header=header, defaults={"chat_template": PARTS}, ordered=True
    ).run()
    errors = [json.loads(line)["error"] for line in sink.getvalue().splitlines()]
    assert [error and error["code"] for error in errors] == ["invalid_request"] * 3 + [None]
    assert all(message in error["message"] for error in errors[:3])


def test_pictures_that_take_long_stop_no_other_line() -> None:
    """A batch run reads them in threads; an error is the line's own, and all prompts of the line end."""
    release, seen = threading.Event(), []

    def read_pictures(prompt: Any, *, add_special_tokens: bool = True) -> str:
        seen.append(add_special_tokens)
        (picture,) = prompt_parts(prompt).pictures
        if picture.source == "slow":
            assert release.wait(600)
        if picture.source == "bad":
            raise InvalidImageError(f"{picture.name}: it is bad")
        return f"read {picture.source}"

    class Sink:
        """Lines that were written; when 40 others are, the slow picture comes."""

        def __init__(self) -> None:
            self.lines: list[dict[str, Any]] = []

        def write(self, data: bytes) -> None:
            self.lines.append(json.loads(data))
            if len(self.lines) == 42:
                release.set()

    engine, sink = FakeEngine(max_num_seqs=2), Sink()
    engine.read_pictures = read_pictures  # type: ignore[attr-defined]
    lines = [
        {"prompt": "<image>", "images": ["slow"], "custom_id": "slow"},
        {"prompt": "<image>", "images": ["bad"], "custom_id": "bad"},
        {"messages": [{"role": "user", "content": [url_part("good")]}], "custom_id": "good"},
        *({"prompt": str(index)} for index in range(40)),
    ]
    engine.render_chat = lambda messages, **_: "rendered"  # type: ignore[method-assign]
    source = io.BytesIO(b"\n".join(json.dumps(line).encode() for line in lines))
    totals = BatchRun(engine, read_lines(source), sink, header=ResultHeader(created=0, model="m")).run()
    assert (totals.ok, dict(totals.failed)) == (42, {"invalid_image": 1})
    found = {line["custom_id"]: line for line in sink.lines}
    assert sink.lines[-1]["custom_id"] == "slow" and sorted(seen) == [False, True, True]
    error = found["bad"]["error"]
    assert (error["code"], error["message"]) == ("invalid_image", "images[0]: it is bad")
    assert found["good"]["response"]["body"]["choices"][0]["message"]["content"] == "<read good>"
    assert found["slow"]["response"]["body"]["choices"][0]["text"] == "<read slow>"


def rows_of(column: list[Any], prompt: str = "a") -> list[Any]:
    rows = [{"image": each, "text": prompt} for each in column]
    lines = list(row_lines(rows, RowColumns(image="image", prompt="text")))
    reader = LineReader({"chat_system": ""})
    return [(line, reader.read(line)) for line in lines]


def test_rows_hold_pictures_beside_their_line() -> None:
    face = {"bytes": b"\x89PNG", "path": None}
    found = rows_of([b"\xff\xd8", "a.png", face, {"bytes": None, "path": "b.png"}, [b"x", "c.png"], None, []])
    sources = []
    for line, request in found[:5]:
        assert isinstance(request, LineRequest), request
        json.loads(line.raw)
        sources.append([part["image"] for part in request.prompts[0].messages[0]["content"][:-1]])
    assert sources == [
        [b"\xff\xd8"],
        ["a.png"],
        [{"bytes": b"\x89PNG"}],
        [{"path": "b.png"}],
        [b"x", "c.png"],
    ]
    for _, error in found[5:]:
        assert isinstance(error, LineError) and error.code == "invalid_row"
        assert error.message == "column 'image' has no picture in this row"
    # What --resume compares is another line for other bytes.
    (one, _), (other, _) = rows_of([b"x", b"y"])
    assert one.raw != other.raw and rows_of([b"x"])[0][0].raw == one.raw


def test_pictures_fill_the_parts_of_a_row_s_messages() -> None:
    messages = said({"type": "image", "text": None}, "a", {"type": "image"})
    line = parsed({"messages": messages, "images": ["x", "y"]})
    assert isinstance(line, LineRequest)
    assert [part.get("image") for part in line.prompts[0].messages[0]["content"]] == ["x", None, "y"]  # type: ignore[union-attr]
    for images in (["x"], ["x", "y", "z"], []):
        wrong = parsed({"messages": messages, "images": images})
        assert isinstance(wrong, LineError) and "give one for each part" in wrong.message


def test_columns_of_bytes_are_read_few_at_a_time_and_not_copied(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    face = pa.array([{"bytes": b"x", "path": None}] * 40, kind)
    pq.write_table(pa.table({"image": face, "name": ["n"] * 40}), tmp_path / "in.parquet")
    table = Table(str(tmp_path / "in.parquet"))
    assert table.holds_bytes("image") and not table.holds_bytes("name")
    assert len(list(table.rows(["image"]))) == 40
    (file,) = table._files
    with file.open() as source:
        assert [batch.num_rows for batch in _arrow_batches(file, source, ["image"])] == [16, 16, 8]
    options = {"prompt_column": "name", "image_column": "image"}
    with open_lines(str(tmp_path / "in.parquet"), TableOptions(**options), 1000, keep=True) as opened:
        assert opened.columns == ("name",)
    more = TableOptions(**options, keep_columns="image,name")
    with open_lines(str(tmp_path / "in.parquet"), more, 1000, keep=True) as opened:
        assert opened.columns == ("image", "name")
