"""From a model's text to an assistant's message: reasoning, content and calls of tools."""
