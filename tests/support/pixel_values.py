"""Values of pixels for tests of pictures."""

from xla_engine.images.processor import ImageProcessor, value_table

UNIT_TABLE = value_table(  # of values from -1 to 1, as the golden files have them
    ImageProcessor(
        longest_edge=24,
        tile=24,
        do_image_splitting=False,
        resample=1,
        rescale_factor=1 / 255,
        image_mean=(0.5, 0.5, 0.5),
        image_std=(0.5, 0.5, 0.5),
    )
)
