"""Opens a GGUF model: header, tokenizer, the plan of a load, and the load."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from localchat.backend_api.interface import (
    Embedder,
    LoadRequest,
    ModelInfo,
    Progress,
    Runner,
    Tokenizer,
)
from localchat.backend_api.media import LayoutStore, MediaPiece
from localchat.config.parameters import SAMPLERS
from localchat.errors import ModelInvalid, UsageError
from localchat.fit.hardware import read_machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan, demand, kv_types
from localchat.model_files.adapter import Adapter
from localchat.model_files.architecture import model_shape, pooling_of
from localchat.model_files.byte_source import digest_of
from localchat.model_files.gguf import SAMPLING_KEYS, Header
from localchat.model_files.open_gguf import read_header
from localchat.model_files.projector import Projector, find_projector
from localchat_llamacpp.adapters import open_adapters
from localchat_llamacpp.build_advice import as_built, devices
from localchat_llamacpp.embedder import load_embedder
from localchat_llamacpp.gpu_detection import add_gpus
from localchat_llamacpp.load import Target, load_runner, refuse_other_kinds
from localchat_llamacpp.media_api import has_media_library, media_library
from localchat_llamacpp.media_reader import MediaEncoder
from localchat_llamacpp.native import library
from localchat_llamacpp.native_model import load_vocabulary
from localchat_llamacpp.plan import memory_plan as planner
from localchat_llamacpp.tokenizer import TYPES, LlamaTokenizer

_SAMPLING = {
    **{f"general.sampling.{key}": key for key in SAMPLERS},
    **{f"general.sampling.{stored}": key for key, stored in SAMPLING_KEYS.items()},
}
"""Keys of a file's own sampling defaults, and our names for them."""


class GgufModel:
    """OpenModel over a GGUF file. Checks the header before native code sees the file."""

    def __init__(self, path: Path) -> None:
        """path: the file, or any part of a split one. Raises ModelMissing, ModelInvalid."""
        self.header = read_header(path, (TYPES,))
        self._first = self.header.parts[0]
        self.shape = model_shape(self.header)
        if not self.shape.vocabulary:
            raise ModelInvalid(
                f"{path} has no vocabulary: it is part of a model, such as an adapter or a vision encoder.",
                hint="Give the file of the language model itself.",
            )
        handle, log_lines = load_vocabulary(self._first)
        try:
            refuse_other_kinds(handle)
        except ModelInvalid:
            library().api.llama_model_free(handle)
            raise
        self._vocabulary = LlamaTokenizer(handle, log_lines, self.header.metadata)
        self.tokenizer: Tokenizer = self._vocabulary
        self.info = _info(self.header, self.tokenizer)
        self._adapters: tuple[Adapter, ...] = ()
        self._use_projector(find_projector(self.header))

    def _use_projector(self, projector: Projector | None) -> None:
        """Read attachments with a projector, or none."""
        if self.info.pooling or not has_media_library():
            projector = None
        self._media: MediaEncoder | None = None
        kinds: tuple[str, ...] = ()
        encoder = ""
        if projector is not None:
            self._media = MediaEncoder(projector)
            kinds = projector.kinds
            encoder = self._media.identity
        self.info = replace(self.info, media=kinds, encoder=encoder)

    def _use_adapters(self, options: LoadOptions) -> None:
        """Open the LoRA adapters of a load. Raises ModelMissing, ModelInvalid, UsageError."""
        if options.lora and self.info.pooling:
            raise UsageError(
                "LoRA adapters apply to models that generate text, and this one computes embeddings",
                hint="leave out --lora",
            )
        self._adapters = open_adapters(options.lora, self.header)
        identities = [adapter.identity() for adapter in self._adapters]
        scales = [adapter.scale for adapter in options.lora]
        self.info = replace(self.info, adapters=tuple(zip(identities, scales, strict=True)))

    def plan(self, options: LoadOptions) -> MemoryPlan:
        """Plan a load on this machine now. Raises DoesNotFit with advice, UsageError for impossible options."""
        if options.mmproj is not None:
            projector = find_projector(self.header, options.mmproj)
            if projector is not None and not self.info.pooling:
                media_library()  # its error says what is missing
            self._use_projector(projector)
        self._use_adapters(options)
        can_offload = bool(library().api.llama_supports_gpu_offload())
        machine = as_built(read_machine())
        if can_offload:
            machine = add_gpus(machine, devices)
        memory = planner.plan(self.shape, options, machine, can_offload=can_offload)
        return demand(memory, self.info.name)

    def load_embedder(
        self, request: LoadRequest, progress: Progress, notify: Callable[[str], None]
    ) -> Embedder:
        """See EmbeddingModel. Raises ModelInvalid, DoesNotFit, EngineClosed."""
        target = Target(
            path=self._first,
            total_bytes=self.header.file_bytes,
            kv_types=("f16",),
            threads=request.options.threads or read_machine().cores,
        )
        return load_embedder(target, self.info.pooling, request, progress)

    def text_tokens(self, text: str) -> list[int]:
        """See EmbeddingModel."""
        return self._vocabulary.encode_whole(text)

    def load(
        self, request: LoadRequest, progress: Progress, notify: Callable[[str], None]
    ) -> Runner:
        """Load the weights, create the context, warm up. Raises ModelInvalid, DoesNotFit, EngineClosed."""
        target = Target(
            path=self._first,
            total_bytes=self.header.file_bytes,
            kv_types=kv_types(self.shape),
            threads=request.options.threads or read_machine().cores,
            architecture=self.header.architecture,
            adapters=self._adapters,
        )
        return load_runner(target, request, progress, notify, self._media)

    def media_pieces(
        self, kind: str, data: bytes, name: str, *, salt: str, layouts: LayoutStore
    ) -> tuple[MediaPiece, ...]:
        """See MediaModel."""
        assert self._media is not None, "the model's information says that it reads no attachments"
        return self._media.pieces(kind, data, name, salt, layouts)

    def close(self) -> None:
        """Release the vocabulary. A loaded runner has its own. Idempotent."""
        self._vocabulary.close()


def _info(header: Header, vocabulary: Tokenizer) -> ModelInfo:
    template = header.metadata.get("tokenizer.chat_template")
    name = header.metadata.get("general.name")
    stated = ((ours, header.metadata.get(key)) for key, ours in _SAMPLING.items())
    with header.parts[0].open("rb") as file:
        head = file.read(header.data_offset)
    return ModelInfo(
        name=name if isinstance(name, str) and name.strip() else header.parts[0].stem,
        architecture=header.architecture,
        quantization=header.quantization,
        parameters=header.parameters,
        context_train=header.number("context_length"),
        vocab_size=vocabulary.vocab_size,
        file_bytes=header.file_bytes,
        chat_template=template if isinstance(template, str) else None,
        sampling=tuple((ours, float(v)) for ours, v in stated if isinstance(v, int | float)),
        identity=digest_of(head, header.parts),
        pooling=pooling_of(header),
    )
