"""Prompts with pictures: a mark in a text, as `<image>`, becomes the tokens of all tiles of the next picture.

The text is expanded before it is tokenised, as in transformers
(`processing_{idefics3,gemma3,gemma4,deepseek_ocr2}.py`), because some tokenizers merge the line ends around pictures.
Places are found by position in the text, never by token id.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from xla_engine.errors import CheckpointError, InvalidRequestError
from xla_engine.images.grid import Grid
from xla_engine.text.tokenizer import Tokenizer

_AROUND, _GLOBAL = "<fake_token_around_image>", "<global-img>"


@dataclass(frozen=True, slots=True)
class PromptForm:
    """How a family writes pictures.

    mark: stands for a picture in a text. token: stands for each row of features in the expanded text.
    heads: what is before each tile's run of tokens. tail: what is behind the last.
    """

    mark: str
    token: str
    heads: Callable[[Grid], list[str]]
    tail: str


@dataclass(frozen=True, slots=True)
class Span:
    """The prompt tokens of one tile: `length` of them from position `start`."""

    start: int
    length: int
    image: int
    tile: int


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """token_ids: of the expanded prompt. spans: of all tiles, in order."""

    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPicture:
    """A picture in a prompt, not decoded yet.

    file: its bytes. grid: how it is cut. digest: of file and processor; with equal digests, tiles are equal.
    starts: where each tile's tokens begin in the prompt; it has `Grid.tokens`, or as many as the tower makes of any.
    name: its place in the request, for errors.
    """

    file: bytes
    grid: Grid
    digest: str
    starts: tuple[int, ...]
    name: str


def image_prompt(
    text: str,
    grids: Sequence[Grid],
    image_seq_len: int,
    tokenizer: Tokenizer,
    form: PromptForm,
    *,
    add_special_tokens: bool = True,
) -> ImagePrompt:
    """Expand and tokenise a prompt. grids: of its pictures. image_seq_len: tokens of a tile, where
    `Grid.tokens` is None.

    Raises InvalidRequestError unless the text has one mark for each picture, and CheckpointError for a tokenizer that
    does not know the form's token as one.
    """
    expanded, runs = expand(text, grids, image_seq_len, form)
    ids, offsets = tokenizer.encode_with_offsets(expanded, add_special_tokens=add_special_tokens)
    index = {begin: at for at, (begin, end) in enumerate(offsets) if end > begin}
    spans, width = [], len(form.token)
    for image, tile, place in runs:
        start, length = index.get(place, len(ids)), grids[image].tile_tokens(image_seq_len)[tile]
        wanted = [(at, at + width) for at in range(place, place + width * length, width)]
        if list(offsets[start : start + length]) != wanted:
            raise CheckpointError(
                f"the tokenizer does not read {form.token} as one token. Use the checkpoint's own tokenizer files"
            )
        spans.append(Span(start=start, length=length, image=image, tile=tile))
    return ImagePrompt(token_ids=tuple(ids), spans=tuple(spans))


def expand(
    text: str, grids: Sequence[Grid], image_seq_len: int, form: PromptForm
) -> tuple[str, list[tuple[int, int, int]]]:
    """The expanded text, and for each tile its picture, its index and the character where its run begins."""
    mark, token = form.mark, form.token
    if token != mark and token in text:
        raise InvalidRequestError(
            f"the prompt has {token}, which stands for features of pictures. Write {mark} where a picture is"
        )
    pieces = text.split(mark)
    if len(pieces) != len(grids) + 1:
        raise InvalidRequestError(
            f"the prompt has {len(pieces) - 1} {mark} and {len(grids)} pictures. Write one {mark} for each "
            "picture, and nowhere else"
        )
    parts, runs = [pieces[0]], []
    for image, (grid, after) in enumerate(zip(grids, pieces[1:], strict=True)):
        for tile, head in enumerate(form.heads(grid)):
            parts.append(head)
            runs.append((image, tile, len(parts)))
            parts.append(token * grid.tile_tokens(image_seq_len)[tile])
        parts += [form.tail, after]
    begins = [0, *accumulate(map(len, parts))]
    return "".join(parts), [(image, tile, begins[part]) for image, tile, part in runs]


def _heads(grid: Grid) -> list[str]:
    """What stands before each tile's run."""
    heads = [
        ("\n" if column == 0 and row else "") + f"{_AROUND}<row_{row + 1}_col_{column + 1}>"
        for row in range(grid.rows)
        for column in range(grid.columns)
    ]
    return [*heads, ("\n\n" if heads else "") + _AROUND + _GLOBAL]


IDEFICS3 = PromptForm("<image>", "<image>", _heads, _AROUND)
GEMMA3 = PromptForm(
    "<start_of_image>",
    "<image_soft_token>",
    lambda grid: ["\n\n<start_of_image>"] * grid.tiles,
    "<end_of_image>\n\n",
)


def _no_heads(grid: Grid) -> list[str]:
    """Nothing stands before the run of any tile: all are one."""
    return [""] * grid.tiles


def _one_token(token: str) -> PromptForm:
    """Of families whose texts have the marks around a picture already, and count its tokens by repeating one."""
    return PromptForm(token, token, lambda grid: [""], "")


QWEN3_VL = _one_token("<|image_pad|>")
GEMMA4 = PromptForm("<|image|>", "<|image|>", lambda grid: ["<|image>"], "<image|>")
_BY_TYPE = {
    "gemma3": GEMMA3,
    "gemma4": GEMMA4,
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), QWEN3_VL),
    "paddleocr_vl": _one_token("<|IMAGE_PLACEHOLDER|>"),
    "glm_ocr": _one_token("<|image|>"),
    **dict.fromkeys(("deepseek_ocr2", "deepseek_vl_v2"), PromptForm("<image>", "<image>", _no_heads, "")),
}


def prompt_form(model_type: str) -> PromptForm:
    return _BY_TYPE.get(model_type, IDEFICS3)
