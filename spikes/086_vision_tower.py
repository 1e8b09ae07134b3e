# Frozen: runs at commit c3de52e.
"""How long does one tile of SmolVLM-256M's shape take in the vision tower, here and in transformers?

    python -m spikes.086_vision_tower                     (with the interpreter of xla-engine)
    python spikes/086_vision_tower.py transformers        (with one that has torch and transformers)

Random weights. Prints seconds a tile (the least and the median of REPEATS) and TFLOP/s of products and attention.
"""

import sys
import time

import numpy as np

D, F, LAYERS, HEADS, SIDE, SCALE, TEXT = 768, 3072, 12, 12, 32, 4, 576
REPEATS = 7


def flops():
    rows = SIDE * SIDE
    layer = 2 * rows * (4 * D * D + 2 * D * F) + 4 * rows * rows * D
    return LAYERS * layer + 2 * rows * D * 3 * 16 * 16 + 2 * rows * D * TEXT


def report(name, call):
    call()
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    print(
        f"{name}: least {min(seconds):.3f} s, median {np.median(seconds):.3f} s, "
        f"{flops() / min(seconds) / 1e12:.2f} TFLOP/s",
        flush=True,
    )


def ours():
    from xla_engine.graphs.vision.config import VisionConfig
    from xla_engine.graphs.vision.tower import vision_shapes
    from xla_engine.model_loader.weights import DTYPES
    from xla_engine.runner.vision_tower import VisionTower

    config = VisionConfig(
        hidden_size=D,
        intermediate_size=F,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        image_size=16 * SIDE,
        patch_size=16,
        layer_norm_eps=1e-6,
        scale_factor=SCALE,
        text_size=TEXT,
    )
    draw = np.random.default_rng(0)
    tile = draw.integers(0, 256, (512, 512, 3), dtype=np.uint8)
    table = np.tile(np.linspace(-1, 1, 256, dtype=np.float32), (3, 1))
    for dtype in ("bfloat16", "float32"):
        weights = {
            name: (0.02 * draw.standard_normal(shape, dtype=np.float32)).astype(
                DTYPES[dtype] if len(shape) > 1 else np.float32
            )
            for name, shape in vision_shapes(config).items()
        }
        began = time.perf_counter()
        tower = VisionTower(config, dtype, weights, table)
        print(f"{dtype}: start {time.perf_counter() - began:.1f} s")
        report(f"xla-engine {dtype}", lambda tower=tower: tower(tile))
        tower.close()


def peer():
    import torch
    from transformers import Idefics3Config, Idefics3Model

    config = Idefics3Config(
        vision_config={
            "hidden_size": D,
            "intermediate_size": F,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "image_size": 512,
            "patch_size": 16,
        },
        text_config={
            "model_type": "llama",
            "hidden_size": TEXT,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 9,
            "vocab_size": 100,
            "pad_token_id": 0,
        },
        scale_factor=SCALE,
        image_token_id=99,
    )
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for dtype in (torch.bfloat16, torch.float32):
        model = Idefics3Model(config).to(dtype).eval()
        pixels = torch.rand(1, 1, 3, 512, 512, dtype=dtype) - 0.5
        with torch.inference_mode():
            report(f"transformers {dtype}", lambda m=model, p=pixels: m.get_image_features(pixel_values=p))


if __name__ == "__main__":
    peer() if sys.argv[1:] == ["transformers"] else ours()
