"""Which models make vectors of whole texts instead of writing on, and how, by their headers alone."""

from typing import Final

from localchat.fit.gguf_header import Header

ENCODERS: Final = frozenset(
    {
        *("bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2"),
        *("jina-bert-v3", "eurobert", "gemma-embedding"),
    }
)
"""Architectures that keep no cache: every token sees the whole text."""
DIFFUSION: Final = frozenset({"dream", "llada", "llada-moe", "rnd1"})
"""Architectures whose tokens see the whole text too, and that write it in many passes."""
POOLING_NUMBERS: Final = {"mean": 1, "cls": 2, "last": 3}
"""llama.cpp's numbers. A file that names none is pooled by the mean, as its users do."""
_NAMES: Final = {number: name for name, number in POOLING_NUMBERS.items()}
_RANK: Final = 4


def pooling_of(header: Header) -> str:
    """`mean`, `cls` or `last`; empty for a model that gives no embeddings. 0 stands for no pooling: llama.cpp's
    own tools write it into every model that they save, so it makes no embedding model of one that writes."""
    name = header.architecture
    sees_all = header.metadata.get(f"{name}.attention.causal") is False and name not in DIFFUSION
    embeds = sees_all or name in ENCODERS or name == "llama-embed"
    stated = header.metadata.get(f"{name}.pooling_type")
    if not isinstance(stated, int) or isinstance(stated, bool) or stated == 0:
        return "mean" if embeds else ""
    return _NAMES.get(stated, "")


def ranks(header: Header) -> bool:
    """Whether it scores pairs of texts (a reranker)."""
    return header.metadata.get(f"{header.architecture}.pooling_type") == _RANK
