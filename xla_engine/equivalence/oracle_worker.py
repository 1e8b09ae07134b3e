"""The external oracle, which runs in its own process: greedy continuations by transformers in float32.

Reads one JSON object {"model", "prompts", "max_new_tokens"} from standard input, prints one JSON list of token id
lists. Never imported by the engine; run by `xla-engine verify --against transformers`.
"""

import json
import sys


def main() -> None:
    import torch
    import transformers

    question = json.load(sys.stdin)
    model = transformers.AutoModelForCausalLM.from_pretrained(question["model"], dtype=torch.float32).eval()
    count = question["max_new_tokens"]
    answers = []
    for prompt in question["prompts"]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
            )
        answers.append(out[0, len(prompt) :].tolist())
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
