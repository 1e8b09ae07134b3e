"""Convert between text and token ids: tokenizer, chat template, stop strings, grammars."""
