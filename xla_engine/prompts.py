"""The forms of a prompt: text, token ids, one of vLLM's dicts around either, texts to score; and their pictures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypedDict, TypeVar

from xla_engine.errors import InvalidRequestError
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import PromptImage
from xla_engine.text.fill_in import FillIn
from xla_engine.utils.plain import plain
from xla_engine.utils.shown import shown

if TYPE_CHECKING:
    from xla_engine.images.prompt import PlacedPicture

T = TypeVar("T")
TextOrIds = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a prompt. source: see `xla_engine.images.sources`. name: its place in the request, for errors."""

    source: Any
    name: str


class TextPrompt(TypedDict):
    """vLLM's dict around a prompt's text.

    multi_modal_data: {"image": ...}, a picture or a list of pictures, one for each `<image>` in the text.
    cache_salt: as in `xla_engine.engine.protocol.SharedOptions`.
    """

    prompt: str
    multi_modal_data: NotRequired[Mapping[str, Any]]
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """vLLM's dict around a prompt's token ids.

    prompt: the text that the output shows; it is not tokenised.
    cache_salt: as in `xla_engine.engine.protocol.SharedOptions`.
    """

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that are tokenised as one: a query and a document, for a classifier that scores them."""

    first: str
    second: str


@dataclass(frozen=True, slots=True)
class PicturedPrompt:
    """A prompt whose pictures have been read (`xla_engine.images.pictures`), and may be decoded.

    text: before `<image>` was expanded. token_ids: of the expanded text. pictures: in order.
    """

    text: str
    token_ids: tuple[int, ...]
    pictures: tuple["PlacedPicture | PromptImage", ...]
    cache_salt: str | None = None

    @property
    def tiles(self) -> int:
        return sum(
            len(each.tiles) if isinstance(each, PromptImage) else each.grid.tiles for each in self.pictures
        )


Params = SamplingParams | Mapping[str, Any]  # or a dict of their fields
Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | TextPair | FillIn | PicturedPrompt


class PromptParts(NamedTuple):
    """The parts of a prompt.

    content: what the model reads. text: what the output shows; None if there is none.
    cache_salt: None if the prompt has none. pictures: in the order of their places in the text; placed: the same after
    they have been read.
    """

    content: str | Sequence[int] | TextPair | FillIn
    text: str | None
    cache_salt: str | None = None
    pictures: tuple[Picture, ...] = ()
    placed: tuple["PlacedPicture | PromptImage", ...] = ()


def prompt_parts(prompt: Prompt) -> PromptParts:
    """Split a prompt into its parts. Raises InvalidRequestError if it is invalid."""
    if isinstance(prompt, str):
        return PromptParts(prompt, prompt)
    if isinstance(prompt, TextPair):
        return PromptParts(prompt, prompt.first + prompt.second)
    if isinstance(prompt, FillIn):
        return PromptParts(prompt, None)
    if isinstance(prompt, PicturedPrompt):
        return PromptParts(prompt.token_ids, prompt.text, prompt.cache_salt, placed=prompt.pictures)
    if isinstance(prompt, Mapping):
        return _of_mapping({name: value for name, value in prompt.items() if value is not None})
    return PromptParts(token_ids_of(prompt), None)


def content_of(prompt: Prompt) -> str | Sequence[int]:
    """Text or token ids of a prompt that has nothing else. Raises InvalidRequestError."""
    parts = prompt_parts(prompt)
    if isinstance(parts.content, TextPair):
        raise InvalidRequestError("pairs of texts are only for models that score documents; give one text")
    if isinstance(parts.content, FillIn):
        raise InvalidRequestError("this call fills no gaps; give one text")
    if parts.pictures or parts.placed:
        raise InvalidRequestError("this call takes no pictures; remove multi_modal_data, or use generate")
    return parts.content


def prompt_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list. Also accepts columns of pandas and datasets, and arrays of token ids.

    Raises InvalidRequestError for a table with columns.
    """
    _refuse_table(prompts, "prompts")
    prompts = plain(prompts)
    if isinstance(prompts, str | Mapping | TextPair | FillIn | PicturedPrompt):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Iterable):
        raise InvalidRequestError(
            f"prompts must be text, token ids, or a list of either, not {shown(prompts)}"
        )
    items = list(prompts)
    if items and all(isinstance(plain(item), int) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def conversations(messages: Any) -> list[Any]:
    """One conversation or many, as a list of conversations. Also accepts a column of pandas, pyarrow or datasets.

    Raises InvalidRequestError for a table with columns, and for text instead of a conversation.
    """
    _refuse_table(messages, "conversations")
    messages = plain(messages)
    if not isinstance(messages, str | Mapping) and isinstance(messages, Iterable):
        many = [plain(each) for each in messages]
        many = [many] if many and isinstance(many[0], Mapping) else many
        if not any(isinstance(each, str) for each in many):
            return many
        messages = next(each for each in many if isinstance(each, str))
    if isinstance(messages, str):
        raise InvalidRequestError(
            "a conversation is a list of messages, not text; write "
            f"[{{'role': 'user', 'content': {shown(messages)}}}], or use generate for text as it is"
        )
    raise InvalidRequestError(
        f"messages must be a list of {{'role': ..., 'content': ...}}, or a list of such lists, not {shown(messages)}"
    )


def _refuse_table(given: object, what: str) -> None:
    if isinstance(given, str | list | tuple | Mapping):
        return
    names = getattr(given, "column_names", None) or getattr(given, "columns", None)
    if names is None or callable(names):
        return
    names = [str(name) for name in names]
    usual = [name for name in ("messages", "prompt", "question", "text") if name in names]
    raise InvalidRequestError(
        f"a table is not a list of {what}; give one of its columns ({', '.join(names[:8])}), for example "
        f"table[{(usual or names or ['prompt'])[0]!r}]"
    )


def sampling_params_of(given: object) -> SamplingParams:
    """Convert a dict of fields to `SamplingParams`; returns `SamplingParams` as it is. Raises InvalidRequestError."""
    if isinstance(given, Mapping):
        return SamplingParams.from_mapping(given)
    if isinstance(given, SamplingParams):
        return given
    raise InvalidRequestError(
        f"sampling_params must be SamplingParams(...) or a dict of its fields, not {shown(given)}"
    )


def _of_mapping(fields: Mapping[str, Any]) -> PromptParts:
    known = {"prompt", "prompt_token_ids", "multi_modal_data", "cache_salt"}
    if unknown := sorted(map(str, fields.keys() - known)):
        raise InvalidRequestError(
            "a prompt's dict has 'prompt' or 'prompt_token_ids', and may have 'multi_modal_data' and 'cache_salt'; "
            f"remove {shown(unknown[0])}"
        )
    text, token_ids = fields.get("prompt"), fields.get("prompt_token_ids")
    pictures = pictures_of(fields.get("multi_modal_data"))
    if pictures and token_ids is not None:
        raise InvalidRequestError(
            "a prompt of token ids cannot have pictures here: give its text, with one <image> for each"
        )
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(f"'prompt' of a prompt's dict must be text, not {shown(text)}")
    if token_ids is not None:
        return PromptParts(token_ids_of(token_ids), text, fields.get("cache_salt"))
    if text is None:
        raise InvalidRequestError("a prompt's dict needs 'prompt' (text) or 'prompt_token_ids'")
    return PromptParts(text, text, fields.get("cache_salt"), pictures)


def pictures_of(data: object) -> tuple[Picture, ...]:
    """The pictures of `multi_modal_data`. Raises InvalidRequestError, which names what else is in it."""
    if data is None:
        return ()
    if not isinstance(data, Mapping):
        raise InvalidRequestError(f"multi_modal_data must be {{'image': ...}}, not {shown(data)}")
    if other := [name for name in data if name != "image"]:
        raise InvalidRequestError(f"multi_modal_data has {shown(other[0])}; only 'image' is supported")
    given = data.get("image")
    if given is None:
        return ()
    many = given if isinstance(given, list | tuple) else [given]
    return tuple(
        each if isinstance(each, Picture) else Picture(each, f"multi_modal_data.image[{index}]")
        for index, each in enumerate(many)
    )


def is_pictured(prompt: Prompt) -> bool:
    """Whether a prompt has pictures, read or not."""
    return isinstance(prompt, PicturedPrompt) or (
        isinstance(prompt, Mapping) and bool(pictures_of(prompt.get("multi_modal_data")))
    )


def chat_prompt(
    render: Callable[..., str], messages: Sequence[Mapping[str, Any]], **options: Any
) -> str | TextPrompt:
    """The prompt of a conversation, with its pictures. render: `XlaBatchEngine.render_chat`; options: its own.

    Parts with pictures are OpenAI's {"type": "image_url", "image_url": {"url": ...}} and vLLM's
    {"type": "image_pil", "image_pil": ...}; {"type": "image", "image": ...} takes either. Raises what `render` raises.
    """
    rest, pictures = without_pictures(messages)
    return with_pictures(render(rest, **options), pictures)


def with_pictures(text: str, pictures: Sequence[Picture]) -> str | TextPrompt:
    """A prompt with pictures, or just its text."""
    return {"prompt": text, "multi_modal_data": {"image": list(pictures)}} if pictures else text


_PICTURE_PARTS = ("image_url", "image_pil", "image")
_OTHER_PARTS = (
    "input_audio",
    "audio_url",
    "audio",
    "video_url",
    "video",
    "file",
    "input_file",
    "image_embeds",
)


def has_pictures(messages: Sequence[Any]) -> bool:
    """Whether a conversation has a part that is a picture."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    return any(isinstance(part, Mapping) and part.get("type") in _PICTURE_PARTS for part in parts)


def without_pictures(messages: Any) -> tuple[Any, list[Picture]]:
    """The messages with {"type": "image"} for each picture, and the pictures. What is no list of parts stays."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        return messages, []
    pictures: list[Picture] = []
    rest = [_message_without(message, f"messages[{n}]", pictures) for n, message in enumerate(messages)]
    return (rest if pictures else messages), pictures


def _message_without(message: Any, where: str, pictures: list[Picture]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    content = content if isinstance(content, list | tuple) else plain(content)
    if not isinstance(content, list | tuple):
        return message
    parts = []
    for n, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _OTHER_PARTS:
            raise InvalidRequestError(
                f"{where}.content[{n}] is {shown(kind)}; only text and pictures are supported"
            )
        if kind in _PICTURE_PARTS:
            pictures.append(Picture(_source(part, f"{where}.content[{n}]"), f"{where}.content[{n}]"))
            part = {"type": "image"}
        parts.append(part)
    return {**message, "content": parts}


def _source(part: Mapping[str, Any], where: str) -> Any:
    kind = part["type"]
    source = part.get(kind)
    if kind == "image_url" and isinstance(source, Mapping):
        if source.get("detail") not in (None, "auto"):
            raise InvalidRequestError(
                f"{where}.image_url.detail must be 'auto'; mm_processor_kwargs sets the number of tiles for all"
            )
        if other := sorted(map(str, source.keys() - {"url", "detail"})):
            raise InvalidRequestError(f"{where}.image_url has {shown(other[0])}; it has 'url' and 'detail'")
        source = source.get("url")
    if source is None or (kind == "image_url" and not isinstance(source, str)):
        raise InvalidRequestError(f"{where} has no picture; {kind!r} must hold it")
    if other := sorted(map(str, part.keys() - {"type", kind})):
        raise InvalidRequestError(f"{where} has {shown(other[0])}; a picture's part has 'type' and {kind!r}")
    return source


def token_ids_of(prompt: object) -> tuple[int, ...]:
    """Convert a sequence, array or tensor of integers to token ids. Raises InvalidRequestError."""
    token_ids = plain(prompt)
    if isinstance(token_ids, str | bytes | Mapping) or not isinstance(token_ids, Iterable):
        raise InvalidRequestError(f"a prompt must be text or token ids, not {shown(prompt)}")
    return tuple(token_id if type(token_id) is int else plain(token_id) for token_id in token_ids)


def per_prompt(name: str, given: T | Sequence[T], kind: type[T], count: int) -> list[T]:
    """One value for each of `count` prompts: repeats a single value. Raises InvalidRequestError on other lengths."""
    if isinstance(given, kind | Mapping) or not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise InvalidRequestError(f"{len(given)} {name} for {count} prompts; give one or {count}")
    return list(given)


def pair_messages(query: str, document: str) -> list[dict[str, str]]:
    """A query and a document as messages for a reranker's chat template."""
    return [{"role": "query", "content": query}, {"role": "document", "content": document}]


def score_requests(
    contexts: TextOrIds | Sequence[TextOrIds],
    continuations: TextOrIds | Sequence[TextOrIds],
    encode: Callable[..., list[int]] | None,
) -> list[tuple[list[int], SamplingParams]]:
    """`score_request` for each pair; one context is used for all. Raises InvalidRequestError, naming the pair."""
    stems, rests = prompt_list(contexts), prompt_list(continuations)
    stems = stems * len(rests) if len(stems) == 1 else stems
    if len(stems) != len(rests):
        raise InvalidRequestError(
            f"{len(stems)} contexts for {len(rests)} continuations; give one or {len(rests)}"
        )
    pairs = []
    for index, (stem, rest) in enumerate(zip(stems, rests, strict=True)):
        try:
            pairs.append(score_request(content_of(stem), content_of(rest), encode))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"pair {index}: {error}") from error
    return pairs


def score_request(
    context: TextOrIds, continuation: TextOrIds, encode: Callable[..., list[int]] | None
) -> tuple[list[int], SamplingParams]:
    """The prompt that scores a continuation, and its parameters. Raises InvalidRequestError.

    encode: `Tokenizer.encode`; None if the model has no tokenizer.

    For texts, blanks at the end of the context are tokenised with the continuation, as models see them. Context and
    continuation are tokenised together, and the continuation's tokens are those after as many as the context alone
    has. If none are left, both are tokenised separately.
    """
    if isinstance(context, str) != isinstance(continuation, str):
        raise InvalidRequestError("context and continuation must both be text or both be token ids")
    if isinstance(context, str) and isinstance(continuation, str):
        if encode is None:
            raise InvalidRequestError("the model has no tokenizer; give token ids")
        stem = context.rstrip()
        before = encode(stem)
        begin, ids = len(before), encode(context + continuation)
        if len(ids) <= begin:
            ids = before + encode(context[len(stem) :] + continuation, add_special_tokens=False)
    else:
        begin = len(context)
        ids = [*token_ids_of(context), *token_ids_of(continuation)]
    if begin < 1:
        raise InvalidRequestError(
            "the context is empty; the first token has no probability. Give at least one token"
        )
    if len(ids) <= begin:
        raise InvalidRequestError("the continuation is empty; give at least one token")
    return ids, SamplingParams(
        temperature=0,
        max_tokens=1,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=1,
        logprobs_start=begin,
    )
