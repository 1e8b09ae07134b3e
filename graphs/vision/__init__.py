"""The vision towers of Idefics3, SmolVLM, Gemma 3 and Qwen3-VL."""
