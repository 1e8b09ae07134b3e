"""Pictures as input: sizes, tiles, prompts and features. Decoding needs the extra `images`."""
