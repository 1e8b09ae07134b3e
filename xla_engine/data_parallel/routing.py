"""Which engine a request goes to: the one that has its prefix, else the one with the least to do.

The rule of cache-aware routers of servers, such as SGLang's: a prefix counts only while the engine that has it is not
much busier than the others.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence

REMEMBERED = 1 << 16  # blocks of prompts, of all engines together


class PrefixRouter:
    """Remembers for the blocks of past prompts which engine read them last.

    block_size: tokens; prefixes are found in whole blocks.
    slack: requests that the engine with the prefix may have more than the least busy one.
    """

    def __init__(self, block_size: int, slack: int) -> None:
        self._block_size, self._slack = block_size, slack
        self._owners: dict[bytes, int] = {}  # the latest read last

    def choose(
        self, tokens: Sequence[int], salt: str, loads: Mapping[int, int], having: Collection[int] = ()
    ) -> int:
        """The engine for a prompt. loads: requests of each engine that can take one; at least one.

        having: engines with the request's adapter, the first among those with equally many requests.
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
        """An engine has lost what it had read."""
        self._owners = {key: owner for key, owner in self._owners.items() if owner != engine}

    def _keys(self, tokens: Sequence[int], salt: str) -> Iterator[bytes]:
        """Of each whole block of a prompt, a hash of all tokens up to its end. The last token is always computed."""
        key = salt.encode(errors="surrogatepass")
        for end in range(self._block_size, len(tokens), self._block_size):
            content = array("q", tokens[end - self._block_size : end]).tobytes()
            key = hashlib.blake2b(key + content, digest_size=16).digest()
            yield key
