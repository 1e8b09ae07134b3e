"""`/v1/responses`: OpenAI's Responses API for text and functions, on top of chats."""
