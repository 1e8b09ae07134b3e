"""What one POST asks for: a request, and how its answer is written."""

from dataclasses import dataclass

from xla_engine.openai.requests import LineRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall:
    """One parsed POST.

    request: the request of a batch line with this body.
    stream: answer in chunks. include_usage: the last chunk has the token usage; continuous_usage: each chunk has it.
    return_token_ids: the answer has the token ids of prompt and completion.
    """

    request: LineRequest
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False

    @property
    def sequences(self) -> int:
        """Number of choices in the answer."""
        return len(self.request.prompts) * self.request.params.n
