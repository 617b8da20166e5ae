"""Compares perplexity on held-out conversations: bf16, the shipped quantization, AWQ, quantized KV.

    python scripts/tools/guide/perplexity.py --trained FOLDER [--gguf localchat/guide/guide.gguf]
    [--count 300]

FOLDER holds the fp16 weights that train.py wrote. All variants run through llama.cpp on the same
tokens; AWQ as its restored weights in F16. There are two values: over the guide's own tokens (answers),
and over all tokens. The last line is JSON.
"""

import argparse
import json
import math
import tempfile
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
from awq import quantize, restored
from checkpoint import GUIDE, read_gguf
from conversations import conversations, read_facts
from export import export, write_gguf
from llama_text import LlamaText
from tokenizers import Tokenizer
from tokens import encode

HELD_OUT_SEED: Final = 4711
LONGEST: Final = 2048


def held_out(tokenizer: str, count: int) -> list[tuple[list[int], list[int]]]:
    """`count` conversations of a seed that training did not use, as tokens and masks of the guide's own
    ones.
    """
    facts = read_facts(Path(__file__).with_name("facts.json"))
    talks = [talk for _, talk in islice(conversations(facts, HELD_OUT_SEED), count)]
    return [(i[:LONGEST], o[:LONGEST]) for i, o in encode(Tokenizer.from_str(tokenizer), talks)]


def perplexities(text: LlamaText, talks: list[tuple[list[int], list[int]]]) -> dict[str, float]:
    """exp of the mean negative log probability, over the guide's own tokens and over all."""
    every, own = [], []
    for ids, marks in talks:
        logs = text.logprobs(ids)
        every.append(logs)
        own.append(logs[np.array(marks[1:], bool)])
    return {
        "own": round(math.exp(-np.concatenate(own).mean()), 5),
        "all": round(math.exp(-np.concatenate(every).mean()), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="perplexity of the guide's forms")
    parser.add_argument("--trained", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, default=GUIDE)
    parser.add_argument("--count", type=int, default=300)
    args = parser.parse_args()
    _, tokenizer = read_gguf(args.gguf)
    talks = held_out(json.dumps(tokenizer), args.count)
    with tempfile.TemporaryDirectory() as folder:
        bf16, awq4 = Path(folder, "bf16.gguf"), Path(folder, "awq.gguf")
        export(args.trained, bf16, "BF16")
        weights, rounded, _ = quantize(args.gguf)
        weights |= {f"{name}.weight": restored(*parts).numpy() for name, parts in rounded.items()}
        write_gguf(weights, tokenizer, awq4, "F16")
        forms = {
            "bf16": (bf16, "f16"),
            "Q8_0": (args.gguf, "f16"),
            "Q8_0, KV q8_0": (args.gguf, "q8_0"),
            "Q8_0, KV q4_0": (args.gguf, "q4_0"),
            "AWQ": (awq4, "f16"),
        }
        result = {
            name: perplexities(LlamaText(path, kv_type=kv), talks)
            for name, (path, kv) in forms.items()
        }
    print(f"{len(talks)} conversations, {sum(len(i) for i, _ in talks):,} tokens")
    for name, value in result.items():
        print(f"{name:15} own {value['own']:.5f}  all {value['all']:.4f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
