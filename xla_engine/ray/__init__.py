"""`xla_engine.ray`: a stage of Ray Data, in place of `ray.data.llm`'s (extra `ray`).

Runnable example, with Ray installed::

    import ray
    from xla_engine.ray import ModelStage, build_processor

    processor = build_processor(
        ModelStage(engine={"max_num_seqs": 8}),
        preprocess=lambda row: {"prompt": row["item"], "sampling_params": {"temperature": 0, "max_tokens": 8}},
        postprocess=lambda row: {"item": row["item"], "text": row["generated_text"]},
    )
    print(processor(ray.data.from_items(["def f(x):", "import "])).take_all())
"""

from xla_engine.ray.receipts import write_receipts
from xla_engine.ray.stage import ModelStage, Processor, build_processor

__all__ = ["ModelStage", "Processor", "build_processor", "write_receipts"]
