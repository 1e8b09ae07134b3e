"""Fixed widths of per-request tables, so that no request changes a shape. Imports nothing."""

MAX_LOGIT_BIAS = 300  # ids with a bias per row
MAX_DRY_BREAKERS = 16  # tokens that break a sequence, per row
MAX_LOGPROBS = 20  # most likely tokens per position that a request may ask for
