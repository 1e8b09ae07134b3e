"""OpenAI's objects: the requests that files and the server read, and the answers that they write.

Requests: `fields`, `requests`, `pooling`, `responses`, `response_items`, `call`. Answers: `results` for a line of a
file, `answers` for the server, `chunks` for a stream, `logprobs` for all of them.
"""
