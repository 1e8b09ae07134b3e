"""Plans the vision tower's work, and where the features of tiles lie in the device's feature buffer.

The buffer has places for `places` tiles. A tile's features stay in their place until it is needed for another tile:
the least recently used makes room, unless a prompt that is being prefilled still reads it. So several questions about
one picture encode it once. Tiles are known by cache salt and the picture's digest, so no tenant learns from the time
to first token what others have sent.

A plan's encodes run before its chunks, and the device runs plans in order. So a place may be written in the plan after
the one with the last chunk that reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from xla_engine.scheduler.config import SchedulerConfig
from xla_engine.scheduler.plan import Encode, FeatureSpan
from xla_engine.scheduler.request import Request

Key = tuple[str, str, int]  # cache salt, digest, tile


class Features:
    """The places of the feature buffer, and the tile that is being encoded."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._stages, self._slice = config.encode_stages, config.encode_slice
        self._num_places = config.feature_places
        self.forget()

    def forget(self) -> None:
        """Free all places. No request may need features."""
        self._places: dict[Key, int] = {}  # least recently used first
        self._free = list(range(self._num_places))[::-1]
        self._current: tuple[Key, int, int] | None = None  # its place, and the stages that are planned

    def has_all(self, request: Request) -> bool:
        """Whether the features of all of a request's tiles are in the buffer, or planned. Counts as a use."""
        keys = [key for key, _ in _tiles(request)]
        for key in keys:
            if key in self._places:
                self._places[key] = self._places.pop(key)
        return all(key in self._places for key in keys)

    def encode(self, request: Request, readers: Iterable[Request], *, shares: bool) -> Encode | None:
        """The next part of the tower's work for a request that has not all features; None if it must wait for room.

        readers: the requests that are being prefilled. shares: others decode in this step, so only one slice runs;
        otherwise one whole tile.
        """
        key, tile = next((key, tile) for key, tile in _tiles(request) if key not in self._places)
        if self._current is None or self._current[0] != key:
            if self._current is not None:  # the request that wanted it is gone, or no longer first
                self._free.append(self._current[1])
                self._current = None
            kept = {key for reader in (request, *readers) for key, _ in _tiles(reader)}
            if (place := self._take(kept)) is None:
                return None
            self._current = (key, place, 0)
        _, place, begin = self._current
        end = min(begin + self._slice, self._stages) if shares else self._stages
        if end == self._stages:
            self._places[key], self._current = place, None
        else:
            self._current = (key, place, end)
        return Encode(request.request_id, tile, begin, end, place)

    def spans(self, request: Request, start: int, stop: int) -> tuple[FeatureSpan, ...]:
        """Where the features for the prompt's positions `start` to `stop` lie."""
        found, tiles = [], _tiles(request)
        for begin, length in (span for image in request.images for span in image.spans):
            key, _ = next(tiles)
            first, last = max(begin, start), min(begin + length, stop)
            if first < last:
                found.append(FeatureSpan(first - start, self._places[key], first - begin, last - first))
        return tuple(found)

    def check(self) -> None:
        """Raise AssertionError unless every place is free or has one tile."""
        current = () if self._current is None else (self._current[1],)
        used = (*self._places.values(), *self._free, *current)
        if len(set(used)) != len(used):
            raise AssertionError(f"a place of the feature buffer is taken twice: {sorted(used)}")

    def _take(self, kept: set[Key]) -> int | None:
        if self._free:
            return self._free.pop()
        oldest = next((key for key in self._places if key not in kept), None)
        return None if oldest is None else self._places.pop(oldest)


def _tiles(request: Request) -> Iterator[tuple[Key, Any]]:
    for image in request.images:
        for index, tile in enumerate(image.tiles):
            yield (request.cache_salt, image.digest, index), tile
