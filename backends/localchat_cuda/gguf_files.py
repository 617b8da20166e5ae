"""Opens a GGUF file as a checkpoint: config, tokenizer, template and the sizes of its tensors."""

from pathlib import Path
from typing import NamedTuple

from localchat.model_files.byte_source import digest_of
from localchat.model_files.gguf import SAMPLING_KEYS
from localchat.model_files.open_gguf import read_header
from localchat.model_files.safetensors import SafetensorsHeader
from localchat_cuda.config.gguf import config_of, loaded_header, read_rope_factors
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.config.reader import parse_config
from localchat_cuda.gguf_tokenizer import ARRAYS, tokenizer_files
from localchat_cuda.tokenizer import TokenizerFiles


class OpenedFiles(NamedTuple):
    """Data of a model that is read before its weights."""

    name: str
    config: ModelConfig
    headers: tuple[SafetensorsHeader, ...]
    """Headers of the weights. Those of a GGUF file describe the tensors once loaded."""
    tokenizer: TokenizerFiles
    template: str | None
    sampling: tuple[tuple[str, float], ...]
    identity: str


def open_gguf(path: Path) -> OpenedFiles:
    """Read a GGUF file, or all parts of a split one. Raises ModelMissing, ModelInvalid."""
    header = read_header(path, ARRAYS)
    raw = config_of(header, read_rope_factors(header))
    template = header.metadata.get("tokenizer.chat_template")
    metadata = repr(sorted((key, str(value)[:4096]) for key, value in header.metadata.items()))
    sampling = (
        (name, header.metadata.get(f"general.sampling.{stored_name}"))
        for name, stored_name in SAMPLING_KEYS.items()
    )
    return OpenedFiles(
        path.stem,
        parse_config(raw, header.name),
        (loaded_header(header),),
        tokenizer_files(header),
        template if isinstance(template, str) else None,
        tuple((name, float(value)) for name, value in sampling if isinstance(value, int | float)),
        digest_of(metadata.encode(), header.parts),
    )
