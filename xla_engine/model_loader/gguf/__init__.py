"""Models in llama.cpp's GGUF files."""
