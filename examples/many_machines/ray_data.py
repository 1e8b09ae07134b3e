"""A column of prompts through an engine in each of two actors of a local Ray: `python ray_data.py [IN.parquet OUT]`.

On a cluster, the same script: `ray.init()` finds it. Needs the extra `ray`.
"""

import sys

import ray

from xla_engine.ray import ModelStage, build_processor

prompts = [f"def function_{number}(x):" for number in range(32)]
if len(sys.argv) > 2:
    dataset = ray.data.read_parquet(sys.argv[1])
else:
    dataset = ray.data.from_items(
        [{"key": key, "text": text} for key, text in enumerate(prompts)], override_num_blocks=4
    )

processor = build_processor(
    ModelStage(
        engine={"max_num_seqs": 8, "max_model_len": 256},
        sampling={"temperature": 0.8, "max_tokens": 24},
        batch_size=8,
        concurrency=2,
        num_cpus=0.5,  # as Ray counts: on a small machine the other stages need a CPU, too
        id_column="key",
    ),
    preprocess=lambda row: {"prompt": row["text"]},
    postprocess=lambda row: {"key": row["key"], "text": row["text"], "answer": row["generated_text"]},
)
answers = processor(dataset)
if len(sys.argv) > 2:
    answers.write_parquet(sys.argv[2])
else:
    for row in sorted(answers.take_all(), key=lambda row: row["key"]):
        print(row["key"], row["text"] + row["answer"], sep="\t")
