"""Vectors of a trained encoder by sentence-transformers in float32.

Usage, where torch is installed: python -m tests.golden.make.make_golden_minilm DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parents[1] / "trained" / "minilm.npy"


SENTENCES = [
    "The cat sits outside.",
    "A man is playing guitar.",
    "How do I reset my password?",
    "Water boils at one hundred degrees at sea level.",
    "naïve café, Grüße, 世界 and 🙂",
    "def add(a, b):\n    return a + b",
    "The committee postponed its decision until the figures for the third quarter had been audited.",
    "Photosynthesis turns carbon dioxide and water into sugar and oxygen, with the energy of light.",
    "In 1969, the first people walked on the Moon.",
    "SELECT name, total FROM orders WHERE total > 100 ORDER BY total DESC",
]


def texts() -> list[str]:
    """Of 3 to some 230 tokens."""
    return [
        "a",
        *SENTENCES,
        *(" ".join(SENTENCES[first:]) for first in range(5)),
        " ".join(SENTENCES * 2)[:900],
    ]


def main(directory: str) -> None:
    from sentence_transformers import SentenceTransformer

    vectors = SentenceTransformer(directory, device="cpu").encode(texts())
    np.save(GOLDEN, vectors.astype(np.float32))


if __name__ == "__main__":
    main(sys.argv[1])
