"""Embeddings and token ids of all-MiniLM-L6-v2 as a GGUF file, against transformers."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localchat.model_files.open_gguf import read_header
from localchat_llamacpp.native_model import load_vocabulary
from localchat_llamacpp.tokenizer import LlamaTokenizer
from tests.real.conftest import MINILM, OpenEngine, model_path
from tests.support.bert_files import write_bert_checkpoint
from tests.support.many_scripts import SAMPLES, lines

CLOSE = 0.999


@pytest.fixture(scope="module")
def minilm_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert_checkpoint(
        model_path(MINILM), tmp_path_factory.mktemp("bert") / "minilm.gguf"
    )


@pytest.fixture(scope="module")
def tokenizer(minilm_gguf: Path) -> Iterator[LlamaTokenizer]:
    metadata = read_header(minilm_gguf).metadata
    with closing(LlamaTokenizer(*load_vocabulary(minilm_gguf), metadata)) as found:
        yield found


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path(MINILM), local_files_only=True)


def test_ids_are_those_of_the_models_own_tokenizer(
    tokenizer: LlamaTokenizer, reference: Any
) -> None:
    for line in lines(2000):
        assert tokenizer.encode_whole(line) == reference.encode(line), ascii(line)


def test_special_tokens_count_only_where_they_are_asked_for(
    tokenizer: LlamaTokenizer, reference: Any
) -> None:
    text = "one [SEP] two"
    assert tokenizer.encode(text, special=True) == reference.encode(text, add_special_tokens=False)
    assert reference.sep_token_id not in tokenizer.encode(text)


def test_vectors_are_those_of_transformers(
    minilm_gguf: Path, open_engine: OpenEngine, reference: Any
) -> None:
    texts = list(SAMPLES.values())
    vectors = open_engine(minilm_gguf, context_tokens=512).embed(texts)
    for script, vector, expected in zip(SAMPLES, vectors, _embed(texts, reference), strict=True):
        cosine = float(np.dot(vector, expected) / np.linalg.norm(vector))
        assert cosine > CLOSE, script


def _embed(texts: list[str], tokenizer: Any) -> list[Any]:
    """Return normalized means over the last hidden states."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(model_path(MINILM), local_files_only=True).eval()
    vectors = []
    for text in texts:
        with torch.inference_mode():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        mean = hidden.double().mean(0)
        vectors.append((mean / mean.norm()).numpy())
    return vectors
