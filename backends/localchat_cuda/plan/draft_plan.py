"""Plans the memory of a draft model or prediction head. Imports no torch."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from localchat.backend_api.drafter import unfit
from localchat.errors import ModelMissing
from localchat.model_files.checkpoint import weight_paths
from localchat.model_files.open_gguf import read_header
from localchat.model_files.safetensors import SafetensorsHeader, read_safetensors
from localchat_cuda.config import assistant, eagle
from localchat_cuda.config.assistant import AssistantConfig
from localchat_cuda.config.eagle import EagleConfig
from localchat_cuda.config.gguf import config_of, loaded_header, read_rope_factors, tokenizer_kind
from localchat_cuda.config.model import PAGE_TOKENS, ModelConfig, runtime_config
from localchat_cuda.config.reader import parse_config, read_config, read_raw

POOL_TOKENS = 16_384
"""Tokens in the drafter's cache for all texts together. Drafting needs only the end of a text."""
TEXT_TOKENS = 8192
"""Tokens of one text. When a text outgrows them, the drafter reads its last half again."""
STEP_TOKENS = 1024
GRAPH_BYTES = 150_000_000


class DraftShape(NamedTuple):
    """Config and headers of a draft model."""

    name: str
    config: ModelConfig
    headers: tuple[SafetensorsHeader, ...]
    eagle: EagleConfig | None = None
    """Config of an EAGLE-3 head, which is a model of one layer. None for other drafters."""
    assistant: AssistantConfig | None = None
    """Config of a Gemma 4 assistant. None for other drafters."""

    @property
    def kind(self) -> str:
        """Kind of drafter, for messages."""
        if self.eagle is not None:
            return "EAGLE-3 head"
        return "draft model" if self.assistant is None else "assistant"

    @property
    def reads_states(self) -> bool:
        """Whether it drafts from the model's states, and has no tokenizer of its own."""
        return self.eagle is not None or self.assistant is not None


def read_draft(file: str, model: ModelConfig, *, gpu: bool = True) -> DraftShape:
    """Read the draft model, EAGLE-3 head or assistant in a folder or GGUF file.

    Raises ModelMissing, ModelInvalid.
    """
    path = Path(file)
    headers: tuple[SafetensorsHeader, ...]
    if path.is_file():
        header = read_header(path)
        tokenizer_kind(header)
        config = parse_config(config_of(header, read_rope_factors(header)), path.name)
        headers = (loaded_header(header),)
    else:
        headers = tuple(read_safetensors(file_path) for file_path in weight_paths(path))
        raw = read_raw(path)
        if eagle.is_eagle(raw) or assistant.is_assistant(raw):
            return _reader_of_states(path.name, raw, headers, model)
        config = read_config(path)
    config, _ = runtime_config(config, gpu=gpu)
    if config.recurrent is not None:
        raise unfit(
            path.name,
            ": it keeps a running state, which cannot go back where a draft is rejected",
        )
    return DraftShape(path.name, config, headers)


def _reader_of_states(
    name: str, raw: Mapping[str, Any], headers: tuple[SafetensorsHeader, ...], model: ModelConfig
) -> DraftShape:
    """Read an EAGLE-3 head or an assistant, which runs in the type of its model."""
    if eagle.is_eagle(raw):
        config, head = eagle.parse_eagle(raw, name)
        shape = DraftShape(name, config, headers, eagle.fitted(head, config, model, name))
    else:
        config, settings = assistant.parse_assistant(raw, name)
        config, settings = assistant.fitted(settings, config, model, name)
        shape = DraftShape(name, config, headers, assistant=settings)
    if not headers:
        raise ModelMissing(
            f"{name} contains no safetensors file.",
            hint="Use one whose weights are stored as safetensors: others are not read.",
        )
    return shape._replace(config=replace(config, dtype=model.dtype))


def text_tokens(config: ModelConfig, context: int) -> int:
    """Return the tokens of one text that a drafter stores. context: of the model."""
    return max(1, min(TEXT_TOKENS, context, config.context_train))


def pool_tokens(config: ModelConfig, context: int) -> int:
    """Return the tokens of the drafter's cache, in whole pages."""
    pool = min(POOL_TOKENS, 2 * text_tokens(config, context))
    return -(-pool // PAGE_TOKENS) * PAGE_TOKENS
