"""The compiled steps: decode, prefill and prompt logprobs."""
