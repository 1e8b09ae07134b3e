"""Pictures as input: sizes, tiles, prompts and features. Decoding needs the extra `images`."""

NO_PICTURES = "this engine reads no pictures: its model has no vision tower that is supported; remove them"
