"""The chat templates of a model, as text."""

from collections.abc import Mapping
from dataclasses import dataclass

from xla_engine.errors import ChatTemplateError

MAX_TEMPLATE = 1 << 20  # bytes of a template
SPECIAL_TOKENS = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """The chat templates of a checkpoint.

    sources: jinja2 source by name. "default" is used, or "tool_use" if it exists and the request has tools.
    special_tokens: "bos_token", "eos_token", ... as the template sees them.
    """

    sources: Mapping[str, str]
    special_tokens: Mapping[str, str]

    def source(self, *, with_tools: bool) -> str:
        """The template to use. Raises ChatTemplateError if there are only templates with other names."""
        name = "tool_use" if with_tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise ChatTemplateError(
                f"the model has no default chat template, only {', '.join(sorted(self.sources))}; "
                "pass chat_template with the text of one"
            )
        return self.sources[name]
