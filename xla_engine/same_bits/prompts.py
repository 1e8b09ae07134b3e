"""The prompts: pieces of a text that ships with the package, as text or as token ids."""

import random
from importlib.resources import files

TEXT = files("xla_engine").joinpath("equivalence/prompts.txt").read_text(encoding="utf-8")


def draw_prompt(draw: random.Random, tokens: int, corpus: tuple[int, ...]) -> str | tuple[int, ...]:
    """A piece of about this many tokens; exactly as many if there are ids."""
    if corpus:
        begin = draw.randrange(len(corpus))
        return tuple(corpus[(begin + place) % len(corpus)] for place in range(tokens))
    size = 3 * tokens
    begin = draw.randrange(len(TEXT) - size)
    return TEXT[begin : begin + size]


def fresh_prompt(draw: random.Random, tokens: int, corpus: tuple[int, ...]) -> str | tuple[int, ...]:
    """The same with a new beginning, so that no cache contains it."""
    if corpus:
        nonce = tuple(draw.choice(corpus) for _ in range(12))
        piece = draw_prompt(draw, tokens - len(nonce), corpus)
        assert isinstance(piece, tuple)
        return nonce + piece
    piece = draw_prompt(draw, tokens - 8, corpus)
    assert isinstance(piece, str)
    return f"{draw.getrandbits(64):016x} {piece}"


def lengthened(
    prompt: str | tuple[int, ...], tokens: int, draw: random.Random, corpus: tuple[int, ...]
) -> str | tuple[int, ...]:
    """The prompt and about as many tokens more."""
    more = draw_prompt(draw, tokens, corpus)
    if isinstance(prompt, str):
        return f"{prompt}{more}"
    assert isinstance(more, tuple)
    return prompt + more
