"""A server reads pictures off its event loop: a host that does not answer delays only the request that waits."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from xla_engine.errors import ImageUnreachableError, InvalidRequestError
from xla_engine.images.pictures import PictureReader
from xla_engine.prompts import Picture, PicturedPrompt, prompt_parts
from xla_engine.server.preparation import Pictures


class Validator:
    """Takes pictures that are files already."""

    no_pictures = "this engine reads no pictures"

    def __init__(self) -> None:
        self.fetched: dict[str, Future[bytes]] = {}
        self.pictures = SimpleNamespace(start=self.start, file_of=PictureReader.file_of)

    def start(self, pictures: list[Picture]) -> list[bytes | Future[bytes]]:
        return [
            self.fetched.setdefault(each.source, Future()) if isinstance(each.source, str) else each.source
            for each in pictures
        ]

    def decoded(self, prompt: Any, *, add_special_tokens: bool) -> PicturedPrompt:
        parts = prompt_parts(prompt)
        assert all(isinstance(each.source, bytes) for each in parts.pictures) and not add_special_tokens
        return PicturedPrompt(str(parts.content), (1,), tuple(each.source for each in parts.pictures))  # type: ignore[arg-type]


def test_a_host_that_does_not_answer_delays_only_its_request() -> None:
    async def main() -> None:
        validator = Validator()
        pictures = Pictures(validator)  # type: ignore[arg-type]

        async def placed(*sources: Any) -> Any:
            given = [Picture(each, f"messages[0].content[{n}]") for n, each in enumerate(sources)]
            return (await pictures.decoded("<image>", given, "key", add_special_tokens=False)).pictures

        slow = asyncio.create_task(placed(b"a", "slow", b"b"))
        bad = asyncio.create_task(placed("bad"))
        for _ in range(20):
            assert await placed(b"x") == (b"x",)
        assert not slow.done() and not bad.done()
        validator.fetched["bad"].set_exception(ImageUnreachableError("gone"))
        with pytest.raises(ImageUnreachableError, match=r"^messages\[0\]\.content\[0\]: gone"):
            await bad
        validator.fetched["slow"].set_result(b"s")
        assert await slow == (b"a", b"s", b"b")
        cancelled = asyncio.create_task(placed("never"))
        await placed(b"x")
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert await placed(b"x") == (b"x",)
        validator.pictures = None  # type: ignore[assignment]
        with pytest.raises(InvalidRequestError, match="reads no pictures"):
            await placed(b"x")
        pictures.close()

    asyncio.run(main())
