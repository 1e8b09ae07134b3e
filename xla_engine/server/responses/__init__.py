"""`/v1/responses`: OpenAI's Responses API for texts and functions, over chats."""
