"""Make `tests/golden/trained/smollm2.json`: what transformers computes in float32 from a trained model.

The model is SmolLM2-135M-Instruct, a GGUF file whose path is the argument. Needs the `oracle` extra; imports nothing
of this package.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "trained" / "smollm2.json"
NEW_TOKENS = 48
QUESTIONS = [
    "What is the capital of France?",
    "Name three rivers in Germany.",
    "Write a haiku about autumn.",
    "Explain photosynthesis in one sentence.",
    "What is 12 times 7?",
    "Translate 'good morning' into Spanish.",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "Write a Python function that reverses a string.",
    "Rewrite in the passive voice: The cat ate the fish.",
    "List five fruits that are red.",
    "Is the sun a star?",
    "Correct the grammar: He go to school yesterday.",
    "What does 'ubiquitous' mean?",
    "Summarise: Bees collect nectar, make honey and pollinate plants.",
    "Write an e-mail that asks for a day off.",
    "Why is the sky blue?",
    "Tell me a joke about computers.",
    "\u00bfCu\u00e1l es la capital de Per\u00fa?",
    "Answer with yes or no: can penguins fly?",
]
TEXTS = [
    "The quick brown fox",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "import numpy as np\n\n",
    "The mitochondria is",
    "In 1969, the first",
    "1, 2, 3, 4, 5,",
    "Dear Sir or Madam,\n\n",
    "Water boils at",
    "# Introduction\n\nMachine learning",
    "SELECT name FROM users WHERE",
    "To be, or not to be,",
    "The three laws of thermodynamics are",
    "<html>\n<head>\n",
    "Q: What is a prime number?\nA:",
    "La Tour Eiffel est",
    "The recipe calls for two cups of flour,",
    "for (int i = 0; i < n; i++) {",
    "She opened the door and",
    "Python is a programming language that",
]
SYSTEM = "You answer in one short sentence."
ODD = [
    "",
    " ",
    "\n\n\n",
    "\t x",
    "na\u00efve caf\u00e9",
    "\u65e5\u672c\u8a9e\u306e\u6587",
    "\U0001f600\U0001f469\u200d\U0001f4bb",
    "<|im_start|>user\nx<|im_end|>",
    "\x00\x7f",
]


def conversations() -> list[list[dict[str, str]]]:
    """One for each question; every third has a system message, and the last one continues after an answer."""
    found = []
    for number, question in enumerate(QUESTIONS):
        system = [{"role": "system", "content": SYSTEM}] if number % 3 == 2 else []
        found.append([*system, {"role": "user", "content": question}])
    found[-1] += [{"role": "assistant", "content": "No."}, {"role": "user", "content": "Why not?"}]
    return found


def passages() -> list[str]:
    """Texts to be tokenised: odd ones, the prompts, and the licence in pieces, the same for every version of Python.

    The licence is without its digits: the model's own pre-tokenizer and llama.cpp's split a digit off before they look
    at the spaces ahead of it; transformers does not when it reads a GGUF file, and has other ids for them.
    """
    licence = re.sub(r"\d", "", (Path(__file__).parents[3] / "LICENSE").read_text("utf-8"))
    return [*ODD, *QUESTIONS, *TEXTS, *(licence[at : at + 97] for at in range(0, len(licence), 97))]


def digest(values: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(list(values)).encode()).hexdigest()


def golden(file: Path, known: dict[str, Any] | None = None) -> dict[str, Any]:
    """All expected values.

    known: values to check. Each text is then computed in one pass over its known tokens, and not token by token: it is
    greedy if every token is the most likely one after those before it.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)

    def greedy(ids: list[int], known_ids: list[int] | None) -> list[int]:
        with torch.inference_mode():
            if known_ids is not None:
                out = model(torch.tensor([ids + known_ids]), logits_to_keep=len(known_ids) + 1)
                return cut(out.logits[0].argmax(dim=-1).tolist())
            out = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids)),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
            )
        return list(map(int, out[0, len(ids) :]))

    def cut(ids: list[int]) -> list[int]:
        """Up to the token that ends a text, and at most `NEW_TOKENS`."""
        ids = ids[:NEW_TOKENS]
        end = model.generation_config.eos_token_id
        return ids[: ids.index(end) + 1] if end in ids else ids

    expected = known or {"chats": [{}] * len(QUESTIONS), "texts": [None] * len(TEXTS)}
    chats = []
    for messages, each in zip(conversations(), expected["chats"], strict=True):
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
        chats.append({"prompt": prompt, "token_ids": greedy(ids, each.get("token_ids"))})
    texts = [
        greedy(tokenizer(text, add_special_tokens=False).input_ids, each)
        for text, each in zip(TEXTS, expected["texts"], strict=True)
    ]
    ids = range(len(tokenizer))
    return {
        "chats": chats,
        "texts": texts,
        "token_texts": digest([tokenizer.decode([each]) for each in ids]),
        "passages": digest([tokenizer(text, add_special_tokens=False).input_ids for text in passages()]),
    }


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden(Path(sys.argv[1])), indent=1) + "\n")
