"""Read the pictures of requests off the event loop: hosts side by side, files in fair order between keys."""

import asyncio
from concurrent.futures import Future
from functools import partial

from xla_engine.engine.requests.validation import RequestValidator
from xla_engine.errors import InvalidRequestError
from xla_engine.prompts import Picture, PicturedPrompt, Prompt, with_pictures
from xla_engine.server.fair_worker import FairWorker


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
