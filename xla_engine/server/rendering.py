"""Chats become prompts in processes of their own, in an order that is fair to keys, and within bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from xla_engine.server.errors import ApiError
from xla_engine.server.fair_worker import FairWorker
from xla_engine.server.shares import Shares
from xla_engine.text.parsers.chats import Chat
from xla_engine.text.worker_process import WorkerProcess

MAX_MESSAGES = 8192  # of one chat
MAX_VALUES = 1 << 16  # JSON values in the messages, tools and template variables of one chat
MAX_CHARACTERS = 1 << 22  # of one chat, names of fields included: a million tokens of text
SMALL_VALUES = 1 << 10  # a chat with no more of either is rendered in a few milliseconds
SMALL_CHARACTERS = 1 << 16
QUEUED_CHARACTERS = 4 * MAX_CHARACTERS  # of all chats that wait; each key may have half of it
_LEAST = 256  # characters that any chat counts as, for its messages' fields and the request around it

Render = Callable[..., str]


@dataclass(frozen=True, slots=True)
class ChatSize:
    """values: strings, numbers, lists and objects. characters: of strings and names."""

    values: int
    characters: int

    @property
    def is_small(self) -> bool:
        return self.values <= SMALL_VALUES and self.characters <= SMALL_CHARACTERS


def chat_size(chat: Chat) -> ChatSize:
    """How much there is to render, without the template. Raises ApiError for more than the bounds."""
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
    """A process that renders, and the thread that waits for it."""

    def __init__(self) -> None:
        self.process = WorkerProcess("chat_worker.py")
        self.worker = FairWorker("chat rendering")


class Rendering:
    """Renders chats: large ones in one process and small ones in another, which no large one holds up."""

    def __init__(self, render: Render) -> None:
        """render: `XlaBatchEngine.render_chat`."""
        self._render = render
        self._lanes = {True: _Lane(), False: _Lane()}  # by whether the chat is small
        self.shares = Shares(QUEUED_CHARACTERS, "too many chats wait for the chat template; ask again later")

    async def render(self, chat: Chat, key: str) -> str:
        """The chat's prompt, when its turn has come.

        key: whose it is. Raises ApiError for a chat beyond the bounds or one too many, and what `render_chat` does.
        """
        size = chat_size(chat)
        with self.shares.hold(size.characters + _LEAST, key):
            lane = self._lanes[size.is_small]
            render = partial(self._render, chat.messages, process=lane.process, **chat.options)
            return await lane.worker.run(render, key)

    def close(self) -> None:
        """End the processes; nothing is rendered from then on."""
        for lane in self._lanes.values():
            lane.process.stop()
            lane.worker.close()
