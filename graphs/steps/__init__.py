"""The compiled steps: decode, verify, prefill, prompt logprobs and pooling."""
