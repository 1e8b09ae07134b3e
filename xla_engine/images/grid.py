"""How one picture is cut into tiles."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The last tile of a picture, if it has another size than the others: a copy of the whole picture within margins.

    side: of the tile, pixels. copy: (width, height) of the picture in its middle. colour: of the margins, RGB.
    tokens: in the prompt.
    """

    side: int
    copy: tuple[int, int]
    colour: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """How one picture is cut. Sizes are (width, height) in pixels.

    picture: its upright size. resized: after the first resize. whole: after the second; what is cut into tiles.
    tokens: of a tile in the prompt; None: as many as the tower makes of any.
    rows, columns: of tiles. Both are 0 if the picture is a single tile, `whole`; otherwise a small copy of the whole
    picture follows as the last tile.
    view: the last tile, if it has a size of its own; the only one if rows and columns are 0.
    """

    picture: tuple[int, int]
    resized: tuple[int, int]
    whole: tuple[int, int]
    rows: int
    columns: int
    tokens: int | None = None
    view: View | None = None

    @property
    def tiles(self) -> int:
        return self.rows * self.columns + 1

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Of each tile."""
        if self.view is None:
            return [self.tile] * self.tiles
        return [self.tile] * (self.tiles - 1) + [(self.view.side, self.view.side)]

    def tile_tokens(self, default: int) -> list[int]:
        """Tokens of each tile in the prompt. default: of a tile, if `tokens` is None."""
        of_tile = self.tokens or default
        if self.view is None:
            return [of_tile] * self.tiles
        return [of_tile] * (self.tiles - 1) + [self.view.tokens]

    @property
    def tile(self) -> tuple[int, int]:
        """The size of a tile."""
        return self.whole[0] // max(self.columns, 1), self.whole[1] // max(self.rows, 1)
