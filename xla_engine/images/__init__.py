"""Pictures as input: sizes, tiles, prompts and features of Idefics3 and SmolVLM. Decoding needs the extra `images`."""
