"""Samples are the same if their tokens are, and all bits of their log-probabilities."""

import math

import pytest

from xla_engine.utils.token_sample import TokenSample, first_difference, logprob_bits, logprob_of


def test_a_zero_with_a_sign_is_another_sample_and_nan_is_itself() -> None:
    assert (
        TokenSample(1, 0.0) == TokenSample(1, -0.0) and TokenSample(1, 0.0).bits != TokenSample(1, -0.0).bits
    )
    assert TokenSample(1, math.nan).bits == TokenSample(1, math.nan).bits
    assert TokenSample(1, None).bits != TokenSample(1, 0.0).bits


def test_a_sample_tells_nine_digits_which_are_all_that_a_float32_has() -> None:
    value = logprob_of(logprob_bits(-0.1) + 1)
    assert (
        str(TokenSample(7, value))
        == f"token 7 logprob {value:.9g}"
        != str(TokenSample(7, logprob_of(logprob_bits(-0.1))))
    )
    assert str(TokenSample(7, None)) == "token 7"


@pytest.mark.parametrize(
    ("one", "two", "place"),
    [("abc", "abc", None), ("abc", "axc", 1), ("abc", "ab", 2), ("", "a", 0), ("", "", None)],
)
def test_the_end_of_the_shorter_sequence_is_a_difference(one: str, two: str, place: int | None) -> None:
    assert first_difference(one, two) == first_difference(two, one) == place
