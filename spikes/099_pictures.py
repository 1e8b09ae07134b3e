# Measured at commit edb0e570; runs at HEAD.
"""How many pictures a second does a model of SmolVLM-256M's shape take, here and elsewhere?

    python -m spikes.099_pictures prepare DIRECTORY           random weights as a Hugging Face directory (this package)
    LLAMA_PYTHON spikes/099_pictures.py gguf DIRECTORY        the same as GGUF files (gguf, ml_dtypes, safetensors)
    OPENVINO_PYTHON spikes/099_pictures.py openvino DIRECTORY the tower alone as OpenVINO's (torch, transformers)
    python -m spikes.099_pictures run DIRECTORY NAME=PYTHON ... [--rounds N] [--many N] [--go FILE --done FILE]

`run` starts a process for each NAME (xla-engine, llama.cpp, vllm, transformers, openvino), checks its features, warms
it up, and then measures: in every round each process has its turn with each job while the others wait. With --go,
measuring begins when that file is there. For llama.cpp, MTMD_CPP_LIB names a folder with libmtmd.

Jobs: `one`, four pictures of one tile at the same time, 16 new tokens each; `many`, a picture of 17 tiles, 16 new
tokens; `tile`, the tower alone. Pictures are new in every turn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

D, F, LAYERS, HEADS, SIDE, PATCH, SCALE = 768, 3072, 12, 12, 32, 16, 4
TEXT, INNER, DEPTH, VOCABULARY = 576, 1536, 30, 49280
TILE, LONGEST, TOKENS, NEW, BATCH = 512, 2048, 64, 16, 4
PROMPT = "User:<image>What is this?\nAssistant:"
THREADS = 2
OURS = ("products", "check", "gap")  # jobs of this package alone


def flops():
    """Of one tile."""
    rows = SIDE * SIDE
    layer = 2 * rows * (4 * D * D + 2 * D * F) + 4 * rows * rows * D
    return LAYERS * layer + 2 * rows * D * 3 * PATCH * PATCH + 2 * rows * D * TEXT


def picture(seed, side):
    """uint8 [side, side, 3]: smooth, and new for every seed."""
    small = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    return np.kron(small, np.ones((side // 16, side // 16, 1), np.uint8))


# Checkpoints.


def prepare(directory):
    import ml_dtypes
    from safetensors.numpy import save_file

    draw, tensors = np.random.default_rng(0), {}

    def add(name, *shape, scale=0.03):
        values = draw.standard_normal(shape, dtype=np.float32) * scale
        tensors[name] = values.astype(ml_dtypes.bfloat16)

    def ones(name, size, value=1):
        tensors[name] = np.full(size, value, ml_dtypes.bfloat16)

    def linear(name, rows, columns):
        add(f"{name}.weight", rows, columns)
        add(f"{name}.bias", rows)

    text, tower = "model.text_model.", "model.vision_model."
    add(f"{text}embed_tokens.weight", VOCABULARY, TEXT, scale=1)
    add("lm_head.weight", VOCABULARY, TEXT)
    ones(f"{text}norm.weight", TEXT)
    for layer in range(DEPTH):
        at = f"{text}layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", 576, TEXT),
            ("self_attn.k_proj", 192, TEXT),
            ("self_attn.v_proj", 192, TEXT),
            ("self_attn.o_proj", TEXT, 576),
            ("mlp.gate_proj", INNER, TEXT),
            ("mlp.up_proj", INNER, TEXT),
            ("mlp.down_proj", TEXT, INNER),
        ):
            add(f"{at}{name}.weight", rows, columns)
        ones(f"{at}input_layernorm.weight", TEXT)
        ones(f"{at}post_attention_layernorm.weight", TEXT)
    add(f"{tower}embeddings.patch_embedding.weight", D, 3, PATCH, PATCH)
    add(f"{tower}embeddings.patch_embedding.bias", D)
    add(f"{tower}embeddings.position_embedding.weight", SIDE * SIDE, D)
    for layer in range(LAYERS):
        at = f"{tower}encoder.layers.{layer}."
        for part in ("q", "k", "v", "out"):
            linear(f"{at}self_attn.{part}_proj", D, D)
        linear(f"{at}mlp.fc1", F, D)
        linear(f"{at}mlp.fc2", D, F)
        for name in ("layer_norm1", "layer_norm2"):
            ones(f"{at}{name}.weight", D)
            ones(f"{at}{name}.bias", D, 0)
    ones(f"{tower}post_layernorm.weight", D)
    ones(f"{tower}post_layernorm.bias", D, 0)
    add("model.connector.modality_projection.proj.weight", TEXT, D * SCALE * SCALE)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    def write(folder, name, value):
        (folder / name).write_text(json.dumps(value, indent=1))

    tokenizer = json.loads((Path(__file__).parents[1] / "tests/golden/images/tokenizer.json").read_text())
    image = next(each["id"] for each in tokenizer["added_tokens"] if each["content"] == "<image>")
    config = {
        "architectures": ["Idefics3ForConditionalGeneration"],  # SmolVLM's processor needs torchvision in transformers
        "model_type": "idefics3",
        "pad_token_id": 2,
        "image_token_id": image,
        "scale_factor": SCALE,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "text_config": {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": VOCABULARY,
            "hidden_size": TEXT,
            "intermediate_size": INNER,
            "num_hidden_layers": DEPTH,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        },
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": D,
            "intermediate_size": F,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "image_size": TILE,
            "patch_size": PATCH,
            "layer_norm_eps": 1e-6,
            "hidden_act": "gelu_pytorch_tanh",
        },
    }
    special = [each["content"] for each in tokenizer["added_tokens"]]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for name, longest in (("many", LONGEST), ("one", TILE)):
        folder = directory / name
        folder.mkdir(exist_ok=True)
        write(folder, "config.json", config)
        write(folder, "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
        write(folder, "tokenizer.json", tokenizer)
        write(
            folder,
            "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "pad_token": "<end_of_utterance>",
                "eos_token": "<end_of_utterance>",
                "additional_special_tokens": special,
                "image_token": "<image>",
                "fake_image_token": "<fake_token_around_image>",
                "global_image_token": "<global-img>",
                "end_of_utterance_token": "<end_of_utterance>",
                "chat_template": template,
                "model_max_length": 8192,
            },
        )
        write(
            folder,
            "preprocessor_config.json",
            {
                "image_processor_type": "Idefics3ImageProcessor",
                "processor_class": "Idefics3Processor",
                "do_convert_rgb": True,
                "do_image_splitting": True,
                "do_normalize": True,
                "do_pad": True,
                "do_rescale": True,
                "do_resize": True,
                "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3,
                "max_image_size": {"longest_edge": TILE},
                "size": {"longest_edge": longest},
                "resample": 1,
                "rescale_factor": 1 / 255,
            },
        )
        write(folder, "processor_config.json", {"image_seq_len": TOKENS, "processor_class": "Idefics3Processor"})
        link = folder / "model.safetensors"
        link.unlink(missing_ok=True)
        link.symlink_to(directory.resolve() / "model.safetensors")


def gguf_files(directory):
    import gguf
    import ml_dtypes
    from safetensors.numpy import load_file

    tensors = load_file(directory / "model.safetensors")
    bf16 = gguf.GGMLQuantizationType.BF16

    def matrix(writer, name, values):
        writer.add_tensor(name, np.ascontiguousarray(values.astype(ml_dtypes.bfloat16)).view(np.uint8), raw_dtype=bf16)

    def vector(writer, name, values):
        writer.add_tensor(name, values.astype(np.float32))

    def finish(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def interleaved(weight, heads):
        rows, columns = weight.shape
        return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)

    writer = gguf.GGUFWriter(str(directory / "text.gguf"), "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(TEXT)
    writer.add_block_count(DEPTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(9)
    writer.add_head_count_kv(3)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_rope_dimension_count(64)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    tokenizer = json.loads((directory / "many" / "tokenizer.json").read_text())
    words = dict.fromkeys(range(VOCABULARY))
    words |= {index: word for word, index in tokenizer["model"]["vocab"].items()}
    added = {each["id"]: each["content"] for each in tokenizer["added_tokens"]}
    words |= added
    kinds = [3 if at in added else 1 if words[at] else 5 for at in range(VOCABULARY)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([words[at] or f"[unused{at}]" for at in range(VOCABULARY)])
    writer.add_token_types(kinds)
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, DEPTH)
    for name, values in tensors.items():
        if not name.startswith(("model.text_model.", "lm_head")):
            continue
        if name.endswith("q_proj.weight"):
            values = interleaved(values, 9)
        elif name.endswith("k_proj.weight"):
            values = interleaved(values, 3)
        target = names.get_name(name.replace("text_model.", ""), (".weight",))
        (matrix if values.ndim > 1 else vector)(writer, target, values)
    finish(writer)

    writer = gguf.GGUFWriter(str(directory / "mmproj.gguf"), "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "idefics3")
    for name, value in {
        "image_size": TILE,
        "preproc_image_size": LONGEST,
        "patch_size": PATCH,
        "embedding_length": D,
        "feed_forward_length": F,
        "block_count": LAYERS,
        "projection_dim": TEXT,
        "attention.head_count": HEADS,
        "projector.scale_factor": SCALE,
    }.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)
    writer.add_bool("clip.use_gelu", True)
    tower = "model.vision_model."
    matrix(writer, "mm.model.fc.weight", tensors["model.connector.modality_projection.proj.weight"])
    # its product is a convolution, which needs f16 or f32
    writer.add_tensor("v.patch_embd.weight", tensors[f"{tower}embeddings.patch_embedding.weight"].astype(np.float32))
    vector(writer, "v.patch_embd.bias", tensors[f"{tower}embeddings.patch_embedding.bias"])
    vector(writer, "v.position_embd.weight", tensors[f"{tower}embeddings.position_embedding.weight"])
    for kind in ("weight", "bias"):
        vector(writer, f"v.post_ln.{kind}", tensors[f"{tower}post_layernorm.{kind}"])
    for layer in range(LAYERS):
        for theirs, ours in {
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_out": "self_attn.out_proj",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
            "ln1": "layer_norm1",
            "ln2": "layer_norm2",
        }.items():
            for kind in ("weight", "bias"):
                values = tensors[f"{tower}encoder.layers.{layer}.{ours}.{kind}"]
                (matrix if values.ndim > 1 else vector)(writer, f"v.blk.{layer}.{theirs}.{kind}", values)
    finish(writer)


def openvino_files(directory):
    """The tower alone: optimum-intel 2.2.0 exports neither Idefics3 nor SmolVLM from transformers 5."""
    import openvino
    import torch
    import transformers

    kind = transformers.Idefics3ForConditionalGeneration
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = kind.from_pretrained(directory / "many", **options).eval()

    class Tower(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tower, self.connector = model.model.vision_model, model.model.connector

        def forward(self, pixels):
            return self.connector(self.tower(pixel_values=pixels).last_hidden_state)

    with torch.no_grad():
        made = openvino.convert_model(torch.export.export(Tower(), (torch.zeros(1, 3, TILE, TILE),)))
    openvino.save_model(made, directory / "tower.xml", compress_to_fp16=False)


# Engines: `tile(seed)` gives the features of one tile; `one` and `many` the number of tiles, of prompt tokens, and the
# tokens of each answer.


class Ours:
    def __init__(self, directory):
        import jax

        from xla_engine import LLM, SamplingParams, __version__
        from xla_engine.graphs.linear.native import NativeProducts
        from xla_engine.runner.backends import serving_isa

        options = {"max_num_seqs": 4, "max_model_len": 2048, "self_check": False, "dtype": "bfloat16"}
        self._llms = {name: LLM(str(directory / name), **options) for name in ("one", "many")}
        self._params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
        self._tower = self._llms["one"].engine.runner.features.tower
        self.about = f"xla-engine {__version__}, jax {jax.__version__}, bf16"
        isa = serving_isa("auto", frozenset({"linear_bf16"}))
        self._products = None if isa is None else NativeProducts(isa)

    def tile(self, seed):
        return self._tower(picture(seed, TILE))

    def _run(self, kind, images):
        prompts = [{"prompt": PROMPT, "multi_modal_data": {"image": each}} for each in images]
        outputs = self._llms[kind].generate(prompts, self._params, use_tqdm=False)
        return {
            "prompt": [len(each.prompt_token_ids) for each in outputs],
            "tokens": [list(each.outputs[0].token_ids) for each in outputs],
        }

    def one(self, seed):
        return self._run("one", [picture(seed + each, TILE) for each in range(BATCH)])

    def many(self, seed):
        return self._run("many", [picture(seed, LONGEST)])

    def products(self, seed):
        """Seconds of the products of a tile's layers alone, by XLA and by the C++ kernels: what bf16 reaches here."""
        import jax
        import jax.numpy as jnp

        from xla_engine.graphs.inventory import compiler_options
        from xla_engine.graphs.linear.products import rows_first
        from xla_engine.model_loader.weights import DTYPES

        draw, found = np.random.default_rng(seed), {}
        for form, product in (("XLA", rows_first), ("C++", self._products and self._products.linear)):
            if product is None:
                continue
            seconds, operations = np.zeros(2), 0.0
            for features, width, count in ((3 * D, D, 1), (D, D, 1), (F, D, 1), (D, F, 1)):
                weight = draw.standard_normal((features, width), dtype=np.float32).astype(DTYPES["bfloat16"])
                x = jnp.asarray(draw.standard_normal((SIDE * SIDE, width), dtype=np.float32))
                held = jnp.asarray(weight if form == "XLA" else self._products.pack(weight))
                call = jax.jit(product).lower(held, x).compile(compiler_options=compiler_options())
                times = []
                for _ in range(12):
                    before, began = time.process_time(), time.perf_counter()
                    call(held, x).block_until_ready()
                    times.append((time.perf_counter() - began, time.process_time() - before))
                seconds += count * np.min(times[2:], axis=0)
                operations += count * 2 * SIDE * SIDE * features * width
            found[f"{form}, TFLOP/s by the clock and by processor time"] = (operations / seconds / 1e12).round(3).tolist()
        return found

    def check(self, seed):
        """Seconds that the tower takes in the self-check of a start."""
        from xla_engine.runner.self_check.check import tile_differences

        began = time.perf_counter()
        found = tile_differences(self._tower)
        return {"self-check of the tower": time.perf_counter() - began, "differences": found}

    def gap(self, seed):
        """The longest wait between two tokens of three decoding requests while a picture of 17 tiles comes in, and the
        time of the largest prefill call, in seconds."""
        from xla_engine import SamplingParams

        engine = self._llms["many"].engine
        lanes = engine.runner.lane_choices[-1] * engine.config.chunk_size
        long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        steps = []

        def step():
            began = time.perf_counter()
            outputs = engine.step()
            steps.append(time.perf_counter() - began)
            return outputs

        normal, engine.lag = engine.lag, 0  # each step waits for its call
        engine.submit({"prompt_token_ids": list(range(3, 3 + min(4 * lanes, 1900)))}, SamplingParams(max_tokens=1))
        while engine.has_unfinished:
            step()
        prefill, engine.lag = float(np.median(steps[:3])), normal
        for number in range(3):
            engine.submit({"prompt_token_ids": [5 + number, 6, 7]}, long, request_id=f"gap-{seed}-{number}")
        seen, last, gaps = {}, {}, {"before": [], "beside": []}
        sent = done = None
        while engine.has_unfinished and done is None:
            for output in step():
                now, count = time.perf_counter(), len(output.outputs[0].token_ids)
                name = output.request_id
                if name == f"gap-{seed}-picture":
                    done = now if count else None
                elif count > seen.get(name, 0):
                    if name in last:
                        gaps["before" if sent is None else "beside"].append(now - last[name])
                    seen[name], last[name] = count, now
            if sent is None and min((seen.get(f"gap-{seed}-{n}", 0) for n in range(3)), default=0) >= 20:
                sent = time.perf_counter()
                prompt = {"prompt": PROMPT, "multi_modal_data": {"image": picture(seed, LONGEST)}}
                engine.submit(prompt, SamplingParams(max_tokens=1, temperature=0), request_id=f"gap-{seed}-picture")
                now = time.perf_counter()  # reading the picture is the caller's
                last = dict.fromkeys(last, now)
        for number in range(3):
            engine.abort(f"gap-{seed}-{number}")
        engine.drain()
        wait = None if done is None or sent is None else done - sent
        return {
            "largest prefill call": prefill,
            "lanes": lanes,
            "longest gap before": max(gaps["before"], default=0),
            "longest gap beside": max(gaps["beside"], default=0),
            "median gap beside": float(np.median(gaps["beside"] or [0])),
            "tokens of others beside": len(gaps["beside"]),
            "until the picture's first token": wait,
        }


class Transformers:
    def __init__(self, directory):
        import torch
        import transformers

        torch.set_num_threads(THREADS)
        torch.set_grad_enabled(False)
        self._torch = torch
        kind = transformers.Idefics3ForConditionalGeneration
        self._model = kind.from_pretrained(directory / "many", dtype=torch.bfloat16).eval()
        self._processors = {
            name: transformers.AutoProcessor.from_pretrained(directory / name, use_fast=False)
            for name in ("one", "many")
        }
        attention = self._model.config._attn_implementation
        dtypes = {str(each.dtype) for each in self._model.parameters()}
        self.about = f"transformers {transformers.__version__}, torch {torch.__version__}, {dtypes}, {attention}"

    def tile(self, seed):
        pixels = self._torch.from_numpy(picture(seed, TILE).astype(np.float32) / 127.5 - 1)
        pixels = pixels.permute(2, 0, 1)[None, None].to(self._torch.bfloat16)
        found = self._model.model.get_image_features(pixels)
        found = getattr(found, "pooler_output", found)
        found = self._torch.cat(list(found)) if isinstance(found, list | tuple) else found
        return found.float().numpy().reshape(TOKENS, TEXT)

    def _run(self, kind, images):
        from PIL import Image

        given = [[Image.fromarray(each)] for each in images]
        inputs = self._processors[kind](images=given, text=[PROMPT] * len(images), return_tensors="pt")
        inputs["pixel_values"] = inputs["pixel_values"].to(self._torch.bfloat16)
        out = self._model.generate(**inputs, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        length = inputs["input_ids"].shape[1]
        return {
            "prompt": [length] * len(images),
            "tiles": int(np.prod(inputs["pixel_values"].shape[:2])),
            "tokens": out[:, length:].tolist(),
        }

    def one(self, seed):
        return self._run("one", [picture(seed + each, TILE) for each in range(BATCH)])

    def many(self, seed):
        return self._run("many", [picture(seed, LONGEST)])


class OpenVino:
    """The tower alone."""

    def __init__(self, directory):
        import openvino

        core = openvino.Core()
        has = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        options = {"INFERENCE_PRECISION_HINT": "bf16" if has else "f32", "INFERENCE_NUM_THREADS": str(THREADS)}
        self._call = core.compile_model(str(directory / "tower.xml"), "CPU", options)
        precision = self._call.get_property("INFERENCE_PRECISION_HINT")
        self.about = f"openvino {openvino.__version__}, the tower alone, computed in {precision}"

    def tile(self, seed):
        pixels = picture(seed, TILE).astype(np.float32) / 127.5 - 1
        found = self._call([np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])])
        return np.asarray(found[0], np.float32).reshape(TOKENS, TEXT)


class Vllm:
    def __init__(self, directory):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))[:THREADS]))
        os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        import torch
        import vllm

        self._llm = vllm.LLM(
            model=str(directory / "many"),
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=BATCH,
            max_num_batched_tokens=4096,
            enable_prefix_caching=False,
            limit_mm_per_prompt={"image": 1},
            mm_processor_cache_gb=0,
            generation_config="vllm",
            disable_log_stats=True,
            seed=0,
        )
        self._params = vllm.SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
        self.about = f"vllm {vllm.__version__}, torch {torch.__version__}, bf16, {torch.get_num_threads()} threads"

    def _model(self):
        executor = self._llm.llm_engine.model_executor
        return executor.driver_worker.worker.model_runner.model

    def tile(self, seed):
        import torch

        model = self._model()
        pixels = torch.from_numpy(picture(seed, TILE).astype(np.float32) / 127.5 - 1).permute(2, 0, 1)[None]
        with torch.inference_mode():
            mask = torch.ones(1, TILE, TILE, dtype=torch.bool)
            states = model.model.image_pixels_to_features(pixels.to(torch.bfloat16), pixel_attention_mask=mask)
            found = model.model.connector(states)
        return found.float().numpy().reshape(TOKENS, TEXT)

    def _run(self, images, **more):
        from PIL import Image

        prompts = [{"prompt": PROMPT, "multi_modal_data": {"image": Image.fromarray(each)}, **more} for each in images]
        outputs = self._llm.generate(prompts, self._params, use_tqdm=False)
        return {
            "prompt": [len(each.prompt_token_ids) for each in outputs],
            "tokens": [list(each.outputs[0].token_ids) for each in outputs],
        }

    def one(self, seed):
        more = {"mm_processor_kwargs": {"size": {"longest_edge": TILE}}}
        return self._run([picture(seed + each, TILE) for each in range(BATCH)], **more)

    def many(self, seed):
        return self._run([picture(seed, LONGEST)])


class LlamaCpp:
    """mtmd and llama_decode by llama-cpp-python's bindings. `one` leaves out the single slice that mtmd makes of a
    picture of one tile beside its overview, as the other engines have no such slice."""

    def __init__(self, directory):
        import ctypes

        import llama_cpp
        from llama_cpp import mtmd_cpp as mtmd

        self._c, self._llama, self._mtmd = ctypes, llama_cpp, mtmd
        def told(level, text, data):  # errors and warnings only
            if level >= 3:
                print(text.decode(errors="replace"), end="", file=sys.stderr)

        quiet = llama_cpp.llama_log_callback(told)
        self._kept = quiet
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p())
        if hasattr(mtmd, "mtmd_log_set"):
            mtmd.mtmd_log_set(quiet, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        text = str(directory / "text.gguf").encode()
        self._model = llama_cpp.llama_model_load_from_file(text, llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_seq_max = BATCH * 2048, BATCH
        options.n_batch = options.n_ubatch = 2048
        options.n_threads = options.n_threads_batch = THREADS
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        given = mtmd.mtmd_context_params_default()
        given.use_gpu, given.n_threads, given.print_timings, given.warmup = False, THREADS, False, True
        file = str(directory / "mmproj.gguf").encode()
        self._vision = mtmd.mtmd_init_from_file(file, self._model, given)
        if not (self._model and self._context and self._vision):
            raise RuntimeError("llama.cpp does not load the files")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(2048, 0, 1)
        system = llama_cpp.llama_print_system_info().decode()
        units = [word for word in ("AVX512_BF16", "AMX_INT8") if f"{word} = 1" in system]
        self.about = f"llama-cpp-python {llama_cpp.__version__} with its own mtmd, BF16 {units}"

    def _chunks(self, image):
        """mtmd's chunks: (chunk, kind). The list must be freed."""
        mtmd, c = self._mtmd, self._c
        height, width, _ = image.shape
        pixels = np.ascontiguousarray(image)
        data = pixels.ctypes.data_as(c.POINTER(c.c_uint8))
        bitmap = mtmd.mtmd_bitmap_init(width, height, data)
        marker = mtmd.mtmd_get_marker(self._vision).decode()
        text = mtmd.mtmd_input_text()
        text.text = PROMPT.replace("<image>", marker).encode()
        text.text_len, text.add_special, text.parse_special = len(text.text), False, True
        chunks = mtmd.mtmd_input_chunks_init()
        bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
        status = mtmd.mtmd_tokenize(self._vision, chunks, c.byref(text), bitmaps, 1)
        mtmd.mtmd_bitmap_free(bitmap)
        if status:
            raise RuntimeError(f"mtmd_tokenize failed with status {status}")
        found = [mtmd.mtmd_input_chunks_get(chunks, at) for at in range(mtmd.mtmd_input_chunks_size(chunks))]
        return chunks, [(each, mtmd.mtmd_input_chunk_get_type(each)) for each in found]

    def tile(self, seed):
        mtmd = self._mtmd
        chunks, found = self._chunks(picture(seed, TILE))
        last = [each for each, kind in found if kind == mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE][-1]
        before, began = time.process_time(), time.perf_counter()
        if mtmd.mtmd_encode_chunk(self._vision, last):
            raise RuntimeError("mtmd_encode_chunk failed")
        # without the slices that mtmd has made of the picture
        self.spent = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - before}
        rows = np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(self._vision), (TOKENS, TEXT)).copy()
        mtmd.mtmd_input_chunks_free(chunks)
        return rows

    def _run(self, images, *, overview_only):
        llama, mtmd, c = self._llama, self._mtmd, self._c
        llama.llama_memory_clear(self._memory, True)
        prompts, tiles, answers, at = [], 0, [], []
        for slot, image in enumerate(images):
            chunks, found = self._chunks(image)
            pictures = [n for n, (_, kind) in enumerate(found) if kind == mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE]
            left_out = pictures[:-1] if overview_only else []
            past = llama.llama_pos(0)
            for number, (chunk, _) in enumerate(found):
                if number in left_out:
                    continue
                tiles += number in pictures
                last = number == len(found) - 1
                given = (self._vision, self._context, chunk, past, slot, 2048, last, c.byref(past))
                if mtmd.mtmd_helper_eval_chunk_single(*given):
                    raise RuntimeError("mtmd_helper_eval_chunk_single failed")
            mtmd.mtmd_input_chunks_free(chunks)
            logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(self._context, -1), (VOCABULARY,))
            answers.append([int(logits.argmax())])
            prompts.append(past.value)
            at.append(past.value)
        batch = self._batch
        for _ in range(NEW - 1):
            for row, answer in enumerate(answers):
                batch.token[row], batch.pos[row] = answer[-1], at[row]
                batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, row, 1
                at[row] += 1
            batch.n_tokens = len(answers)
            if llama.llama_decode(self._context, batch):
                raise RuntimeError("llama_decode failed")
            for row, answer in enumerate(answers):
                logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(self._context, row), (VOCABULARY,))
                answer.append(int(logits.argmax()))
        return {"prompt": prompts, "tiles": tiles, "tokens": answers}

    def one(self, seed):
        return self._run([picture(seed + each, TILE) for each in range(BATCH)], overview_only=True)

    def many(self, seed):
        return self._run([picture(seed, LONGEST)], overview_only=False)


ENGINES = {
    "xla-engine": Ours,
    "llama.cpp": LlamaCpp,
    "vllm": Vllm,
    "transformers": Transformers,
    "openvino": OpenVino,
}


def serve(name, directory):
    """Answer jobs, one JSON object a line."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not the protocol
    began = time.perf_counter()
    engine = ENGINES[name](directory)
    print(json.dumps({"about": engine.about, "start": time.perf_counter() - began}), file=out, flush=True)
    for line in sys.stdin:
        job, seed = json.loads(line)
        before, began = time.process_time(), time.perf_counter()
        try:
            found = getattr(engine, job)(seed)
            answer = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - before}
            if isinstance(found, np.ndarray):
                answer |= getattr(engine, "spent", {})
                answer["features"] = found[:, :4].tolist()
                answer["size"] = float(np.abs(found).max())
            else:
                answer |= found
        except Exception as error:  # a job that an engine lacks is a gap in the table
            answer = {"error": f"{type(error).__name__}: {error}"[:600]}
        print(json.dumps(answer), file=out, flush=True)


class Worker:
    def __init__(self, name, python, directory):
        self.name = name
        command = [python, __file__, "serve", str(directory), name]
        root = str(Path(__file__).parents[1])
        environment = os.environ | ({"PYTHONPATH": root} if name == "xla-engine" else {})
        environment |= {"OMP_NUM_THREADS": str(THREADS), "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "0"}
        self._errors = open(directory / f"{name}.err", "w")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment, text=True
        )
        line = self._process.stdout.readline()
        self.about = json.loads(line) if line else None

    def ask(self, job, seed):
        self._process.stdin.write(json.dumps([job, seed]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": "the process ended"}

    def close(self):
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def run(options):
    directory, workers, start = options.directory, [], time.perf_counter()
    for each in options.peers:
        name, _, python = each.partition("=")
        worker = Worker(name, python, directory)
        if worker.about is None:
            print(f"{name}: does not start: {(directory / f'{name}.err').read_text().strip()[-600:]}", flush=True)
            continue
        workers.append(worker)
        print(f"{name}: {worker.about['about']}, started in {worker.about['start']:.0f} s", flush=True)
    expected = None
    for worker in workers:  # the same tile has nearly the same features everywhere
        found = worker.ask("tile", 1)
        if "error" in found:
            print(f"{worker.name}: tile: {found['error']}", flush=True)
            continue
        features = np.array(found["features"])
        expected = features if expected is None else expected
        apart = np.abs(features - expected).max() / np.abs(expected).max()
        print(f"{worker.name}: features differ by {apart:.4f} of the largest", flush=True)
        for job in filter(None, options.warm.split(",")):
            warm = worker.ask(job, 1)
            shown = {name: value for name, value in warm.items() if name != "tokens"}
            first = [each[:4] for each in warm.get("tokens", [])][:1]
            print(f"{worker.name}: {job}: {shown} {first}", flush=True)
    if options.go:
        print("ready", flush=True)
        while not Path(options.go).exists():
            time.sleep(0.2)
    seen = {}
    jobs = [job for job in options.jobs.split(",") if job]
    began = time.perf_counter()
    for turn in range(options.rounds):
        for job in jobs:
            if turn >= {"many": options.many, **dict.fromkeys(OURS, options.once)}.get(job, options.rounds):
                continue
            for worker in workers:
                if job in OURS and worker.name != "xla-engine":
                    continue
                known = [each["seconds"] for each in seen.get((worker.name, job), ()) if "seconds" in each]
                if time.perf_counter() - start + min(known, default=1) > options.limit:
                    print(f"{worker.name} {job}: no time left", flush=True)
                    continue
                found = worker.ask(job, 1000 * (turn + 1))
                print(turn, worker.name, job, {k: round(found[k], 3) for k in ("seconds", "cpu") if k in found}, flush=True)
                seen.setdefault((worker.name, job), []).append(found)
                if "error" in found or job in OURS:
                    print(worker.name, job, {k: v for k, v in found.items() if k != "features"}, flush=True)
    if options.done:
        Path(options.done).touch()
    print(f"measured for {time.perf_counter() - began:.0f} s", flush=True)
    units = {"one": BATCH, "many": 1, "tile": 1}
    for (name, job), found in seen.items():
        times = [each["seconds"] for each in found if "seconds" in each]
        if job not in units or not times:
            continue
        least, median = min(times), float(np.median(times))
        line = f"{name} {job}: {len(times)} turns, {units[job] / least:.3f} and {units[job] / median:.3f} pictures/s"
        line += f" (least and median time), processor {min(each['cpu'] for each in found if 'cpu' in each):.2f} s"
        if job == "tile":
            line += f", {flops() / least / 1e12:.3f} TFLOP/s"
        print(line, flush=True)
    for worker in workers:
        worker.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("role", choices=("prepare", "gguf", "openvino", "serve", "run"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("peers", nargs="*", help="NAME=PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--once", type=int, default=1, help="rounds with the jobs of this package alone")
    parser.add_argument("--many", type=int, default=1, help="rounds with the picture of 17 tiles")
    parser.add_argument("--jobs", default="tile,one,products,check,many,gap")
    parser.add_argument("--warm", default="one", help="jobs that run once before, and show what they tell")
    parser.add_argument("--limit", type=float, default=1e9, help="begin nothing that ends later than this many seconds")
    parser.add_argument("--go")
    parser.add_argument("--done")
    options = parser.parse_args()
    match options.role:
        case "prepare":
            prepare(options.directory)
        case "gguf":
            gguf_files(options.directory)
        case "openvino":
            openvino_files(options.directory)
        case "serve":
            serve(options.peers[0], options.directory)
        case "run":
            run(options)


if __name__ == "__main__":
    main()
