"""The tags between which models write their reasoning, by the name of their format: vLLM's, but for `think`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thought:
    """The tags around reasoning. call: what a call begins with, which reasoning without an end may end with."""

    opening: str
    closing: str
    call: str = "<tool_call>"


THOUGHTS = {
    "gemma4": Thought("<|channel>thought", "<channel|>", "<|tool_call>"),
    "mistral": Thought("[THINK]", "[/THINK]", "[TOOL_CALLS]"),
    "seed_oss": Thought("<seed:think>", "</seed:think>", "<seed:tool_call>"),
    "think": Thought("<think>", "</think>"),
}
