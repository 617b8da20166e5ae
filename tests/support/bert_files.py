"""BERT checkpoints of a folder, written as the GGUF files that llama.cpp's converter makes of them."""

import json
import re
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, PoolingType, TokenType

_PARTS = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_EMBEDDINGS = {
    "word_embeddings": "token_embd",
    "position_embeddings": "position_embd",
    "token_type_embeddings": "token_types",
    "LayerNorm": "token_embd_norm",
}


def write_bert_checkpoint(folder: Path, path: Path) -> Path:
    """Write the weights and the vocabulary of a folder to a GGUF file, in float32."""
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(path, "bert")
    writer.add_name(folder.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(PoolingType.MEAN)
    writer.add_file_type(0)
    _add_vocabulary(writer, folder)
    for name, tensor in load_file(folder / "model.safetensors").items():
        gguf_name = _tensor_name(name)
        if gguf_name is not None:
            writer.add_tensor(gguf_name, tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: GGUFWriter, folder: Path) -> None:
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    special = [word for word in words if re.fullmatch(r"\[[A-Z]+\]", word)]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([_piece(word) for word in words])
    writer.add_token_types(
        [TokenType.CONTROL if word in special else TokenType.NORMAL for word in words]
    )
    writer.add_token_type_count(2)
    writer.add_unk_token_id(vocabulary["[UNK]"])
    writer.add_bos_token_id(vocabulary["[CLS]"])
    writer.add_sep_token_id(vocabulary["[SEP]"])
    writer.add_pad_token_id(vocabulary["[PAD]"])
    writer.add_mask_token_id(vocabulary["[MASK]"])


def _piece(word: str) -> str:
    """Return a word as GGUF files write it: marked where it begins a word, not where it goes on."""
    if word.startswith("[") and word.endswith("]"):
        return word
    return word[2:] if word.startswith("##") else f"\u2581{word}"


def _tensor_name(name: str) -> str | None:
    found = re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)\.(weight|bias)", name)
    if found:
        return f"blk.{found[1]}.{_PARTS[found[2]]}.{found[3]}"
    found = re.fullmatch(r"embeddings\.(\w+)\.(weight|bias)", name)
    return f"{_EMBEDDINGS[found[1]]}.{found[2]}" if found else None
