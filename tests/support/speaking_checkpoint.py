"""A tiny checkpoint folder that speaks: a byte-level vocabulary, a template, and only printable letters."""

import json
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support import tiny_models

CONTEXT = 2048
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"


def write_speaking(folder: Path) -> Path:
    """The folder. Random weights; one hidden feature is constant, and through it the head forbids every token
    that is no letter."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "add_bos_token": False, "chat_template": TEMPLATE})
    )
    size = made.get_vocab_size()
    config = transformers.Qwen3Config(
        **{
            **tiny_models.SHAPE,
            "vocab_size": size,
            "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": False,
            "eos_token_id": size - 1,
        }
    )
    torch.manual_seed(4)
    model = transformers.Qwen3ForCausalLM(config).eval()
    spoken = {letter for letter in letters if letter.isascii() and letter.isprintable()}
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 3.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        for token in range(size):
            known = made.id_to_token(token) in spoken
            model.lm_head.weight[token, 0] = 0.0 if known else -100.0
    tiny_models.save(model, folder)
    return folder
