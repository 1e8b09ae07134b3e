# Frozen: runs at commit ddd07b3.
"""How long do others wait for a token while a large picture is encoded?

    python -m spikes.103_tower_slices calls TOWER    programs alone: milliseconds of each
    python -m spikes.103_tower_slices gap TOWER      waits of three decoding requests

TOWER: gemma3, qwen3_vl_4096 or qwen3_vl_16384 (patches). Towers of published widths with two layers and random weights,
beside a decoder of the published width with few layers: so prefill calls are shorter, and the bound stricter, than with
the whole model. The second also runs on commits before 103, where the least slice was a layer.
"""

import sys
import time
from hashlib import sha256

import jax
import ml_dtypes
import numpy as np

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.vision.config import VisionConfig
from xla_engine.graphs.vision.patch_config import PatchConfig
from xla_engine.images.processor import value_table
from xla_engine.model_loader.checkpoint import random_checkpoint
from xla_engine.prompts import PicturedPrompt
from xla_engine.runner.vision_tower import VisionTower
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import PromptImage

try:
    from xla_engine.graphs.vision.programs import leaf_shapes
    from xla_engine.runner.tower_slices import TowerSlices, operations, slice_operations
except ImportError:  # before
    from xla_engine.model_loader.vision import leaf_shapes
    from xla_engine.runner.patch_tower import PatchTower

    TowerSlices = None

GEMMA = VisionConfig(
    hidden_size=1152,
    intermediate_size=4304,
    num_hidden_layers=2,
    num_attention_heads=16,
    image_size=896,
    patch_size=14,
    layer_norm_eps=1e-6,
    scale_factor=4,
    text_size=2560,
    averages=True,
)
QWEN = PatchConfig(
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=2,
    num_attention_heads=16,
    patch_size=16,
    frames=2,
    merge_size=2,
    position_side=48,
    rope_theta=1e4,
    taps=(0,),
    text_size=2048,
    axes=tuple(at % 3 if at < 60 else 0 for at in range(64)),
)
COMMON = {"vocab_size": 32000, "max_position_embeddings": 8192, "tie_word_embeddings": True}
GEMMA_TEXT = ModelConfig(
    hidden_size=2560,
    intermediate_size=10240,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    hidden_act="gelu_tanh",
    qk_norm="head",
    post_norm=True,
    **COMMON,
)
QWEN_TEXT = ModelConfig(
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    qk_norm="head",
    **COMMON,
)
TOWERS = {
    "gemma3": (GEMMA, GEMMA_TEXT, (896, 896)),
    "qwen3_vl_4096": (QWEN, QWEN_TEXT, (1024, 1024)),
    "qwen3_vl_16384": (QWEN, QWEN_TEXT, (2048, 2048)),
}
OPTIONS = EngineConfig(
    max_num_seqs=4,
    max_model_len=4608,
    image_cache_bytes=1 << 27,
    self_check=False,
    enable_prefix_caching=False,
)


def tower_of(config, text, shape):
    weights = {}
    for number, (name, size) in enumerate(leaf_shapes(config).items()):
        made = np.random.default_rng(number).standard_normal(size, np.float32) * 0.03 + ("norm" in name)
        weights[name] = made.astype(ml_dtypes.bfloat16 if len(size) > 1 else np.float32)
    given = (config, "bfloat16", weights, value_table(1 / 255, (0.5,) * 3, (0.5,) * 3))
    most = shape[0] * shape[1] // 1024  # tokens, of Qwen
    if TowerSlices is not None:
        most = most if isinstance(config, PatchConfig) else None
        return VisionTower(*given, slices=TowerSlices(config, most, slice_operations(text, OPTIONS)))
    return PatchTower(*given, most_tokens=most) if isinstance(config, PatchConfig) else VisionTower(*given)


def picture(shape, seed):
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)


def asked(tower, tile):
    tokens = tower.tokens(tile.shape)
    image = PromptImage(digest=sha256(tile.tobytes()).hexdigest(), tiles=(tile,), spans=((1, tokens),))
    return PicturedPrompt("", (5, *[7] * tokens, 6), (image,))


def gap(name):
    config, text, shape = TOWERS[name]
    tower = tower_of(config, text, shape)
    engine = XlaBatchEngine(random_checkpoint(text, eos_token_ids=()), config=OPTIONS, tower=tower)
    lanes = engine.runner.lane_choices[-1] * engine.config.chunk_size
    prefills, normal, engine.lag = [], engine.lag, 0  # each step waits for its call
    for turn in range(3):
        engine.submit([3 + (turn + at) % 999 for at in range(4 * lanes)], SamplingParams(max_tokens=1))
        while engine.has_unfinished:
            began = time.perf_counter()
            engine.step()
            prefills.append(time.perf_counter() - began)
    prefill, engine.lag = float(np.median(prefills)), normal
    long = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
    for number in range(3):
        engine.submit([5 + number, 6, 7], long, request_id=f"text-{number}")
    seen, last, gaps = {}, {}, {"before": [], "beside": []}
    sent = done = None
    while done is None:
        for output in engine.step():
            now, count = time.perf_counter(), len(output.outputs[0].token_ids)
            if output.request_id == "picture":
                done = now if count else None
            elif count > seen.get(output.request_id, 0):
                if output.request_id in last:
                    gaps["before" if sent is None else "beside"].append(now - last[output.request_id])
                seen[output.request_id], last[output.request_id] = count, now
        if sent is None and len(seen) == 3 and min(seen.values()) >= 20:
            engine.submit(
                asked(tower, picture(shape, 1)), SamplingParams(max_tokens=1, temperature=0), request_id="picture"
            )
            sent = time.perf_counter()
            last = dict.fromkeys(last, sent)
    for number in range(3):
        engine.abort(f"text-{number}")
    engine.drain()
    engine.close()
    slices = tower.stages if TowerSlices is None else tower.stages((*shape, 3))
    print(
        f"{name}: {slices} slices; largest prefill call {lanes} tokens {prefill:.3f} s; longest wait before "
        f"{max(gaps['before']):.3f}, beside {max(gaps['beside']):.3f} s = {max(gaps['beside']) / prefill:.2f} calls, "
        f"median beside {np.median(gaps['beside']):.3f}; picture's first token after {done - sent:.2f} s",
        flush=True,
    )


def calls(name):
    config, text, shape = TOWERS[name]
    tower, times = tower_of(config, text, shape), {}
    rows, slices = tower.slices.of(tower.tokens((*shape, 3)))
    for turn in range(2):
        stream = None
        for call in [call for of_slice in slices for call in of_slice]:
            began, used = time.perf_counter(), time.process_time()
            stream = tower._run(picture(shape, 1), stream, [call])
            jax.block_until_ready(stream)
            if turn:
                spent = time.perf_counter() - began, time.process_time() - used
                times.setdefault(call.kind, []).append(spent)
    for kind, found in times.items():
        wall, used = 1e3 * np.array(found).T
        counted = operations(config, kind, rows, tower.slices.parts[rows]) / 1e9
        print(
            f"{name}: {kind}, {tower.slices.parts[rows]} of {rows} rows: {len(found)} calls, wall median "
            f"{np.median(wall):.1f} most {wall.max():.1f} ms, processor {np.median(used):.1f} ms, {counted:.1f} "
            f"GFLOP counted",
            flush=True,
        )


if __name__ == "__main__":
    {"gap": gap, "calls": calls}[sys.argv[1]](sys.argv[2])
