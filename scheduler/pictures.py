"""What a plan says of pictures: work of the vision tower, and where prompts read its results."""

from typing import Any, NamedTuple


class FeatureSpan(NamedTuple):
    """Positions of a chunk that read features of a picture instead of the embeddings of their tokens.

    at, end: the first of these positions, and one past the last of their tile, counted from the start of the chunk.
    place, row: where the first of their features is in the feature buffer. length: how many there are.
    """

    at: int
    place: int
    row: int
    length: int
    end: int


class Encode(NamedTuple):
    """Runs stages `begin` to `end` of the vision tower for one tile.

    Only one tile is encoded at a time: an Encode of another tile begins at stage 0, after the last stage of this one.

    tile: uint8 `[height, width, 3]`. places: where the last stage writes the features in the feature buffer, in order.
    """

    request_id: str
    tile: Any
    begin: int
    end: int
    places: tuple[int, ...]
