"""Time from nothing to the first token of a 5.5 GB checkpoint on disk, in a child process."""

import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from localchat.engine.events import Text
from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Sampling, TokenIds
from localchat.fit.load_options import LoadOptions
from localchat_cuda.config.quantization import PACKED_GROUPS
from localchat_cuda.weights.layer_shapes import linear_shapes
from localchat_cuda.weights.source import RandomWeights
from scripts.bench.cuda.driving import GPU, config_of
from scripts.bench.cuda.shapes import QWEN, STORED

BACKEND = "localchat_cuda.backend:CudaBackend"


def write_checkpoint(folder: Path) -> int:
    """Write random AWQ weights of Qwen2.5-7B as a checkpoint folder; return its size in bytes."""
    config, source = config_of("awq"), RandomWeights(GPU)
    names = config.family.names
    half, hidden = torch.float16, config.hidden
    ends = {
        names.embedding: (config.vocabulary, hidden),
        names.head: (config.vocabulary, hidden),
        names.last_norm: (hidden,),
    }
    _save(folder / "ends.safetensors", {n: source.tensor(n, s, half) for n, s in ends.items()})
    for number in range(config.layers):
        begin = names.layer.format(number)
        tensors = {
            begin + name: source.tensor(begin + name, (hidden,), half)
            for name in names.norms.values()
        }
        for field, (parts, k) in linear_shapes(config, number).items():
            for name, n in zip(names.merged[field], parts, strict=True):
                prefix = begin + name
                tensors |= {
                    f"{prefix}.qweight": source.tensor("", (k, n // 8), torch.int32),
                    f"{prefix}.qzeros": source.tensor(
                        "", (k // PACKED_GROUPS[0], n // 8), torch.int32
                    ),
                    f"{prefix}.scales": source.tensor(".scales", (k // PACKED_GROUPS[0], n), half),
                }
                if field in names.biased:
                    tensors[f"{prefix}.bias"] = source.tensor("", (n,), half)
        _save(folder / f"layer-{number:02}.safetensors", tensors)
    raw = {**QWEN, **STORED["awq"], "torch_dtype": "float16", "max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(raw))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"x{i}" for i in range(len(letters), config.vocabulary))]
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, path)


def first_token_s(folder: Path) -> tuple[float, float, str]:
    """Seconds from the start of the engine to its first token, to the end of 65, and its notices."""
    said: list[str] = []
    began_s = time.perf_counter()
    engine = LocalEngine(
        EngineOptions(load=LoadOptions(max_slots=8), model=folder, backend=BACKEND),
        notify=said.append,
    )
    try:
        request = GenerateRequest(
            TokenIds(tuple(range(1, 129))), sampling=Sampling(temperature=0), max_tokens=65,
            ignore_eos=True, speculation=False,
        )  # fmt: skip
        first = 0.0
        for event in engine.generate(request):
            if isinstance(event, Text) and not first:
                first = time.perf_counter() - began_s
        whole = time.perf_counter() - began_s
        said.append(engine.info().why)
    finally:
        engine.close()
    return first, whole, " ".join(said)


def startup(results: dict[str, float], *, cold: bool) -> None:
    """startup_s with Triton's cache warm; with `cold`, also startup_cold_s with an empty one."""
    folder = Path(tempfile.mkdtemp(prefix="checkpoint"))
    try:
        size = write_checkpoint(folder)
        torch.cuda.empty_cache()
        print(f"checkpoint of {size / 1e9:.2f} GB", flush=True)
        first_token_s(folder)
        results["startup_s"], whole, words = first_token_s(folder)
        print(f"start-up, warm: {results['startup_s']:.1f} s, 65 tokens at {whole:.1f} s. {words}",
              flush=True)  # fmt: skip
        if cold:
            _cold(folder, results)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _cold(folder: Path, results: dict[str, float]) -> None:
    cache = tempfile.mkdtemp(prefix="triton")
    os.environ["TRITON_CACHE_DIR"] = cache
    try:
        results["startup_cold_s"], _, words = first_token_s(folder)
        print(f"start-up, cold: {results['startup_cold_s']:.1f} s. {words}", flush=True)
    finally:
        del os.environ["TRITON_CACHE_DIR"]
        shutil.rmtree(cache, ignore_errors=True)
