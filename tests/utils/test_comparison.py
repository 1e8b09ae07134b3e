"""Samples are the same if their tokens are, and all bits of their log-probabilities."""

import math

import pytest

from xla_engine.utils.comparison import (
    ComparedAnswers,
    Difference,
    TokenSample,
    first_difference,
    logprob_bits,
    logprob_of,
)


def test_a_zero_with_a_sign_is_another_sample_and_nan_is_itself() -> None:
    assert TokenSample(1, 0.0) != TokenSample(1, -0.0)
    assert TokenSample(1, math.nan) == TokenSample(1, math.nan)
    assert TokenSample(1, None) != TokenSample(1, 0.0)
    assert TokenSample(1, 0.0, {2: 0.0, 3: -1.0}) == TokenSample(1, 0.0, {3: -1.0, 2: 0.0})
    assert len({TokenSample(1, 0.0, {2: -0.0}), TokenSample(1, 0.0, {2: 0.0})}) == 2


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
    found, back = first_difference(one, two), first_difference(two, one, 10)
    if place is None:
        assert found is back is None
    else:
        at = [each[place] if place < len(each) else None for each in (one, two)]
        assert found == Difference(position=place, expected=at[0], found=at[1])
        assert back == Difference(position=place + 10, expected=at[1], found=at[0])


def test_a_comparison_counts_what_differs_and_keeps_the_first_of_each_request() -> None:
    compared, answer = ComparedAnswers(), [TokenSample(1, -1.0), TokenSample(2, -2.0), TokenSample(3, -3.0)]
    assert compared.add("same", answer, answer) is None and compared.ok
    compared.add("bits", answer, [answer[0], TokenSample(2, -2.5), TokenSample(4, -3.0)])
    compared.add("shorter", answer, answer[:1])
    compared.add("other end", answer, answer, ends=False)
    counts = compared.requests, compared.tokens, compared.differing_tokens, compared.differing_bits
    assert counts == (4, 12, 3, 1) and not compared.ok
    assert {name: each.position for name, each in compared.differences.items()} == {
        "bits": 1,
        "shorter": 1,
        "other end": 3,
    }
    assert compared.differences["bits"].found == TokenSample(2, -2.5)
    assert compared.differences["shorter"].found is None


def test_tokens_alone_can_be_compared() -> None:
    compared = ComparedAnswers(differing_bits=None)
    compared.add("one", [TokenSample(1)], [TokenSample(2)])
    assert compared.differing_tokens == 1 and compared.differing_bits is None
