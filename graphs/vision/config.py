"""The shapes of vision towers: SigLIP's over square tiles, those over patches of a picture of any proportions, and
that of DeepSeek-OCR-2 over tiles of two sizes."""

from dataclasses import dataclass
from typing import ClassVar

CHANNELS = 3  # of pictures
NO_LAYERS, WINDOW_LAYERS, ALL_LAYERS = "none", "sliding_attention", "all"  # of the decoder
# Sides (in patches) of 100 and less for which transformers' float32 arithmetic gives two neighbours one position.
_ROUNDED_SIDES = (
    "19 25 29 31 38 40 41 43 47 49 50 54 55 58 59 61 62 67 68 71 72 73 74 76 77 80 82 83 84 86 "
    "87 93 94 97 98 99"
)
_ROUNDED = frozenset(map(int, _ROUNDED_SIDES.split()))
_LARGEST_SIDE = 99


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A SigLIP tower over square tiles (Zhai et al. 2023), and the connector of Idefics3 (Laurençon et al. 2024) or of
    Gemma 3 (Gemma Team 2025).

    hidden_size, intermediate_size, num_hidden_layers, num_attention_heads: of the tower.
    image_size, patch_size: sides of a tile and of a patch, in pixels.
    scale_factor: this many patches in either direction become one token of the prompt.
    text_size: features of a token in the decoder.
    averages: as in Gemma 3, the connector takes the mean of these patches, and in the decoder a tile's tokens attend
        to each other in both directions. Otherwise it puts the patches side by side.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    image_size: int
    patch_size: int
    layer_norm_eps: float
    scale_factor: int
    text_size: int
    averages: bool = False

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size = {self.hidden_size} is not a multiple of num_attention_heads = "
                f"{self.num_attention_heads}"
            )
        if self.side < 1 or self.side % self.scale_factor:
            raise ValueError(
                f"a tile of image_size / patch_size = {self.side} patches a side is not a multiple of scale_factor = "
                f"{self.scale_factor}"
            )
        if not self.averages and (self.side > _LARGEST_SIDE or self.side in _ROUNDED):
            raise ValueError(
                f"tiles of {self.side} patches a side are not supported, because transformers rounds their positions"
            )

    @property
    def side(self) -> int:
        """Patches in a row of a tile."""
        return self.image_size // self.patch_size

    @property
    def patches(self) -> int:
        return self.side * self.side

    @property
    def frames(self) -> int:
        """How often a patch is seen."""
        return 1

    @property
    def merged(self) -> int:
        """Patches of a token."""
        return self.scale_factor * self.scale_factor

    @property
    def tokens(self) -> int:
        """Tokens of a tile in the prompt."""
        return self.patches // self.merged

    @property
    def place_tokens(self) -> int:
        """Tokens of a place of the feature buffer, which has one tile."""
        return self.tokens

    @property
    def feature_size(self) -> int:
        """Numbers of a token in the feature buffer."""
        return self.text_size

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def axes(self) -> tuple[int, ...]:
        """See `prefill_chunk`: the decoder's keys and queries turn by their places in the prompt."""
        return ()

    @property
    def sees_ahead(self) -> str:
        """Layers of the decoder in which a tile's tokens attend to each other in both directions."""
        return ALL_LAYERS if self.averages else NO_LAYERS

    @property
    def blank_token(self) -> int | None:
        """See `PooledForm`."""
        return None

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Rows and columns of tokens by which the decoder's keys and queries turn: none, see `axes`."""
        return None

    def tokens_of(self, shape: tuple[int, ...]) -> int | None:
        """Tokens of a tile of this shape; None if it does not fit the tower."""
        return self.tokens if shape == (self.image_size, self.image_size, CHANNELS) else None


# Rows of the tower's programs. A picture runs in the smallest that hold its patches, whatever others an engine has.
BUCKETS = (256, 1024, 4096, 16384)
# The most tokens of a picture: the choices of Gemma 4's processor. Its tower has programs for each.
SOFT_TOKENS = (70, 140, 280, 560, 1120)
_SOFT_PLACE = 35  # tokens of a place of the feature buffer; divides each of them


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledForm:
    """What is peculiar to Gemma 4's tower (transformers' `gemma4`).

    Attention and MLP have RMSNorms before and behind them, the MLP has a gate, and heads have norms. One half of a
    head turns by columns and the other by rows. Each column and each row has a learned position. The mean of a square
    of patches becomes a token.

    head_dim: of the tower.
    clipped: inputs and outputs of products are clipped to bounds of the checkpoint.
    standardized: means are shifted and scaled by vectors of the checkpoint.
    in_windows: in the decoder's layers with a sliding window a picture's tokens attend to each other both ways.
    blank_token: whose embeddings of each layer a picture's tokens take (Gemma 3n and 4).
    """

    head_dim: int
    clipped: bool
    standardized: bool
    in_windows: bool
    blank_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchConfig:
    """A tower over the patches of a picture of any proportions, with rotary embedding over rows and columns: that of
    Qwen3-VL, with taps (technical report, Bai et al. 2025; DeepStack, Meng et al. 2024), of PaddleOCR-VL (technical
    report, Cui et al. 2025), of GLM-OCR (technical report of GLM-4.1V, Hong et al. 2025; transformers' `glm_ocr`), or
    of Gemma 4 (`PooledForm`).

    hidden_size, intermediate_size, num_hidden_layers, num_attention_heads: of the tower.
    patch_size: side of a patch, pixels. frames: a patch is seen this many times, as those of a video are.
    merge_size: this many patches in either direction become one token of the prompt.
    position_side: learned positions in a row, between which those of a picture are interpolated; 0 if there are none.
        With `pooled`, those of columns, and of rows.
    rope_theta: base of the rotary embedding.
    taps: layers after which features are taken that are added behind the decoder's first layers.
    text_size: features of a token in the decoder.
    axes: for each angle of a head of the decoder, whether it is of the position in time (0), rows (1) or columns (2);
        empty: all are of the place in the prompt.
    layer_norm_eps: of the tower's norms.
    flat: as in PaddleOCR-VL, a patch is seen once, the interpolated positions are those of the centres of patches and
        not of their corners, and the last layer has a norm of its own before the merger's.
    gated: as in GLM-OCR, layers have RMSNorms, norms of query and key heads and an MLP with a gate, and the merger has
        a gate too.
    pooled: what is peculiar to Gemma 4; None for the others.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    patch_size: int
    merge_size: int
    rope_theta: float
    text_size: int
    frames: int = 1
    position_side: int = 0
    taps: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()
    layer_norm_eps: float = 1e-6
    flat: bool = False
    gated: bool = False
    pooled: PooledForm | None = None

    def __post_init__(self) -> None:
        if self.pooled is not None:
            if self.pooled.head_dim % 4:
                raise ValueError(f"head_dim = {self.pooled.head_dim} is not a multiple of four")
        elif self.hidden_size % (4 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size = {self.hidden_size} is not a multiple of four times num_heads = "
                f"{self.num_attention_heads}"
            )
        elif BUCKETS[0] % self.merged:
            raise ValueError(
                f"spatial_merge_size = {self.merge_size} is not supported; it must be 1, 2, 4, 8 or 16"
            )
        if any(not 0 <= tap < self.num_hidden_layers for tap in self.taps) or len(set(self.taps)) < len(
            self.taps
        ):
            raise ValueError(
                f"deepstack_visual_indexes = {list(self.taps)} are not different layers of the tower's "
                f"{self.num_hidden_layers}"
            )

    @property
    def head_dim(self) -> int:
        if self.pooled is not None:
            return self.pooled.head_dim
        return self.hidden_size // self.num_attention_heads

    @property
    def buckets(self) -> tuple[int, ...]:
        """Rows of the tower's programs, ascending."""
        return BUCKETS if self.pooled is None else tuple(tokens * self.merged for tokens in SOFT_TOKENS)

    @property
    def merger_eps(self) -> float:
        """Of the LayerNorm before or in the merger."""
        return 1e-5 if self.flat or self.gated else self.layer_norm_eps

    @property
    def merger_size(self) -> int:
        """Inner features of a gated merger: three times those of a token."""
        return CHANNELS * self.text_size

    @property
    def sees_ahead(self) -> str:
        """Layers of the decoder in which a tile's tokens attend to each other in both directions."""
        return WINDOW_LAYERS if self.pooled is not None and self.pooled.in_windows else NO_LAYERS

    @property
    def blank_token(self) -> int | None:
        """See `PooledForm`; None if the decoder has no embeddings of each layer."""
        return None if self.pooled is None else self.pooled.blank_token

    @property
    def merged(self) -> int:
        """Patches of a token."""
        return self.merge_size * self.merge_size

    @property
    def place_tokens(self) -> int:
        """Tokens of a place of the feature buffer; a picture takes as many places as it needs."""
        return BUCKETS[0] // self.merged if self.pooled is None else _SOFT_PLACE

    @property
    def feature_size(self) -> int:
        """Numbers of a token in the feature buffer: its embedding, and what each tap adds."""
        return (1 + len(self.taps)) * self.text_size

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Rows and columns of tokens by which the decoder's keys and queries turn; None: by their places in the prompt
        (see `axes`), or the picture does not fit."""
        return self._tokens(shape) if self.axes else None

    def _tokens(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Rows and columns of tokens of a picture of this shape, `[height, width, 3]`; None if it does not fit."""
        unit = self.patch_size * self.merge_size
        if len(shape) != 3 or shape[2] != 3 or shape[0] % unit or shape[1] % unit or 0 in shape:
            return None
        return shape[0] // unit, shape[1] // unit

    def tokens_of(self, shape: tuple[int, ...]) -> int | None:
        """Tokens of a picture of this shape; None if it does not fit the tower."""
        grid = self._tokens(shape)
        if grid is None or (self.pooled is not None and max(grid) * self.merge_size > self.position_side):
            return None
        return grid[0] * grid[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepEncoderConfig:
    """The tower of DeepSeek-OCR-2: SAM's encoder, convolutions, and a Qwen2 with learned queries (`deep_encoder`).

    hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, layer_norm_eps: of the first stage.
    patch_size: side of a patch, pixels. window: side of a window, patches.
    whole_layers: of the first stage, that see the whole tile.
    neck_size, middle_size: features inside the convolutions.
    encoder_size, encoder_mlp_size, encoder_layers, encoder_heads, encoder_key_heads, encoder_eps, rope_theta: of the
        second stage.
    text_size: features of a token in the decoder.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    layer_norm_eps: float
    patch_size: int
    window: int
    whole_layers: tuple[int, ...]
    neck_size: int
    middle_size: int
    encoder_size: int
    encoder_mlp_size: int
    encoder_layers: int
    encoder_heads: int
    encoder_key_heads: int
    encoder_eps: float
    rope_theta: float
    text_size: int

    # Queries of a tile: of a part of the picture, and of the view of the whole. Checkpoints have these two tables.
    crop_tokens: ClassVar[int] = 144
    view_tokens: ClassVar[int] = 256
    merged: ClassVar[int] = 16  # patches of a token
    place_tokens: ClassVar[int] = 48  # of a place of the feature buffer; divides `crop_tokens`
    crop_side: ClassVar[int] = 48  # patches in a row
    view_side: ClassVar[int] = 64
    axes: ClassVar[tuple[int, ...]] = ()  # the decoder's keys and queries turn by their places in the prompt
    sees_ahead: ClassVar[str] = NO_LAYERS
    blank_token: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size = {self.hidden_size} is not a multiple of num_attention_heads = "
                f"{self.num_attention_heads}"
            )
        if self.encoder_heads % self.encoder_key_heads or self.encoder_size % (2 * self.encoder_heads):
            raise ValueError(
                f"hidden_size = {self.encoder_size} of the second stage is not a multiple of twice "
                f"num_attention_heads = {self.encoder_heads}, or these are none of num_key_value_heads = "
                f"{self.encoder_key_heads}"
            )

    @property
    def head_dim(self) -> int:
        """Of the first stage."""
        return self.hidden_size // self.num_attention_heads

    @property
    def encoder_head_dim(self) -> int:
        """Of the second stage."""
        return self.encoder_size // self.encoder_heads

    @property
    def crop_patches(self) -> int:
        """Of a tile that shows a part of the picture."""
        return self.crop_side * self.crop_side

    @property
    def view_patches(self) -> int:
        """Of the tile that shows the whole picture."""
        return self.view_side * self.view_side

    @property
    def tile_tokens(self) -> dict[int, int]:
        """Tokens of a tile in the prompt by its patches. A separator follows the view of the whole picture."""
        return {self.crop_patches: self.crop_tokens, self.view_patches: self.view_tokens + 1}

    @property
    def feature_size(self) -> int:
        """Numbers of a token in the feature buffer."""
        return self.text_size

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Rows and columns of tokens by which the decoder's keys and queries turn: none, see `axes`."""
        return None

    def tokens_of(self, shape: tuple[int, ...]) -> int | None:
        """Tokens of a tile of this shape; None if it does not fit the tower."""
        for side in (self.crop_side, self.view_side):
            if shape == (side * self.patch_size, side * self.patch_size, CHANNELS):
                return self.tile_tokens[side * side]
        return None


TowerConfig = VisionConfig | PatchConfig | DeepEncoderConfig
