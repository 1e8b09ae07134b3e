"""The vision towers of Idefics3, SmolVLM, Gemma 3, Qwen3-VL and Qwen3.5."""
