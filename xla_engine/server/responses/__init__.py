"""`/v1/responses`: the stateless part of OpenAI's Responses API, over chats."""
