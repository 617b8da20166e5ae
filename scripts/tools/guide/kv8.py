"""Measures how an FP8 KV cache changes the guide's output: KL per token against bf16 KV, and retrieval.

    python scripts/tools/guide/kv8.py [--gguf localchat/guide/guide.gguf] [--count 40] [--needles 12]
    [--device cuda]

The same checkpoint and tokens over three caches. On a CPU the plain references compute in fp32 and only
the cache is rounded (to bf16, or to 8-bit values); on a GPU the kernels run in bf16. KL is between the
next-token distributions of bf16 KV and FP8 KV, over held-out conversations. For retrieval the guide
must quote the first of some 300 tokens of random lines, which is as far as it can look back; the score
is the share of the answer's tokens that the model ranks first, given the tokens before them. The last
line is JSON.
"""

import argparse
import json
import tempfile
from itertools import islice
from pathlib import Path
from random import Random
from typing import Final, TypeAlias

import torch
from checkpoint import GUIDE, hub_name, read_gguf, write_folder
from checkpoint import config as config_of
from conversations import conversations, read_facts
from tokenizers import Tokenizer
from tokens import encode

from localchat.backend_api.interface import Capabilities
from localchat.fit.kv_types import FP8
from localchat_cuda.config.model import PAGE_TOKENS, ModelConfig
from localchat_cuda.config.reader import read_config
from localchat_cuda.runner.device_state import StateTable
from localchat_cuda.runner.input_batch import (
    BatchConfig,
    TokenSpan,
    build_input_batch,
    model_inputs,
    write_batch,
)
from localchat_cuda.runner.kv_pages import Pages
from localchat_cuda.runner.model import DeviceModel
from localchat_cuda.runner.step_buffer import StepBuffer
from localchat_cuda.weights.loader import load
from localchat_cuda.weights.model_weights import ModelWeights
from localchat_cuda.weights.source import CheckpointWeights

HELD_OUT_SEED: Final = 4711
LONGEST: Final = 1024
LINES: Final = 16
CACHES: Final = ("plain", "bf16", "fp8")

Talk: TypeAlias = list[tuple[str, str]]


class Text:
    """The guide over one kind of cache; computes the logits of a whole text at once."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, device: torch.device, cache: str
    ) -> None:
        gpu = device.type == "cuda"
        width = -(-LONGEST // PAGE_TOKENS)
        dtype = torch.bfloat16 if gpu else torch.float32
        can = Capabilities(
            LONGEST, width * PAGE_TOKENS, 1, 1, LONGEST, block_tokens=PAGE_TOKENS,
            kv_type=FP8 if cache == "fp8" else "f16",
        )  # fmt: skip
        self.pages = Pages(config, can, device, dtype)
        if cache == "bf16":
            self.pages.pools = tuple(pool.bfloat16() for pool in self.pages.pools)
        self.model = DeviceModel(config, weights, self.pages, kernels=gpu)
        self.device = device
        self.table = StateTable(can, device)
        self.table.block_tables[0] = torch.arange(width)
        sms = torch.cuda.get_device_properties(device).multi_processor_count if gpu else 4
        self.batch_config = BatchConfig(
            config.heads, config.key_heads, config.head_dim, PAGE_TOKENS, sms, cache == "fp8"
        )

    def logs(self, tokens: list[int]) -> torch.Tensor:
        """Log probabilities fp32 [T, vocabulary] of what follows each token."""
        batch = build_input_batch([TokenSpan(0, 0, len(tokens))], self.batch_config, 1)
        buffer = StepBuffer(16 * LONGEST, 1, self.device)
        self.table.token_table[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        buffer.begin_step()
        slices = write_batch(batch, buffer, self.table)
        buffer.send()
        inputs = model_inputs(batch, slices, self.table, None)
        with torch.inference_mode():
            states = self.model.hidden_states(inputs)[: len(tokens)]
            return self.model.logits(states).log_softmax(-1).cpu()


def unpack(guide: Path, folder: Path) -> None:
    """Write the guide's GGUF as an fp32 checkpoint."""
    weights, tokenizer = read_gguf(guide)
    tensors = {hub_name(name): held for name, held in weights.items()}
    write_folder(folder, tensors, config_of(weights, "float32"), tokenizer)


def held_out(count: int) -> list[Talk]:
    """Conversations of a seed that training did not use."""
    facts = read_facts(Path(__file__).with_name("facts.json"))
    return [talk for _, talk in islice(conversations(facts, HELD_OUT_SEED), count)]


def needles(tokenizer: Tokenizer, count: int, seed: int = 1) -> list[tuple[list[int], list[int]]]:
    """Texts as tokens, and the positions that must repeat earlier tokens."""
    facts = read_facts(Path(__file__).with_name("facts.json"))
    rng, things = Random(seed), facts["words"]["things"].split(" ")
    talks = []
    for number in range(count):
        lines = [" ".join(rng.choices(things, k=rng.randint(3, 10))) for _ in range(LINES)]
        text = "\n".join(lines)
        if number % 2:
            asked, answer = f"{text}\n\nwhat is the first line?", lines[0]
        else:
            asked, answer = f"{text}\n\nQuote it.", "\n".join(f"> {line}" for line in lines)
        talks.append([("user", asked), ("assistant", answer)])
    return [
        (ids, [at for at, own in enumerate(marks) if own])
        for ids, marks in encode(tokenizer, talks)
    ]


def measure(folder: Path, talks: list[Talk], asked: int, device: torch.device) -> dict[str, float]:
    """The metrics of the module docstring, and the number of tokens they are based on."""
    config = read_config(folder)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights = load(config, CheckpointWeights(folder, device), device, dtype=dtype)
    texts = {cache: Text(config, weights, device, cache) for cache in CACHES}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    kl: dict[str, list[torch.Tensor]] = {"bf16_fp8": [], "plain_bf16": []}
    costs: dict[str, list[torch.Tensor]] = {cache: [] for cache in CACHES}
    same: list[torch.Tensor] = []
    for ids in (ids[:LONGEST] for ids, _ in encode(tokenizer, talks)):
        logs = {cache: text.logs(ids) for cache, text in texts.items()}
        for pair, each in kl.items():
            one, other = (logs[cache] for cache in pair.split("_"))
            each.append((one.exp() * (one - other)).sum(-1))
        for cache, each in costs.items():
            each.append(-logs[cache][:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
        same.append(logs["bf16"].argmax(-1) == logs["fp8"].argmax(-1))
    metrics = {f"kl_{pair}": float(torch.cat(each).mean()) for pair, each in kl.items()}
    metrics["kl_bf16_fp8_p99"] = float(torch.cat(kl["bf16_fp8"]).quantile(0.99))
    metrics |= {f"cost_{cache}": float(torch.cat(each).mean()) for cache, each in costs.items()}
    metrics["same_first"] = float(torch.cat(same).float().mean())
    metrics["tokens"] = float(sum(len(each) for each in same))
    slices = needles(tokenizer, asked)
    for cache, text in texts.items():
        right = [
            (text.logs(ids).argmax(-1)[[at - 1 for at in spots]] == torch.tensor(ids)[spots])
            for ids, spots in slices
        ]
        metrics[f"found_{cache}"] = float(torch.cat(right).float().mean())
    metrics["needle_tokens"] = float(sum(len(spots) for _, spots in slices))
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description="the guide over an FP8 KV cache")
    parser.add_argument("--gguf", type=Path, default=GUIDE)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--needles", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        unpack(args.gguf, Path(folder))
        metrics = measure(
            Path(folder), held_out(args.count), args.needles, torch.device(args.device)
        )
    for name, value in metrics.items():
        print(f"{name:16} {value:.6g}")
    print(json.dumps({name: round(value, 7) for name, value in metrics.items()}))


if __name__ == "__main__":
    main()
