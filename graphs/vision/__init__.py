"""The vision towers of Idefics3, SmolVLM and Gemma 3."""
