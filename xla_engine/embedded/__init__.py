"""The embedded model: a small Llama checkpoint in the Hugging Face layout; see MODEL_CARD.md."""
