"""A Ray Data job over a Parquet file, as a program that can be killed: `python -m tests.support.ray_driver IN OUT
CHECKPOINT ACTORS`. With a checkpoint folder it does only what an earlier one has not."""

from __future__ import annotations

import sys
from typing import Any


def preprocess(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": row["text"], "sampling_params": {"max_tokens": row["length"], "temperature": 0.7}}


def postprocess(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "key": row["key"],
        "text": row["text"],
        "length": row["length"],
        "answer": row["generated_text"],
        "tokens": row["generated_tokens"],
    }


def job(source: str, target: str, checkpoint: str, actors: int) -> None:
    import ray

    from xla_engine.ray import ModelStage, build_processor

    ray.init(num_cpus=max(actors, 1) + 2, include_dashboard=False, log_to_driver=False)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    if checkpoint != "-":
        from ray.data.checkpoint import CheckpointConfig

        context.checkpoint_config = CheckpointConfig(
            id_column="key", checkpoint_path=checkpoint, delete_checkpoint_on_success=False
        )
    stage = ModelStage(
        engine={"max_num_seqs": 4, "max_model_len": 128, "prefill_lanes": (2,), "self_check": False},
        batch_size=4,
        max_concurrent_batches=2,
        concurrency=actors,
        id_column="key",
        receipts=True,
    )
    dataset = ray.data.read_parquet(source, override_num_blocks=8)
    build_processor(stage, preprocess, postprocess)(dataset).write_parquet(target)


if __name__ == "__main__":
    job(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
