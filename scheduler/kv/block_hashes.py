"""Names of pages by what they hold: the SHA-256 of the key of the page before and of the page's own tokens.

What comes before the first page names model and tenant. Equal keys so mean equal tokens from the beginning on.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

from xla_engine.scheduler.request_state import RequestState


class BlockHashes:
    """Keys of pages of `page` tokens. `model`: its name. tails: what fills a page in part has a key as well."""

    def __init__(self, page: int, model: str, *, tails: bool = False) -> None:
        self.page = page
        self._model = model
        self._tails = tails

    def of_context(self, state: RequestState) -> tuple[bytes, ...]:
        """Keys of the pages of a request's context; made once."""
        if state.page_keys is None:
            state.page_keys = tuple(self._chain(self._root(state), state.context))
        return state.page_keys

    def of_all(self, state: RequestState) -> tuple[bytes, ...]:
        """Keys of the pages of context and generated tokens."""
        tokens = (*state.request.prompt_token_ids, *state.generated)
        known = self.of_context(state)[: state.context_tokens // self.page]
        rest = tokens[len(known) * self.page :]
        return (*known, *self._chain(known[-1] if known else self._root(state), rest))

    def _root(self, state: RequestState) -> bytes:
        return hashlib.sha256(
            f"{self._model}\0{state.request.cache_salt}".encode(errors="surrogatepass")
        ).digest()

    def _chain(self, key: bytes, tokens: Sequence[int]) -> Iterator[bytes]:
        """The keys of the pages of `tokens`, which follow the page of `key`."""
        end = len(tokens) if self._tails else len(tokens) - self.page + 1
        for start in range(0, end, self.page):
            page = array("q", tokens[start : start + self.page]).tobytes()
            key = hashlib.sha256(key + page).digest()
            yield key
