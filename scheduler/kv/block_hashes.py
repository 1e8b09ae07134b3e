"""Keys of KV blocks by content: the SHA-256 of the previous block's key and the block's content.

The chain begins with a hash of model, cache salt and adapter. So equal keys mean equal tokens and
pictures from the beginning on.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence

from xla_engine.scheduler.plan import StoredBlock
from xla_engine.scheduler.request import Request
from xla_engine.scheduler.request_state import RequestState


class BlockHashes:
    """Keys of blocks of `block_size` tokens. model: names the model.

    tails: also give a key to the last block if it is only partly filled.
    """

    def __init__(self, block_size: int, model: str, *, tails: bool = False) -> None:
        self.block_size = block_size
        self._model = model
        self._tails = tails

    def of_context(self, state: RequestState) -> tuple[bytes, ...]:
        """Keys of the blocks of a request's context; computed once."""
        if state.block_hashes is None:
            state.block_hashes = tuple(self._chain(self._root(state.request), state.content))
        return state.block_hashes

    def full_blocks(self, request: Request) -> Iterator[StoredBlock]:
        """The full blocks of a prompt before its first picture, in order, with no place in the pool."""
        tokens, parent = request.prompt_token_ids, self._root(request)
        end = request.images[0].spans[0][0] if request.images else len(tokens)
        whole = end // self.block_size * self.block_size
        for at, key in enumerate(self._chain(parent, tokens[:whole])):
            own = tuple(tokens[at * self.block_size : (at + 1) * self.block_size])
            yield StoredBlock(key=key, parent=parent, tokens=own)
            parent = key

    def of_all(self, state: RequestState) -> tuple[bytes, ...]:
        """Keys of the blocks of context and generated tokens."""
        tokens = (*state.request.content, *state.generated)
        known = self.of_context(state)[: state.context_tokens // self.block_size]
        rest = tokens[len(known) * self.block_size :]
        return (*known, *self._chain(known[-1] if known else self._root(state.request), rest))

    def _root(self, request: Request) -> bytes:
        root = hashlib.sha256(f"{self._model}\0{request.cache_salt}".encode(errors="surrogatepass")).digest()
        if not request.adapter:
            return root
        return hashlib.sha256(root + request.adapter.encode(errors="surrogatepass")).digest()

    def _chain(self, key: bytes, tokens: Sequence[int]) -> Iterator[bytes]:
        """Keys of the blocks of `tokens`, which follow the block with this key."""
        end = len(tokens) if self._tails else len(tokens) - self.block_size + 1
        for start in range(0, end, self.block_size):
            key = hashlib.sha256(key + _bytes(tokens[start : start + self.block_size])).digest()
            yield key


def _bytes(content: Sequence[int]) -> bytes:
    if min(content) < 0:  # pictures; these letters are in no token id's eight bytes
        return repr(tuple(content)).encode()
    return array("q", content).tobytes()
