"""Parse a model's text into an assistant message: reasoning, content and tool calls."""
