"""The shape of Qwen3-VL's vision tower."""

from dataclasses import dataclass

# Rows of the tower's programs. A picture runs in the smallest that hold its patches, whatever others an engine has.
BUCKETS = (256, 1024, 4096, 16384)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchConfig:
    """A tower over the patches of a picture of any proportions, with rotary embedding over rows and columns, and taps
    (Qwen3-VL technical report, Bai et al. 2025; DeepStack, Meng et al. 2024).

    hidden_size, intermediate_size, num_hidden_layers, num_attention_heads: of the tower.
    patch_size: side of a patch, pixels. frames: a patch is seen this many times, as those of a video are.
    merge_size: this many patches in either direction become one token of the prompt.
    position_side: learned positions in a row, between which those of a picture are interpolated.
    rope_theta: base of the rotary embedding.
    taps: layers after which features are taken that are added behind the decoder's first layers.
    text_size: features of a token in the decoder.
    axes: for each angle of a head of the decoder, whether it is of the position in time (0), rows (1) or columns (2).
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    patch_size: int
    frames: int
    merge_size: int
    position_side: int
    rope_theta: float
    taps: tuple[int, ...]
    text_size: int
    axes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.hidden_size % (4 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size = {self.hidden_size} is not a multiple of four times num_heads = "
                f"{self.num_attention_heads}"
            )
        if BUCKETS[0] % self.merged:
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
        return self.hidden_size // self.num_attention_heads

    @property
    def layer_norm_eps(self) -> float:
        return 1e-6

    @property
    def averages(self) -> bool:
        """Whether a tile's tokens attend to each other in both directions in the decoder."""
        return False

    @property
    def merged(self) -> int:
        """Patches of a token."""
        return self.merge_size * self.merge_size

    @property
    def place_tokens(self) -> int:
        """Tokens of a place of the feature buffer; a picture takes as many places as it needs."""
        return BUCKETS[0] // self.merged

    @property
    def feature_size(self) -> int:
        """Numbers of a token in the feature buffer: its embedding, and what each tap adds."""
        return (1 + len(self.taps)) * self.text_size

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Rows and columns of tokens of a picture of this shape, `[height, width, 3]`; None if it does not fit."""
        unit = self.patch_size * self.merge_size
        if len(shape) != 3 or shape[2] != 3 or shape[0] % unit or shape[1] % unit or 0 in shape:
            return None
        return shape[0] // unit, shape[1] // unit

    def tokens_of(self, shape: tuple[int, ...]) -> int | None:
        """Tokens of a picture of this shape; None if it does not fit the tower."""
        grid = self.grid(shape)
        return None if grid is None else grid[0] * grid[1]
