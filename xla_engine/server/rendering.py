"""Render chats to prompts in worker processes, in fair order between keys, and within limits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from xla_engine.server.errors import ApiError
from xla_engine.server.fair_worker import FairWorker
from xla_engine.server.shares import Shares
from xla_engine.text.parsers.chats import Chat
from xla_engine.text.worker_process import WorkerProcess

MAX_MESSAGES = 8192  # in one chat
MAX_VALUES = 1 << 16  # JSON values in the messages, tools and template variables of one chat
MAX_CHARACTERS = 1 << 22  # in one chat, including field names: about a million tokens
SMALL_VALUES = 1 << 10  # a chat below both limits is rendered in a few milliseconds
SMALL_CHARACTERS = 1 << 16
QUEUED_CHARACTERS = 4 * MAX_CHARACTERS  # limit on all waiting chats; half of it per key
_LEAST = 256  # characters added to each chat, for its fields and the request around it

Render = Callable[..., str]


@dataclass(frozen=True, slots=True)
class ChatSize:
    """Size of a chat. values: strings, numbers, lists and objects. characters: of strings and field names."""

    values: int
    characters: int

    @property
    def is_small(self) -> bool:
        return self.values <= SMALL_VALUES and self.characters <= SMALL_CHARACTERS


def chat_size(chat: Chat) -> ChatSize:
    """The size of a chat's input to the template. Raises ApiError if it exceeds the limits."""
    if len(chat.messages) > MAX_MESSAGES:
        raise ApiError(
            400,
            f"messages has {len(chat.messages)} entries, and {MAX_MESSAGES} are allowed; send the last ones, or join "
            "several into one",
            code="invalid_request",
            param="messages",
        )
    values = characters = 0
    level: list[Any] = [chat.messages, chat.options.get("tools"), chat.options.get("chat_template_kwargs")]
    while level:
        below: list[Any] = []
        for value in level:
            if isinstance(value, str):
                characters += len(value)
            elif isinstance(value, Mapping):
                values += len(value)
                characters += sum(len(name) for name in value if isinstance(name, str))
                below += value.values()
            elif isinstance(value, Sequence):
                values += len(value)
                below += value
            if values > MAX_VALUES or characters > MAX_CHARACTERS:
                raise ApiError(
                    400,
                    f"messages, tools and chat_template_kwargs have more than {MAX_CHARACTERS} characters or "
                    f"{MAX_VALUES} JSON values; send less",
                    code="invalid_request",
                    param="messages",
                )
        level = below
    return ChatSize(values, characters)


class _Lane:
    """A rendering process and the thread that waits for it."""

    def __init__(self) -> None:
        self.process = WorkerProcess("chat_worker.py")
        self.worker = FairWorker("chat rendering")


class Rendering:
    """Renders large chats in one process and small ones in another, so that large chats do not delay small ones."""

    def __init__(self, render: Render) -> None:
        """render: `XlaBatchEngine.render_chat`."""
        self._render = render
        self._lanes = {True: _Lane(), False: _Lane()}  # by whether the chat is small
        self.shares = Shares(QUEUED_CHARACTERS, "too many chats wait for the chat template; retry later")

    async def render(self, chat: Chat, key: str) -> str:
        """Render a chat to its prompt when it is its key's turn.

        key: of the caller. Raises ApiError if the chat exceeds the limits or too many wait, and what `render_chat`
        raises.
        """
        size = chat_size(chat)
        with self.shares.hold(size.characters + _LEAST, key):
            lane = self._lanes[size.is_small]
            render = partial(self._render, chat.messages, process=lane.process, **chat.options)
            return await lane.worker.run(render, key)

    def close(self) -> None:
        """Stop the processes. Nothing can be rendered afterwards."""
        for lane in self._lanes.values():
            lane.process.stop()
            lane.worker.close()
