"""OpenAI's Responses API on top of chats: turns a request's body into a chat, and the answer into a response."""
