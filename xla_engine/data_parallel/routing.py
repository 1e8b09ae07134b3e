"""Choose the engine of a request: the one that has its prefix, else the least loaded one.

As in cache-aware routers such as SGLang's, a prefix counts only if its engine is not much busier than the others.
"""

import hashlib
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence

REMEMBERED = 1 << 16  # blocks of prompts, of all engines together


class PrefixRouter:
    """Remembers which engine last read each block of past prompts.

    block_size: tokens; prefixes are found in whole blocks.
    slack: how many more requests the engine with the prefix may have than the least loaded one.
    """

    def __init__(self, block_size: int, slack: int) -> None:
        self._block_size, self._slack = block_size, slack
        self._owners: dict[bytes, int] = {}  # ordered by last read

    def choose(
        self, tokens: Sequence[int], salt: str, loads: Mapping[int, int], having: Collection[int] = ()
    ) -> int:
        """The engine for a prompt. loads: number of requests of each engine that can take one; not empty.

        having: engines with the request's adapter; they win ties.
        """
        keys = list(self._keys(tokens, salt))
        least = min(loads, key=lambda engine: (loads[engine], engine not in having, engine))
        chosen = least
        for key in reversed(keys):
            owner = self._owners.get(key)
            if owner is not None and owner in loads:
                chosen = owner if loads[owner] <= loads[least] + self._slack else least
                break
        for key in keys:
            self._owners.pop(key, None)
            self._owners[key] = chosen
        while len(self._owners) > REMEMBERED:
            del self._owners[next(iter(self._owners))]
        return chosen

    def forget(self, engine: int) -> None:
        """Forget all blocks of an engine that lost its cache."""
        self._owners = {key: owner for key, owner in self._owners.items() if owner != engine}

    def _keys(self, tokens: Sequence[int], salt: str) -> Iterator[bytes]:
        """A hash of the prefix up to the end of each whole block. Excludes the last token, which is always
        computed."""
        key = salt.encode(errors="surrogatepass")
        for end in range(self._block_size, len(tokens), self._block_size):
            content = array("q", tokens[end - self._block_size : end]).tobytes()
            key = hashlib.blake2b(key + content, digest_size=16).digest()
            yield key
