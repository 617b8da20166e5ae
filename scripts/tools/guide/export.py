"""Writes the trained weights as GGUF (architecture qwen2), with tokenizer, template and license.

python scripts/tools/guide/export.py FOLDER [OUT.gguf] [--type Q8_0|BF16|F16]
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from model import Shape, gguf_name
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokens import END_OF_TEXT, MIDDLE, PAD, PREFIX, SPECIAL, SUFFIX, TEMPLATE, TURN_END

TYPES: Final = {
    "Q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "BF16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "F16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
}


def read_weights(folder: Path) -> dict[str, NDArray[np.float32]]:
    """Read the parameters that train.py wrote, in fp32."""
    weights: dict[str, NDArray[np.float32]] = {}
    for part in ("weights-1.safetensors", "weights-2.safetensors"):
        weights |= {k: v.astype(np.float32) for k, v in load_file(folder / part).items()}
    return weights


def shape_of(weights: dict[str, NDArray[np.float32]]) -> Shape:
    """The dimensions, derived from the weights."""
    default = Shape()
    vocabulary, width = weights["embedding.weight"].shape
    return Shape(
        vocabulary=vocabulary,
        width=width,
        layers=sum(name.endswith("attn_norm.weight") for name in weights),
        heads=weights["blocks.0.q.weight"].shape[0] // default.head_dim,
        kv_heads=weights["blocks.0.k.weight"].shape[0] // default.head_dim,
        inner=weights["blocks.0.gate.weight"].shape[0],
    )


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any]) -> None:
    """Add vocabulary, merges, special tokens and template."""
    vocabulary = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [gguf.TokenType.CONTROL if t in SPECIAL else gguf.TokenType.NORMAL for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(TURN_END)
    writer.add_bos_token_id(END_OF_TEXT)
    writer.add_pad_token_id(PAD)
    writer.add_eot_token_id(TURN_END)
    writer.add_add_bos_token(False)
    writer.add_uint32("tokenizer.ggml.fim_pre_token_id", PREFIX)
    writer.add_uint32("tokenizer.ggml.fim_suf_token_id", SUFFIX)
    writer.add_uint32("tokenizer.ggml.fim_mid_token_id", MIDDLE)
    writer.add_chat_template(TEMPLATE)


def export(folder: Path, out: Path, kind: str) -> None:
    """Write the GGUF of one training run."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    write_gguf(read_weights(folder), tokenizer, out, kind)


def write_gguf(
    weights: dict[str, NDArray[np.float32]],
    tokenizer: dict[str, Any],
    out: Path,
    kind: str,
    **sizes: Any,
) -> None:
    """Write a GGUF of these parameters; matrices in `kind`, norms and biases in F32. `sizes`: of the shape
    where they are not the guide's and no weight tells them.
    """
    shape = replace(shape_of(weights), **sizes)
    matrix, file_type = TYPES[kind]
    writer = gguf.GGUFWriter(out, "qwen2")
    writer.add_name("localchat guide")
    writer.add_author("the localchat project")
    writer.add_license("apache-2.0")
    writer.add_description(
        "The small built-in guide of localchat: knows localchat and the basics of local inference."
    )
    writer.add_file_type(file_type)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_float32("general.sampling.temp", 0.0)  # facts are not a matter of chance
    add_tokenizer(writer, tokenizer)
    for name, value in weights.items():
        if value.ndim == 2:
            writer.add_tensor(
                gguf_name(name), gguf.quants.quantize(value, matrix), raw_dtype=matrix
            )
        else:
            writer.add_tensor(gguf_name(name), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="write the guide's GGUF")
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--type", choices=sorted(TYPES), default="Q8_0")
    args = parser.parse_args()
    out = args.out or args.folder / "guide.gguf"
    export(args.folder, out, args.type)
    print(f"{out}: {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
