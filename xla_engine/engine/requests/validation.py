"""Checks a request against every limit of model and engine, without the device.

An engine calls it before it queues a request; a dry run calls it without an engine.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xla_engine.engine.protocol import RequestOptions, check_options
from xla_engine.engine.requests.pooling import params_for
from xla_engine.errors import EngineClosedError, InvalidRequestError, TokenLimitError
from xla_engine.model_loader.peft.request import LoRARequest
from xla_engine.model_loader.pooling import PoolingForm
from xla_engine.pooling_params import PoolingParams
from xla_engine.prompts import PicturedPrompt, Prompt, TextPair, prompt_parts
from xla_engine.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from xla_engine.scheduler import PRIORITIES, PromptImage, QueueFullError
from xla_engine.scheduler.request import misplaced
from xla_engine.text.fill_in import FillIn, fill_in_ids, fill_in_tokens
from xla_engine.text.grammar import Grammars
from xla_engine.text.token_mask import TokenMask
from xla_engine.text.tokenizer import Tokenizer
from xla_engine.utils.plain import integer_of
from xla_engine.utils.shown import shown

if TYPE_CHECKING:
    from xla_engine.images.pictures import PictureReader
    from xla_engine.images.prompt import PlacedPicture

LONGEST_PATIENCE_S = 10**9
NO_PICTURES = "this engine reads no pictures, whatever the model; remove them from the request"
_NORMALISER_SLACK = 4  # a tokenizer's normaliser shortens text by less than this factor


class CheckedRequest(NamedTuple):
    """A valid request.

    text: the prompt as its output shows it. params: with `max_tokens` as a number. stop_ids: every id that ends it.
    eos_ids: the model's. images: the pictures of the prompt, decoded. dry_breakers, positions, second_text: as in
    `RowSettings`.
    """

    text: str | None
    token_ids: tuple[int, ...]
    params: SamplingParams
    stop_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    images: tuple[PromptImage, ...] = ()
    dry_breakers: tuple[int, ...] = ()
    positions: np.ndarray[Any, Any] | None = None
    second_text: int = 0


def check_takes(closed: str | None, *, draining: bool) -> None:
    """Raise EngineClosedError if the engine is closed, for the given cause, or is draining."""
    if closed is not None:
        raise EngineClosedError(f"the engine is closed ({closed}); make a new one")
    if draining:
        raise EngineClosedError("the engine is draining and accepts no more requests")


class ImageForm(NamedTuple):
    """What pictures must be like.

    tokens: how many prompt tokens a tile of a shape has; None if the tower cannot read that shape. grid: rows and
    columns of these tokens; None if their positions are those in the prompt. places: of the feature buffer.
    place_tokens: how many tokens fit into a place; a larger tile takes several places.
    """

    tokens: Callable[[tuple[int, ...]], int | None]
    grid: Callable[[tuple[int, ...]], tuple[int, int] | None]
    place_tokens: int
    places: int


@dataclass(frozen=True, kw_only=True)
class RequestValidator:
    """The limits of one model in one engine.

    vocab_size, eos_token_ids: the model's.
    max_model_len: the most tokens of a sequence, prompt and generated.
    tokenizer: None if prompts can only be token ids.
    max_waiting: the most sequences that may wait, beyond those that fit into free slots; None: unbounded.
    max_num_seqs: slots.
    takes_turns: whether the scheduling policy is "round_robin".
    pictures: reads the pictures of prompts; None if the engine takes none.
    has_dry: whether `dry_multiplier` and `penalty_last_n` are enabled.
    pooler: how requests pool; None if they generate. hidden_size: the length of a pooled vector.
    never_fits: called with a number of prompt tokens and of new tokens; says why they can never fit into memory, or
        returns None if they can.
    images: what decoded pictures must be like; or why there can be none, and what to do.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    tokenizer: Tokenizer | None
    max_waiting: int | None = None
    max_num_seqs: int = 0
    takes_turns: bool = False
    has_dry: bool = False
    pooler: PoolingForm | None = None
    hidden_size: int = 0
    pictures: "PictureReader | None" = None
    never_fits: Callable[[int, int], str | None] = lambda prompt_tokens, max_tokens: None
    images: ImageForm | str = NO_PICTURES

    @property
    def labels(self) -> tuple[str | None, ...]:
        """The names of a classifier's classes; empty where there is none."""
        return () if self.pooler is None else self.pooler.labels

    @property
    def no_pictures(self) -> str:
        """Why requests can have no pictures that would have to be read, and what to do."""
        return self.images if isinstance(self.images, str) else NO_PICTURES

    def checked(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions, *, add_special_tokens: bool
    ) -> CheckedRequest:
        """Validate a request, except for its mask and the queue. Moves the prompt's `cache_salt` into `options`.

        Raises InvalidRequestError, which names a picture that cannot be read; TokenLimitError if it does not fit.
        """
        content, text, salt, _, placed = prompt_parts(
            self.placed(prompt, add_special_tokens=add_special_tokens)
        )
        if salt is not None:
            options["cache_salt"] = salt
        self.check_options("submit", options)
        token_ids, is_cut = self._tokenised(
            content, params, add_special_tokens=add_special_tokens, pictured=bool(placed)
        )
        if params.truncate_prompt_tokens is not None:
            params = replace(
                params, truncate_prompt_tokens=None
            )  # done: what continues this prompt is not cut
        if is_cut and text is not None and self.tokenizer is not None:
            text = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        if isinstance(content, FillIn) and self.tokenizer is not None and not params.ignore_eos:
            ends = (*params.stop_token_ids, *fill_in_tokens(self.tokenizer).ends)
            params = replace(params, stop_token_ids=tuple(dict.fromkeys(ends)))
        params = self.with_limit(params, len(token_ids))
        stop_ids, images = self.stop_token_ids(params), self._images(placed)
        if images:
            self._check_images(images, len(token_ids), params)
        positions = self._positions(images, len(token_ids))
        breakers, second = self.dry_breakers(params), 0
        if isinstance(content, TextPair) and self.pooler is not None and self.pooler.token_types > 1:
            assert self.tokenizer is not None  # it made `token_ids`
            second = self.tokenizer.second_start(content.first, content.second)
        return CheckedRequest(
            text, token_ids, params, stop_ids, self.eos_token_ids, images, breakers, positions, second
        )

    def decoded(self, prompt: Prompt, *, add_special_tokens: bool) -> Prompt:
        """`placed`, with the pictures decoded. This takes a while, so hold no lock. Raises what `placed` raises."""
        prompt = self.placed(prompt, add_special_tokens=add_special_tokens)
        if not isinstance(prompt, PicturedPrompt):
            return prompt
        return replace(prompt, pictures=self._images(prompt.pictures))

    def _images(self, pictures: Sequence["PlacedPicture | PromptImage"]) -> tuple[PromptImage, ...]:
        if pictures and isinstance(self.images, str):
            raise InvalidRequestError(self.images)
        return tuple(each if isinstance(each, PromptImage) else self._image(each) for each in pictures)

    def _image(self, picture: "PlacedPicture") -> PromptImage:
        assert self.pictures is not None, "a picture was placed without a reader"
        lengths = picture.grid.tile_tokens(self.pictures.image_seq_len)
        spans = tuple(zip(picture.starts, lengths, strict=True))
        return PromptImage(digest=picture.digest, tiles=self.pictures.tiles(picture), spans=spans)

    def placed(self, prompt: Prompt, *, add_special_tokens: bool) -> Prompt:
        """Read the pictures of a prompt, if it has any, and tokenise it. This takes a while, so hold no lock.

        Raises InvalidRequestError, whose subclasses for pictures name the picture.
        """
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        marked = isinstance(text, str) and self.pictures is not None and self.pictures.marks(text)
        has_data = isinstance(prompt, Mapping) and prompt.get("multi_modal_data") is not None
        if not (marked or has_data or isinstance(prompt, PicturedPrompt)):
            return prompt  # nearly every prompt; token ids are not looked at
        parts = prompt_parts(prompt)
        if parts.pictures and self.pictures is None:
            raise InvalidRequestError(self.no_pictures)
        if parts.placed and self.pictures is None and isinstance(self.images, str):
            raise InvalidRequestError(self.images)
        if self.pictures is None or not isinstance(parts.content, str) or not (parts.pictures or marked):
            return prompt
        return self.pictures.prompt(
            parts.content, parts.pictures, add_special_tokens=add_special_tokens, cache_salt=parts.cache_salt
        )

    def token_ids(
        self,
        prompt: str | Sequence[int] | TextPair | FillIn,
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
        pictured: bool = False,
    ) -> tuple[int, ...]:
        """The prompt's token ids, truncated if the parameters say so.

        pictured: whether they hold the places of pictures. Raises InvalidRequestError; TokenLimitError if the request
        does not fit.
        """
        return self._tokenised(prompt, params, add_special_tokens=add_special_tokens, pictured=pictured)[0]

    def part_of(self, text: str, params: SamplingParams) -> str:
        """The part of a text from which a truncated prompt is taken: all of it, unless it is far too long.

        Truncation keeps the end of what is generated from, and the beginning of what is pooled.
        """
        if self.tokenizer is None or len(text) <= self.max_model_len:
            return text
        most = self._max_characters(self.tokenizer)
        return text[:most] if isinstance(params, PoolingParams) else text[-most:]

    def most_kept(self, params: SamplingParams) -> int | None:
        """The most tokens of a prompt that truncation keeps; None if nothing is truncated."""
        most = params.truncate_prompt_tokens
        if isinstance(params, PoolingParams):
            return most if most is None else self.max_model_len if most < 0 else min(most, self.max_model_len)
        if most != -1:
            return most
        least = _least_tokens(params)
        room = range(1, self.max_model_len - least + 1)
        fits = bisect_left(room, True, key=lambda tokens: self.never_fits(tokens, least) is not None)
        return max(fits, 1)

    def _tokenised(
        self,
        prompt: str | Sequence[int] | TextPair | FillIn,
        params: SamplingParams,
        *,
        add_special_tokens: bool,
        pictured: bool,
    ) -> tuple[tuple[int, ...], bool]:
        """As `token_ids`, and whether the beginning of the prompt was cut off."""
        most, pools = self.most_kept(params), isinstance(params, PoolingParams)
        is_cut = False
        if most is not None and isinstance(prompt, str):
            whole, prompt = prompt, self.part_of(prompt, params)
            is_cut = len(prompt) < len(whole) and not pools
        if isinstance(prompt, str | TextPair | FillIn):
            if self.tokenizer is None:
                raise InvalidRequestError("the model has no tokenizer.json; pass the prompt as token ids")
            texts = (prompt,) if isinstance(prompt, str) else _two_texts(prompt)
            if most is None or not pools:
                self._check_characters(sum(map(len, texts)), self.tokenizer)
            if isinstance(prompt, FillIn):
                token_ids = fill_in_ids(prompt, self.tokenizer, add_special_tokens=add_special_tokens)
            else:
                token_ids = tuple(self.tokenizer.encode(*texts, add_special_tokens=add_special_tokens))
            if most is not None and pools:
                token_ids = without_end(token_ids, most, self.tokenizer.special_token_ids)
        elif most is not None and pools:
            token_ids = tuple(prompt[:most])
        else:
            if most is None:
                self._check_length(len(prompt), params)
            token_ids = tuple(prompt)
        if most is not None and len(token_ids) > most:
            if pictured or isinstance(prompt, TextPair | FillIn):
                what = "pictures" if pictured else "a suffix" if isinstance(prompt, FillIn) else "two texts"
                raise TokenLimitError(
                    f"a prompt with {what} cannot be truncated, and this one has {len(token_ids)} tokens; "
                    "shorten it, or leave truncate_prompt_tokens out"
                )
            token_ids, is_cut = token_ids[-most:], True
        if not token_ids:
            raise InvalidRequestError("the prompt is empty; give at least one token")
        for token_id in token_ids:
            if (
                isinstance(token_id, bool)
                or not isinstance(token_id, int)
                or not 0 <= token_id < self.vocab_size
            ):
                raise InvalidRequestError(
                    f"prompt token id {shown(token_id)} is not an integer in 0..{self.vocab_size - 1}, "
                    "the model's vocabulary"
                )
        self._check_length(len(token_ids), params)
        if (why := self.never_fits(len(token_ids), _least_tokens(params))) is not None:
            raise TokenLimitError(
                f"prompt and max_tokens can never fit: {why}; lower max_tokens or raise num_blocks"
            )
        return token_ids, is_cut

    def with_limit(self, params: SamplingParams, prompt_tokens: int) -> SamplingParams:
        """Complete `params`: if `max_tokens` is None, it becomes the most that fit; pooling gets the model's form.

        Raises InvalidRequestError if a pooling model is asked to generate, or the other way round.
        """
        if self.pooler is not None or isinstance(params, PoolingParams):
            return self._pooling(params)
        if params.max_tokens is not None:
            return params
        room = range(1, self.max_model_len - prompt_tokens + 1)
        fits = bisect_left(room, True, key=lambda tokens: self.never_fits(prompt_tokens, tokens) is not None)
        return replace(params, max_tokens=fits)

    def _pooling(self, params: SamplingParams) -> PoolingParams:
        if self.pooler is None:
            raise InvalidRequestError(
                'this engine generates and does not pool; start it with runner="pooling" (`--runner pooling`)'
            )
        if not isinstance(params, PoolingParams):
            raise InvalidRequestError(
                "this engine pools and does not generate: use embed, classify, score_documents or rerank, or start it "
                'with runner="generate"'
            )
        return params_for(self.pooler, params, self.hidden_size)

    def check_more(self, prompt_tokens: int, tokens: int, more: object) -> int:
        """How many `more` tokens a request may get. prompt_tokens, tokens: its length, and what it has generated.

        Raises InvalidRequestError; TokenLimitError if they do not fit.
        """
        count = integer_of(more)
        if count is None or count < 1:
            raise InvalidRequestError(f"max_tokens must be an integer of at least 1, not {shown(more)}")
        if (total := prompt_tokens + tokens + count) > self.max_model_len:
            raise TokenLimitError(
                f"prompt ({prompt_tokens} tokens), what was generated ({tokens}) and max_tokens ({count}) are "
                f"{total}, more than max_model_len {self.max_model_len}; lower max_tokens or raise max_model_len"
            )
        if (why := self.never_fits(prompt_tokens, tokens + count)) is not None:
            raise TokenLimitError(
                f"the longer request can never fit: {why}; lower max_tokens or raise num_blocks"
            )
        return count

    def check_queue(self, n: int, waiting: int, free: int) -> None:
        """Check that n more sequences fit into queue and free slots. waiting, free: sequences waiting, and free slots.

        Raises QueueFullError if they do not fit now, InvalidRequestError if they never can.
        """
        if self.max_waiting is None:
            return
        if n > (most := self.max_num_seqs + self.max_waiting):
            raise InvalidRequestError(
                f"n is {n}, but an engine of {self.max_num_seqs} slots and max_waiting {self.max_waiting} never holds "
                f"more than {most}: lower n, or raise the bound"
            )
        if waiting + n > self.max_waiting + free:
            raise QueueFullError(
                f"{n} sequences were not accepted: {max(waiting - free, 0)} wait and max_waiting is "
                f"{self.max_waiting}; "
                "submit them again after a step, lower n, or raise the bound"
            )

    def check_options(self, call: str, options: RequestOptions) -> None:
        """Check the options of a call. Integers that are written as floats become integers.

        Raises InvalidRequestError for one that is unknown or has an invalid value.
        """
        given: dict[str, Any] = options  # type: ignore[assignment]  # JSON and Python's callers give anything
        if unknown := given.keys() - RequestOptions.__annotations__.keys():
            check_options(call, {name: given[name] for name in unknown})
        for name in ("priority", "quantum"):
            if (number := integer_of(given.get(name))) is not None:
                given[name] = number
        priority, quantum = given.get("priority", 0), given.get("quantum")
        cache_salt, lora_request = given.get("cache_salt", ""), given.get("lora_request")
        deadline_s, queue_timeout_s = given.get("deadline_s"), given.get("queue_timeout_s")
        if lora_request is not None and not isinstance(lora_request, LoRARequest):
            raise InvalidRequestError(f"lora_request must be a LoRARequest, not {shown(lora_request)}")
        if not isinstance(cache_salt, str):
            raise InvalidRequestError(f"cache_salt must be a string, not {shown(cache_salt)}")
        if isinstance(priority, bool) or not isinstance(priority, int) or priority not in PRIORITIES:
            raise InvalidRequestError(
                f"priority must be an integer from {PRIORITIES[0]} (soonest) to {PRIORITIES[-1]}, not "
                f"{shown(priority)}"
            )
        if quantum is not None and (
            not self.takes_turns or isinstance(quantum, bool) or not isinstance(quantum, int) or quantum < 1
        ):
            raise InvalidRequestError(
                f"quantum must be an integer of at least 1 step, not {shown(quantum)}"
                if self.takes_turns
                else 'quantum is for the scheduling_policy "round_robin": leave it out'
            )
        for name, seconds in (("deadline_s", deadline_s), ("queue_timeout_s", queue_timeout_s)):
            if seconds is not None and (
                isinstance(seconds, bool)
                or not isinstance(seconds, int | float)
                or not 0 < seconds <= LONGEST_PATIENCE_S
            ):
                raise InvalidRequestError(
                    f"{name} must be a number of seconds above 0 and at most {LONGEST_PATIENCE_S}, not "
                    f"{shown(seconds)}"
                )

    def stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Every id that ends the request, the model's eos ids first. The device checks the first MAX_STOP_TOKEN_IDS.

        Raises InvalidRequestError.
        """
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError(
                "the model has no tokenizer.json, so stop strings cannot be found; use stop_token_ids"
            )
        eos = () if params.ignore_eos else self.eos_token_ids
        stop_ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
        for token_id in stop_ids:
            if token_id >= self.vocab_size:
                raise InvalidRequestError(f"stop token id {token_id} is not in 0..{self.vocab_size - 1}")
        if params.min_tokens and len(stop_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"{len(stop_ids)} stop ids with the model's {len(eos)} eos ids; with min_tokens at most "
                f"{MAX_STOP_TOKEN_IDS}: give fewer stop_token_ids, set ignore_eos, or leave out min_tokens"
            )
        return stop_ids

    def token_mask(self, params: SamplingParams, stop_ids: tuple[int, ...]) -> TokenMask | None:
        """The mask of the tokens that a sequence may sample; None if it may sample all. Also checks the bias ids.

        Raises InvalidRequestError.
        """
        for name, ids in (
            ("logit_bias", params.logit_bias or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
        ):
            if ids and max(ids) >= self.vocab_size:
                raise InvalidRequestError(f"{name} names id {max(ids)}, not in 0..{self.vocab_size - 1}")
        constraint = params.structured_outputs
        if params.allowed_token_ids is None and not params.bad_words and constraint is None:
            return None
        return TokenMask(
            self.vocab_size,
            allowed=params.allowed_token_ids,
            bad_words=self._bad_words(params.bad_words),
            stop_ids=stop_ids,
            min_tokens=params.min_tokens,
            matcher=None if constraint is None else self.grammars.matcher(constraint),
        )

    def try_constraint(self, params: SamplingParams) -> None:
        """Compile the constraint of a request, unless it is cached. Raises InvalidRequestError if it is invalid."""
        if params.structured_outputs is not None:
            self.grammars.matcher(params.structured_outputs)

    def knows_constraint(self, params: SamplingParams) -> bool:
        """Whether `token_mask` need not compile a constraint, which may take a second. Raises InvalidRequestError."""
        if params.structured_outputs is None:
            return True
        return "grammars" in vars(self) and self.grammars.knows(params.structured_outputs)

    def dry_breakers(self, params: SamplingParams) -> tuple[int, ...]:
        """The tokens that break a sequence for DRY. Raises InvalidRequestError, also if DRY is not enabled."""
        if params.dry_multiplier == 0 and params.penalty_last_n < 0:
            return ()
        if not self.has_dry:
            raise InvalidRequestError(
                "dry_multiplier and penalty_last_n need an engine that was started with enable_dry"
            )
        found = []
        for each in params.dry_sequence_breakers if params.dry_multiplier > 0 else ():
            if isinstance(each, str):
                if self.tokenizer is None:
                    raise InvalidRequestError(
                        "the model has no tokenizer.json; give dry_sequence_breakers as token ids, or none"
                    )
                each = self.tokenizer.encode(f"a{each}", add_special_tokens=False)[-1]
            elif each >= self.vocab_size:
                raise InvalidRequestError(f"sequence breaker {each} is not in 0..{self.vocab_size - 1}")
            found.append(each)
        return tuple(dict.fromkeys(found))

    @cached_property
    def grammars(self) -> Grammars:
        if self.tokenizer is None:
            raise InvalidRequestError(
                "the model has no tokenizer.json, so structured_outputs cannot be followed; use allowed_token_ids"
            )
        return Grammars(self.tokenizer, self.vocab_size, self.eos_token_ids)

    def _bad_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """The tokens of each word, both with a space before it and without."""
        if not words:
            return []
        if self.tokenizer is None:
            raise InvalidRequestError(
                "the model has no tokenizer.json, so bad_words cannot be tokenised; use logit_bias or "
                "allowed_token_ids"
            )
        forms = (prefix + word.lstrip() for word in words for prefix in ("", " "))
        found = {tuple(self.tokenizer.encode(form, add_special_tokens=False)) for form in forms}
        return sorted(found - {()})

    def _check_characters(self, length: int, tokenizer: Tokenizer) -> None:
        """Refuse text that cannot fit, before spending seconds on tokenising it.

        No token has more than `longest_token` characters. The factor allows for normalisers, which may shorten text.
        """
        if length <= self.max_model_len:  # without asking for the longest token, which takes a while
            return
        bound = self._max_characters(tokenizer)
        if length > bound:
            raise TokenLimitError(
                f"the prompt has {length} characters; no text of more than {bound} can fit into max_model_len "
                f"{self.max_model_len} tokens: shorten it or raise max_model_len"
            )

    def _max_characters(self, tokenizer: Tokenizer) -> int:
        return _NORMALISER_SLACK * tokenizer.longest_token * self.max_model_len

    def _check_images(
        self, images: Sequence[PromptImage], prompt_tokens: int, params: SamplingParams
    ) -> None:
        assert not isinstance(self.images, str)
        if (why := misplaced(images, prompt_tokens)) is not None:
            raise InvalidRequestError(why)
        if params.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs are not supported for prompts with pictures; leave prompt_logprobs out"
            )
        form = self.images
        for number, image in enumerate(images):
            for tile, (_, length) in zip(image.tiles, image.spans, strict=True):
                shape, kind = getattr(tile, "shape", ()), str(getattr(tile, "dtype", ""))
                if kind != "uint8" or (tokens := form.tokens(tuple(shape))) is None:
                    raise InvalidRequestError(
                        f"picture {number} has a tile of {kind} {list(shape)}, which the vision tower does not read; "
                        "make it uint8 as the checkpoint's processor does"
                    )
                if length != tokens:
                    raise InvalidRequestError(
                        f"picture {number} has a span of {length} positions, and a tile has {tokens} tokens"
                    )
        needed = sum(-(-length // form.place_tokens) for image in images for _, length in image.spans)
        if needed > form.places:
            raise TokenLimitError(
                f"the prompt's pictures have {needed * form.place_tokens} tokens; the engine has room for "
                f"{form.places * form.place_tokens}: raise image_cache_bytes, or send fewer or smaller pictures"
            )

    def _positions(self, images: Sequence[PromptImage], length: int) -> np.ndarray[Any, Any] | None:
        """`RowSettings.positions` of a prompt of this length; None if all are places in the prompt."""
        if not images or isinstance(self.images, str):
            return None
        grids = []
        for image in images:
            for tile, (start, _) in zip(image.tiles, image.spans, strict=True):
                if (grid := self.images.grid(tile.shape)) is None:
                    return None
                grids.append((start, *grid))
        from xla_engine.runner.row_settings import grid_positions  # jax, which a dry run does not need

        return grid_positions(length, grids)

    def _check_length(self, prompt_tokens: int, params: SamplingParams) -> None:
        if params.logprobs_start and params.logprobs_start >= prompt_tokens:
            raise InvalidRequestError(
                f"logprobs_start {params.logprobs_start} is beyond the prompt of {prompt_tokens} tokens; give at most "
                f"{prompt_tokens - 1}"
            )
        if isinstance(params, PoolingParams):  # nothing comes behind the prompt
            if prompt_tokens > self.max_model_len:
                raise TokenLimitError(
                    f"the text has {prompt_tokens} tokens, more than max_model_len {self.max_model_len}; shorten it, "
                    "set truncate_prompt_tokens to -1, or raise max_model_len"
                )
            return
        least = _least_tokens(params)
        total = prompt_tokens + least
        if total > self.max_model_len:
            raise TokenLimitError(
                f"prompt ({prompt_tokens} tokens) plus max_tokens ({least}) is {total}, more than "
                f"max_model_len {self.max_model_len}; shorten the prompt, lower max_tokens or raise max_model_len; "
                "truncate_prompt_tokens -1 keeps as much of the prompt's end as fits"
            )


def without_end(token_ids: tuple[int, ...], most: int, special: Collection[int]) -> tuple[int, ...]:
    """The first `most` of the tokens of a text; special tokens at its end stay there."""
    end = len(token_ids)
    while end and token_ids[end - 1] in special:
        end -= 1
    tail = token_ids[end:] if len(token_ids) - end < most else ()
    return token_ids if len(token_ids) <= most else (*token_ids[: most - len(tail)], *tail)


def _two_texts(prompt: TextPair | FillIn) -> tuple[str, str]:
    if isinstance(prompt, FillIn):
        return prompt.before, prompt.after
    return prompt.first, prompt.second


def _least_tokens(params: SamplingParams) -> int:
    """The new tokens that a request must have room for."""
    return max(1, params.min_tokens) if params.max_tokens is None else params.max_tokens
