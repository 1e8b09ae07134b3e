"""OpenAI's Responses over chats: from the body of a request to a chat, and from its answer to a response."""
