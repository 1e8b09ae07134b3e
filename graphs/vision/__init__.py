"""The vision towers of Idefics3, SmolVLM, Gemma 3 and 4, Qwen3-VL, Qwen3.5, PaddleOCR-VL, GLM-OCR and
DeepSeek-OCR-2."""
