"""Writes the guide as a Hugging Face folder with safetensors, dequantized from the GGUF.

    python scripts/tools/guide/checkpoint.py FOLDER [--gguf localchat/guide/guide.gguf]

In fp32 a Q8_0 weight (8 bits times an fp16 scale) is exact, so both backends compute the same model.
"""

import argparse
import json
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from export import shape_of
from model import gguf_name
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokens import END_OF_TEXT, PAD, QWEN2_SPLIT, SPECIAL, TEMPLATE, TURN_END

Weights = dict[str, NDArray[np.float32]]
GUIDE: Final = Path(__file__).resolve().parents[3] / "localchat" / "guide" / "guide.gguf"
LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip


def hub_name(name: str) -> str:
    """The transformers name of one of our parameters."""
    parts = name.split(".")
    if parts[0] == "blocks":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
    return {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}[
        name
    ]


def read_gguf(path: Path) -> tuple[Weights, dict[str, Any]]:
    """The dequantized parameters under our names, and the tokenizer as tokenizer.json."""
    reader = gguf.GGUFReader(path)
    theirs = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    layers = int(reader.fields["qwen2.block_count"].contents())
    names = ["embedding.weight", "norm.weight"]
    for i in range(layers):
        for part in LAYER_NAMES:
            names += [f"blocks.{i}.{part}.weight"]
            names += [f"blocks.{i}.{part}.bias"] if part in "qkv" else []
    weights = {name: np.array(theirs[gguf_name(name)], np.float32) for name in names}
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = [m.split(" ") for m in reader.fields["tokenizer.ggml.merges"].contents()]
    return weights, tokenizer_json(tokens, merges)


def tokenizer_json(tokens: list[str], merges: list[list[str]]) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE with the pre-tokenizer of Qwen2."""
    special = [
        {"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for i, t in enumerate(tokens) if t in SPECIAL
    ]  # fmt: skip
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    split = {
        "type": "Split",
        "pattern": {"Regex": QWEN2_SPLIT},
        "behavior": "Isolated",
        "invert": False,
    }
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {t: i for i, t in enumerate(tokens)}, "merges": merges,
        },
    }  # fmt: skip


def config(weights: Weights, dtype: str) -> dict[str, Any]:
    """config.json of the architecture Qwen2ForCausalLM."""
    s = shape_of(weights)
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": s.vocabulary,
        "hidden_size": s.width, "num_hidden_layers": s.layers, "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads, "intermediate_size": s.inner, "hidden_act": "silu",
        "max_position_embeddings": s.context, "rope_theta": s.rope_base, "rms_norm_eps": s.norm_eps,
        "tie_word_embeddings": True, "use_sliding_window": False, "torch_dtype": dtype,
        "bos_token_id": END_OF_TEXT, "eos_token_id": TURN_END, "pad_token_id": PAD,
    }  # fmt: skip


def write_folder(
    folder: Path,
    tensors: dict[str, NDArray[Any]],
    settings: dict[str, Any],
    tokenizer: dict[str, Any],
) -> None:
    """model.safetensors with its config, tokenizer and template."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    files = {
        "config.json": settings,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE,
            "add_bos_token": False,
            "eos_token": SPECIAL[TURN_END], "pad_token": SPECIAL[PAD], "model_max_length": 4096,
            "clean_up_tokenization_spaces": False,
        },
        "generation_config.json": {"eos_token_id": [TURN_END, END_OF_TEXT], "pad_token_id": PAD},
    }  # fmt: skip
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="write the guide as safetensors")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path, default=GUIDE)
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32")
    args = parser.parse_args()
    weights, tokenizer = read_gguf(args.gguf)
    tensors = {hub_name(k): v.astype(args.dtype) for k, v in weights.items()}
    write_folder(args.folder, tensors, config(weights, args.dtype), tokenizer)
    print(f"{args.folder}: {sum(t.nbytes for t in tensors.values()):,} bytes")


if __name__ == "__main__":
    main()
