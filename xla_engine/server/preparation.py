"""Prepare requests off the event loop, in fair order between keys and within limits: render chats in worker processes,
read pictures, and compile constraints."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from xla_engine.engine.requests.validation import RequestValidator
from xla_engine.errors import InvalidRequestError
from xla_engine.prompts import Picture, PicturedPrompt, Prompt, with_pictures
from xla_engine.sampling_params import SamplingParams
from xla_engine.server.errors import invalid
from xla_engine.server.fairness import FairWorker, Shares
from xla_engine.text.parsers.chats import Chat
from xla_engine.text.worker_process import WorkerProcess
from xla_engine.utils.json_size import counted

MAX_MESSAGES = 8192  # in one chat
MAX_VALUES = 1 << 16  # JSON values in the messages, tools and template variables of one chat
MAX_CHARACTERS = 1 << 22  # in one chat, including field names: about a million tokens
SMALL_VALUES = 1 << 10  # a chat below both limits is rendered in a few milliseconds
SMALL_CHARACTERS = 1 << 16
QUEUED_CHARACTERS = 4 * MAX_CHARACTERS  # limit on all waiting chats; half of it per key
_LEAST = 256  # characters added to each chat, for its fields and the request around it
# constraints waiting or being compiled, up to a second each; half of them per key
MAX_WAITING = 256

Render = Callable[..., str]


@dataclass(frozen=True, slots=True)
class ChatSize:
    """Size of a chat. values: strings, numbers, lists and objects. characters: of strings and field names."""

    values: int
    characters: int

    @property
    def is_small(self) -> bool:
        return self.values <= SMALL_VALUES and self.characters <= SMALL_CHARACTERS


def check_parts(chat: Chat) -> None:
    """Raise ApiError if the messages have more parts than values are allowed, before any part is looked at."""
    contents = (each.get("content") for each in chat.messages if isinstance(each, Mapping))
    if sum(len(content) for content in contents if isinstance(content, list | tuple)) > MAX_VALUES:
        raise invalid(f"the messages have more than {MAX_VALUES} parts; send less", "messages")


def chat_size(chat: Chat) -> ChatSize:
    """The size of a chat's input to the template. Raises ApiError if it exceeds the limits."""
    if len(chat.messages) > MAX_MESSAGES:
        raise invalid(
            f"messages has {len(chat.messages)} entries, and {MAX_MESSAGES} are allowed; send the last ones, or join "
            "several into one",
            "messages",
        )
    values = characters = 0
    parts = (chat.messages, chat.options.get("tools"), chat.options.get("chat_template_kwargs"))
    for values, characters in counted(*parts):
        if values > MAX_VALUES or characters > MAX_CHARACTERS:
            raise invalid(
                f"messages, tools and chat_template_kwargs have more than {MAX_CHARACTERS} characters or "
                f"{MAX_VALUES} JSON values; send less",
                "messages",
            )
    return ChatSize(values, characters)


class Rendering:
    """Renders large chats in one process and small ones in another, so that large chats do not delay small ones."""

    def __init__(self, render: Render) -> None:
        """render: `XlaBatchEngine.render_chat`."""
        self._render = render
        self._lanes = {  # by whether the chat is small: a process, and the thread that waits for it
            is_small: (WorkerProcess("chat_worker.py"), FairWorker("chat rendering"))
            for is_small in (True, False)
        }
        self.shares = Shares(QUEUED_CHARACTERS, "too many chats wait for the chat template; retry later")

    async def render(self, chat: Chat, key: str) -> str:
        """Render a chat to its prompt when it is its key's turn.

        key: of the caller. Raises ApiError if the chat exceeds the limits or too many wait, and what `render_chat`
        raises.
        """
        size = chat_size(chat)
        with self.shares.hold(size.characters + _LEAST, key):
            process, worker = self._lanes[size.is_small]
            render = partial(self._render, chat.messages, process=process, **chat.options)
            return await worker.run(render, key)

    def close(self) -> None:
        """Stop the processes. Nothing can be rendered afterwards."""
        for process, worker in self._lanes.values():
            process.stop()
            worker.close()


class Pictures:
    """Reads pictures for one server. A host that is slow delays only the requests that wait for it."""

    def __init__(self, validator: RequestValidator) -> None:
        self._validator = validator
        self._worker = FairWorker("pictures")

    async def decoded(
        self, text: str, pictures: list[Picture], key: str, *, add_special_tokens: bool
    ) -> PicturedPrompt:
        """The prompt with its pictures decoded, when it is its key's turn.

        key: of the caller. Raises what `RequestValidator.decoded` raises.
        """
        if (reader := self._validator.pictures) is None:
            raise InvalidRequestError(self._validator.no_pictures)
        begun = await self._worker.run(partial(reader.start, pictures), key)
        if fetched := [asyncio.wrap_future(each) for each in begun if isinstance(each, Future)]:
            await asyncio.gather(*fetched, return_exceptions=True)
        read = [
            Picture(reader.file_of(picture, found), picture.name)
            for picture, found in zip(pictures, begun, strict=True)
        ]
        decode = partial(
            self._validator.decoded, with_pictures(text, read), add_special_tokens=add_special_tokens
        )
        decoded: Prompt = await self._worker.run(decode, key)
        assert isinstance(decoded, PicturedPrompt)
        return decoded

    def close(self) -> None:
        """Stop reading."""
        self._worker.close()


class Constraints:
    """Compiles the constraints of requests before these are queued."""

    def __init__(
        self, compile_: Callable[[SamplingParams], object], knows: Callable[[SamplingParams], bool]
    ) -> None:
        """compile_: may take a second, in any thread. knows: whether the constraint is compiled already.

        Both raise InvalidRequestError.
        """
        self._compile = compile_
        self._knows = knows
        self._worker = FairWorker("constraints")
        self.shares = Shares(MAX_WAITING, "too many constraints wait to be compiled; retry later")

    async def compile(self, params: SamplingParams, key: str) -> None:
        """Compile the constraint of a request when it is its key's turn, or return at once if it is compiled already.

        key: of the caller. Raises InvalidRequestError, and ApiError if too many are waiting.
        """
        if params.structured_outputs is None or self._knows(params):
            return
        with self.shares.hold(1, key):
            await self._worker.run(lambda: self._compile(params), key)

    def close(self) -> None:
        """Stop compiling."""
        self._worker.close()
