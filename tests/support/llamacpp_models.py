"""Tiny random GGUF files, written on the spot: a few hundred kilobytes, float weights, a made-up byte-level
vocabulary. Their logits are spread wide (a standard deviation of a few units), so that the best token is
not a matter of rounding."""

from pathlib import Path
from typing import Literal

import numpy as np
from gguf import GGUFWriter, PoolingType, TokenType
from numpy.typing import NDArray

EMBED, LAYERS, HEADS, KV_HEADS, FEED = 64, 2, 2, 1, 128
HEAD = 32
WINDOW = 32
TRAINED = 4096
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld"]
CONTROL = ["<|begin|>", "<|im_end|>", "<|fim_prefix|>"]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def byte_letters() -> list[str]:
    """The printable letters by which byte-level vocabularies write the 256 bytes, in the order of bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    others = [byte for byte in range(256) if byte not in letters]
    letters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def vocabulary() -> list[str]:
    """All tokens in the order of their ids: bytes, merges, control tokens."""
    return [*byte_letters(), *(merge.replace(" ", "") for merge in MERGES), *CONTROL]


VOCAB = len(vocabulary())
BEGIN, END = VOCAB - 3, VOCAB - 2


class ModelWriter:
    """A GGUF file of EMBED channels with the made-up vocabulary."""

    def __init__(self, path: Path, architecture: str, *, seed: int, layers: int = LAYERS) -> None:
        self.gguf = GGUFWriter(path, architecture)
        self.random = np.random.default_rng(seed)
        self.gguf.add_name(f"tiny-{architecture}")
        self.gguf.add_context_length(TRAINED)
        self.gguf.add_embedding_length(EMBED)
        self.gguf.add_block_count(layers)
        self.gguf.add_feed_forward_length(FEED)
        self.gguf.add_file_type(0)
        self.gguf.add_layer_norm_rms_eps(1e-6)
        tokens = vocabulary()
        kinds = [TokenType.NORMAL] * (VOCAB - len(CONTROL)) + [TokenType.CONTROL] * len(CONTROL)
        self.gguf.add_tokenizer_model("gpt2")
        self.gguf.add_tokenizer_pre("qwen2")
        self.gguf.add_token_list(tokens)
        self.gguf.add_token_types(kinds)
        self.gguf.add_token_merges(MERGES)
        self.gguf.add_bos_token_id(BEGIN)
        self.gguf.add_eos_token_id(END)
        self.gguf.add_add_bos_token(True)
        self.gguf.add_chat_template(TEMPLATE)

    def random_matrix(self, name: str, *shape: int, scale: float = 0.2) -> None:
        self.tensor(name, self.random.normal(0, scale, shape))

    def ones(self, name: str, size: int) -> None:
        self.tensor(name, np.ones(size))

    def tensor(self, name: str, values: NDArray[np.float64]) -> None:
        self.gguf.add_tensor(name, values.astype(np.float32))

    def finish(self) -> None:
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_tensors_to_file()
        self.gguf.close()


def write_llama(path: Path, *, seed: int = 1) -> Path:
    """Plain attention with grouped heads."""
    w = ModelWriter(path, "llama", seed=seed)
    w.gguf.add_head_count(HEADS)
    w.gguf.add_head_count_kv(KV_HEADS)
    w.gguf.add_rope_dimension_count(HEAD)
    w.random_matrix("token_embd.weight", VOCAB, EMBED, scale=1.0)
    w.random_matrix("output.weight", VOCAB, EMBED, scale=0.5)
    w.ones("output_norm.weight", EMBED)
    for layer in range(LAYERS):
        _attention_and_feed(w, f"blk.{layer}.")
    w.finish()
    return path


CYCLE = "abcdefghijklmnopqrstuvwxyz 0123456789.,;:!?"
PEAK = 0.13
"""Scale of the logits of write_chain: the next character of CYCLE has 0.9, the rest something."""


def write_chain(path: Path, *, seed: int = 6) -> Path:
    """A model whose text mostly follows CYCLE, for which peaked logits are wanted: the output row of each
    character's successor is that character's own embedding, and the layers change little."""
    w = ModelWriter(path, "llama", seed=seed)
    w.gguf.add_head_count(HEADS)
    w.gguf.add_head_count_kv(KV_HEADS)
    w.gguf.add_rope_dimension_count(HEAD)
    embedding = w.random.normal(0, 1, (VOCAB, EMBED))
    letters = byte_letters()
    ids = [vocabulary().index(letters[ord(character)]) for character in CYCLE]
    successor = np.arange(VOCAB)
    successor[ids] = np.roll(ids, -1)
    output = np.empty_like(embedding)
    output[successor] = embedding
    w.tensor("token_embd.weight", embedding)
    w.tensor("output.weight", output * PEAK)
    w.ones("output_norm.weight", EMBED)
    for layer in range(LAYERS):
        _attention_and_feed(w, f"blk.{layer}.", scale=0.06)
    w.finish()
    return path


def write_gemma3(path: Path, *, seed: int = 2) -> Path:
    """Sliding window of WINDOW tokens in five of six layers."""
    w = ModelWriter(path, "gemma3", seed=seed, layers=6)
    w.gguf.add_head_count(HEADS)
    w.gguf.add_head_count_kv(KV_HEADS)
    w.gguf.add_key_length(HEAD)
    w.gguf.add_value_length(HEAD)
    w.gguf.add_sliding_window(WINDOW)
    w.random_matrix("token_embd.weight", VOCAB, EMBED, scale=0.4)
    w.ones("output_norm.weight", EMBED)
    for layer in range(6):
        block = f"blk.{layer}."
        _attention_and_feed(w, block)
        w.ones(block + "attn_q_norm.weight", HEAD)
        w.ones(block + "attn_k_norm.weight", HEAD)
        w.ones(block + "post_attention_norm.weight", EMBED)
        w.ones(block + "post_ffw_norm.weight", EMBED)
    w.finish()
    return path


def write_mamba(path: Path, *, seed: int = 3) -> Path:
    """A recurrent state and no attention."""
    inner, state, rank, width = 2 * EMBED, 16, 4, 4
    w = ModelWriter(path, "mamba", seed=seed)
    w.gguf.add_ssm_conv_kernel(width)
    w.gguf.add_ssm_inner_size(inner)
    w.gguf.add_ssm_state_size(state)
    w.gguf.add_ssm_time_step_rank(rank)
    w.random_matrix("token_embd.weight", VOCAB, EMBED, scale=1.0)
    w.random_matrix("output.weight", VOCAB, EMBED, scale=0.5)
    w.ones("output_norm.weight", EMBED)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        w.ones(block + "attn_norm.weight", EMBED)
        w.random_matrix(block + "ssm_in.weight", 2 * inner, EMBED)
        w.random_matrix(block + "ssm_conv1d.weight", inner, width)
        w.random_matrix(block + "ssm_conv1d.bias", inner)
        w.random_matrix(block + "ssm_x.weight", rank + 2 * state, inner)
        w.random_matrix(block + "ssm_dt.weight", inner, rank)
        w.random_matrix(block + "ssm_dt.bias", inner)
        w.tensor(block + "ssm_a", -np.tile(np.arange(1.0, state + 1), (inner, 1)))
        w.ones(block + "ssm_d", inner)
        w.random_matrix(block + "ssm_out.weight", EMBED, inner)
    w.finish()
    return path


def write_bert(
    path: Path, *, seed: int = 4, pooling: PoolingType | None = PoolingType.MEAN
) -> Path:
    """An encoder: it makes embeddings and has no cache. Its texts end with END too."""
    w = ModelWriter(path, "bert", seed=seed, layers=1)
    w.gguf.add_add_eos_token(True)
    w.gguf.add_head_count(HEADS)
    w.gguf.add_layer_norm_eps(1e-6)
    w.gguf.add_causal_attention(False)
    w.gguf.add_token_type_count(2)
    if pooling is not None:
        w.gguf.add_pooling_type(pooling)
    w.random_matrix("token_embd.weight", VOCAB, EMBED)
    w.random_matrix("position_embd.weight", TRAINED, EMBED)
    w.random_matrix("token_types.weight", 2, EMBED)
    for name, rows, columns in [
        ("attn_q", EMBED, EMBED),
        ("attn_k", EMBED, EMBED),
        ("attn_v", EMBED, EMBED),
        ("attn_output", EMBED, EMBED),
        ("ffn_up", FEED, EMBED),
        ("ffn_down", EMBED, FEED),
    ]:
        w.random_matrix(f"blk.0.{name}.weight", rows, columns)
        w.random_matrix(f"blk.0.{name}.bias", rows)
    for norm in ("token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"):
        w.ones(norm + ".weight", EMBED)
        w.random_matrix(norm + ".bias", EMBED)
    if pooling is PoolingType.RANK:
        w.random_matrix("cls.weight", EMBED, EMBED)
        w.random_matrix("cls.bias", EMBED)
        w.random_matrix("cls.output.weight", 1, EMBED)
        w.random_matrix("cls.output.bias", 1)
    w.finish()
    return path


def write_qwen3_embedding(path: Path, *, seed: int = 7) -> Path:
    """A decoder whose last token is the embedding, as Qwen3-Embedding's; with a norm on queries and keys."""
    w = ModelWriter(path, "qwen3", seed=seed)
    w.gguf.add_head_count(HEADS)
    w.gguf.add_head_count_kv(KV_HEADS)
    w.gguf.add_key_length(HEAD)
    w.gguf.add_value_length(HEAD)
    w.gguf.add_rope_freq_base(10_000.0)
    w.gguf.add_pooling_type(PoolingType.LAST)
    w.gguf.add_add_eos_token(True)
    w.random_matrix("token_embd.weight", VOCAB, EMBED, scale=1.0)
    w.random_matrix("output_norm.weight", EMBED, scale=1.0)
    for layer in range(LAYERS):
        _attention_and_feed(w, f"blk.{layer}.")
        w.ones(f"blk.{layer}.attn_q_norm.weight", HEAD)
        w.ones(f"blk.{layer}.attn_k_norm.weight", HEAD)
    w.finish()
    return path


def write_experts(path: Path, *, seed: int = 8) -> Path:
    """A mixture of eight experts, two a token, as Qwen3's."""
    w = ModelWriter(path, "qwen3moe", seed=seed)
    w.gguf.add_head_count(HEADS)
    w.gguf.add_head_count_kv(KV_HEADS)
    w.gguf.add_key_length(HEAD)
    w.gguf.add_value_length(HEAD)
    w.gguf.add_expert_count(8)
    w.gguf.add_expert_used_count(2)
    w.gguf.add_expert_feed_forward_length(EMBED)
    w.random_matrix("token_embd.weight", VOCAB, EMBED, scale=1.0)
    w.random_matrix("output.weight", VOCAB, EMBED, scale=0.5)
    w.ones("output_norm.weight", EMBED)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        w.ones(block + "attn_norm.weight", EMBED)
        w.ones(block + "ffn_norm.weight", EMBED)
        write_attention(w, block, scale=0.2)
        w.ones(block + "attn_q_norm.weight", HEAD)
        w.ones(block + "attn_k_norm.weight", HEAD)
        w.random_matrix(block + "ffn_gate_inp.weight", 8, EMBED, scale=1.0)
        for name in ("gate", "up", "down"):
            w.random_matrix(f"{block}ffn_{name}_exps.weight", 8, EMBED, EMBED)
    w.finish()
    return path


def write_glm4moe(path: Path, *, seed: int = 15, head: Literal["random", "exact"]) -> Path:
    """Layers of eight experts, and a prediction head as write_qwen35 has it in a model without a state."""
    scale = 0.02 if head == "exact" else 0.2
    w = ModelWriter(path, "glm4moe", seed=seed, layers=LAYERS + 1)
    w.gguf.add_head_count(HEADS)
    w.gguf.add_head_count_kv(KV_HEADS)
    w.gguf.add_key_length(HEAD)
    w.gguf.add_value_length(HEAD)
    w.gguf.add_rope_dimension_count(HEAD)
    w.gguf.add_expert_count(8)
    w.gguf.add_expert_used_count(2)
    w.gguf.add_expert_shared_count(1)
    w.gguf.add_expert_weights_scale(1.0)
    w.gguf.add_expert_weights_norm(True)
    w.gguf.add_expert_feed_forward_length(EMBED)
    write_successors(w)
    w.ones("output_norm.weight", EMBED)
    write_head(w, f"blk.{LAYERS}.nextn.", random=head == "random")
    for layer in range(LAYERS + 1):
        block = f"blk.{layer}."
        w.ones(block + "attn_norm.weight", EMBED)
        w.ones(block + "post_attention_norm.weight", EMBED)
        write_attention(w, block, scale=scale)
        w.random_matrix(block + "ffn_gate_inp.weight", 8, EMBED, scale=1.0)
        w.random_matrix(block + "exp_probs_b.bias", 8)
        for name in ("gate", "up", "down"):
            w.random_matrix(f"{block}ffn_{name}_exps.weight", 8, EMBED, EMBED, scale=scale)
            w.random_matrix(f"{block}ffn_{name}_shexp.weight", EMBED, EMBED, scale=scale)
    w.finish()
    return path


def write_successors(w: ModelWriter) -> None:
    """Embedding and output of a model whose likeliest next token has the number before the last one's."""
    embedding = w.random.normal(0, 1, (VOCAB, EMBED))
    w.tensor("token_embd.weight", embedding)
    w.tensor("output.weight", np.roll(embedding, 1, 0) * PEAK)


def write_head(w: ModelWriter, block: str, *, random: bool) -> None:
    """The tensors that join a token's embedding and the state before it."""
    w.gguf.add_nextn_predict_layers(1)
    w.ones(block + "enorm.weight", EMBED)
    w.ones(block + "hnorm.weight", EMBED)
    if random:
        w.random_matrix(block + "eh_proj.weight", EMBED, 2 * EMBED)
    else:
        w.tensor(block + "eh_proj.weight", np.hstack([np.eye(EMBED), np.zeros((EMBED, EMBED))]))


def _attention_and_feed(w: ModelWriter, block: str, *, scale: float = 0.2) -> None:
    w.ones(block + "attn_norm.weight", EMBED)
    w.ones(block + "ffn_norm.weight", EMBED)
    write_attention(w, block, scale=scale)
    write_feed(w, block, scale=scale)


def write_attention(w: ModelWriter, block: str, *, scale: float, gated: bool = False) -> None:
    """The matrices of one layer's attention. gated: each head's queries come with a gate."""
    queries = HEADS * HEAD * (2 if gated else 1)
    w.random_matrix(block + "attn_q.weight", queries, EMBED, scale=scale)
    w.random_matrix(block + "attn_k.weight", KV_HEADS * HEAD, EMBED, scale=scale)
    w.random_matrix(block + "attn_v.weight", KV_HEADS * HEAD, EMBED, scale=scale)
    w.random_matrix(block + "attn_output.weight", EMBED, HEADS * HEAD, scale=scale)


def write_feed(w: ModelWriter, block: str, *, scale: float) -> None:
    """The matrices of one layer's feed-forward block."""
    w.random_matrix(block + "ffn_gate.weight", FEED, EMBED, scale=scale)
    w.random_matrix(block + "ffn_up.weight", FEED, EMBED, scale=scale)
    w.random_matrix(block + "ffn_down.weight", EMBED, FEED, scale=scale)
