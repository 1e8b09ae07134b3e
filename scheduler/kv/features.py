"""Plans the vision tower's work, and where the features of tiles lie in the device's feature buffer.

A tile's features take one or several places of the buffer, and stay there until these are needed for another tile:
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
from xla_engine.scheduler.pictures import Encode, FeatureSpan
from xla_engine.scheduler.request import Request

Key = tuple[str, str, int]  # cache salt, digest, tile


class Features:
    """The places of the feature buffer, and the tile that is being encoded."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config, self._slice = config, config.encode_slice
        self._size, self._num_places = config.feature_place_tokens, config.feature_places
        self.forget()

    def forget(self) -> None:
        """Free all places. No request may need features."""
        self._places: dict[Key, tuple[int, ...]] = {}  # least recently used first
        self._free = list(range(self._num_places))[::-1]
        # The tile that is being encoded, its places, and the stages that are planned.
        self._current: tuple[Key, tuple[int, ...], int] | None = None

    def has_all(self, request: Request) -> bool:
        """Whether the features of all of a request's tiles are in the buffer, or planned."""
        return all(key in self._places for key, _, _ in _tiles(request))

    def use(self, request: Request) -> None:
        """Note that a request uses its features: those used least recently are overwritten first."""
        for key, _, _ in _tiles(request):
            if key in self._places:
                self._places[key] = self._places.pop(key)

    def encode(self, request: Request, readers: Iterable[Request], *, shares: bool) -> Encode | None:
        """The next part of the tower's work for a request that has not all features; None if it must wait for room.

        readers: the requests that are being prefilled. shares: others decode in this step, so only one slice runs;
        otherwise one whole tile.
        """
        key, tile, length = next(entry for entry in _tiles(request) if entry[0] not in self._places)
        if self._current is None or self._current[0] != key:
            if self._current is not None:  # the request that wanted it is gone, or no longer first
                self._free.extend(self._current[1])
                self._current = None
            kept = {key for reader in (request, *readers) for key, _, _ in _tiles(reader)}
            if (places := self._take(kept, -(-length // self._size))) is None:
                return None
            self._current = (key, places, 0)
        _, places, begin = self._current
        stages = self._config.stages(length)
        end = min(begin + self._slice, stages) if shares else stages
        if end == stages:
            self._places[key], self._current = places, None
        else:
            self._current = (key, places, end)
        return Encode(request.request_id, tile, begin, end, places)

    def spans(self, request: Request, start: int, stop: int) -> tuple[FeatureSpan, ...]:
        """Where the features for the prompt's positions `start` to `stop` lie."""
        spans, tiles = [], _tiles(request)
        for begin, length in (span for image in request.images for span in image.spans):
            key, _, _ = next(tiles)
            for number, place in enumerate(self._places[key]):
                own = begin + number * self._size
                first, last = max(own, start), min(own + self._size, begin + length, stop)
                if first < last:
                    at, end = first - start, begin + length - start
                    spans.append(FeatureSpan(at, place, first - own, last - first, end))
        return tuple(spans)

    def check(self) -> None:
        """Raise AssertionError unless every place is free or has one tile."""
        current = () if self._current is None else self._current[1]
        used = (*(place for places in self._places.values() for place in places), *self._free, *current)
        if len(set(used)) != len(used):
            raise AssertionError(f"a place of the feature buffer is taken twice: {sorted(used)}")

    def _take(self, kept: set[Key], count: int) -> tuple[int, ...] | None:
        """This many places, those of the least recently used tiles last; None, and nothing changes, if there are too
        few."""
        free, gone = len(self._free), []
        for key, places in self._places.items():
            if free >= count:
                break
            if key not in kept:
                free += len(places)
                gone.append(key)
        if free < count:
            return None
        for key in gone:
            self._free.extend(self._places.pop(key))
        return tuple(self._free.pop() for _ in range(count))


def _tiles(request: Request) -> Iterator[tuple[Key, Any, int]]:
    """Key, pixels and tokens of each tile."""
    for image in request.images:
        for index, (tile, (_, length)) in enumerate(zip(image.tiles, image.spans, strict=True)):
            yield (request.cache_salt, image.digest, index), tile, length
