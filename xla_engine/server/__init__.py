"""`xla-engine serve`: one engine behind OpenAI's HTTP protocol."""
