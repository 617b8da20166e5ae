"""GGUF files of hybrids: log probabilities as transformers' in fp32, and as llama.cpp's on the same file."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from localchat_cuda import gguf_files
from localchat_cuda.backend import ReferenceBackend
from localchat_cuda.config.gguf import config_of
from localchat_llamacpp import LlamaCppBackend
from tests.localchat_cuda.test_gguf_models import TOKENS, logprobs
from tests.support import tiny_models
from tests.support.gguf_hybrids import write_hybrid
from tests.support.llamacpp_models import VOCAB

HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "nemotron_h": ("nemotron-h", {}),
    # llama.cpp expects states of twice the hidden columns, and one group of them.
    "granitehybrid": (
        "granite4-h",
        {
            "mamba_n_heads": 8,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
            "position_embedding_type": "rope",
        },
    ),
}


@pytest.mark.parametrize("form", ["F32", "Q8_0"])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_hybrid_is_as_sure_of_each_token_as_elsewhere(
    architecture: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, changed = HYBRIDS[architecture]
    model = tiny_models.reference(kind, vocab_size=VOCAB, hidden_size=128, **changed)
    number_form = gguf.GGMLQuantizationType[form]
    path = write_hybrid(model, architecture, tmp_path / "tiny.gguf", number_form)
    # The engine would round to bf16, which hides small mistakes.
    monkeypatch.setattr(
        gguf_files, "config_of", lambda *args: {**config_of(*args), "torch_dtype": "float32"}
    )
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    exact = [float(logits[at, token]) for at, token in enumerate(TOKENS[1:])]
    ours = logprobs(path, ReferenceBackend())
    theirs = logprobs(path, LlamaCppBackend())
    assert np.std(exact) > 0.2
    # 8 bits differ from fp32, and llama.cpp also rounds activations to them.
    limit = 0.005
    if form != "F32":
        limit = 0.3
    assert np.abs(np.subtract(ours, exact)).max() < limit
    assert np.abs(np.subtract(theirs, exact)).max() < max(limit, 0.05)
