"""The llama.cpp backend. Importing this module loads no library and no numpy."""

from collections.abc import Callable
from pathlib import Path

from localchat.backend_api.interface import (
    Availability,
    Backend,
    BuildInfo,
    OpenModel,
    Quantizer,
    Rebuilder,
    Remedy,
)
from localchat.errors import UsageError
from localchat.fit.hardware import Machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.fit.report import Kind
from localchat.fit.speed import Estimate
from localchat.model_files.architecture import DIFFUSION, ENCODERS, RANK
from localchat.model_files.checkpoint import Checkpoint, ModelSummary
from localchat.model_files.gguf import has_gguf_magic
from localchat_llamacpp.build_advice import (
    as_built,
    build_key,
    can_offload,
    knows_architecture,
    other_library,
    read_build,
    remedies,
)
from localchat_llamacpp.library_source import find_library

_NOT_GENERATIVE = frozenset(
    {
        *ENCODERS,
        *DIFFUSION,
        *("t5", "t5encoder", "wavtokenizer-dec"),
    }
)
"""Encoders and diffusion models, most of which `load.refuse_other_kinds` detects natively."""


class LlamaCppBackend(Backend):
    """Runs GGUF models on the CPU, and on GPUs that the library supports."""

    name = "llamacpp"
    kinds: tuple[Kind, ...] = ("gguf",)

    def build_key(self) -> str:
        """Return a key of the native library and this CPU. Empty without a library."""
        return build_key()

    def build_info(self) -> BuildInfo:
        """Return the build as `doctor` shows it. Loads the library (0.1 s)."""
        return read_build()

    def remedies(self) -> tuple[Remedy, ...]:
        """Return ways to a better build, best first. Loads the library."""
        return remedies(read_build())

    def rebuilder(self) -> Rebuilder:
        """Return the rebuilder of llama.cpp for this machine."""
        from localchat_llamacpp.rebuild import LlamaCppRebuilder

        return LlamaCppRebuilder()

    def quantizer(self) -> Quantizer:
        """Return ggml's quantizers."""
        from localchat_llamacpp.quantize import GgufQuantizer

        return GgufQuantizer()

    def available(self) -> Availability:
        """Find a llama.cpp library without loading it."""
        search = find_library()
        if search.library is None:
            reason = " ".join(search.passed_over) or "llama.cpp is not installed."
            return Availability(False, reason, search.hint)
        library = search.library
        return Availability(
            True,
            " ".join((f"{library.title}. {library.why}", *search.passed_over)),
            versions=((library.name, library.version),),
        )

    def accepts(self, path: Path) -> bool:
        """Return True if a file begins as GGUF, or is named so: then `open` explains what is wrong."""
        return path.suffix.lower() == ".gguf" or has_gguf_magic(path)

    def objection(self, model: ModelSummary) -> str:
        """Check that the library supports the architecture, and that the file is a plain model."""
        if isinstance(model, Checkpoint):
            return "llama.cpp runs GGUF files, and this is a safetensors checkpoint"
        name = model.architecture
        if not knows_architecture(name):
            other = other_library(name)
            instead = ""
            if other:
                instead = f"; --llamacpp-library {other} supports it"
            return f"this llama.cpp does not support its architecture, {name}{instead}"
        if model.images:
            return "it contains an image encoder in the same file, which llama.cpp expects apart"
        if not model.vocabulary:
            return "it has no vocabulary"
        if model.pooling == RANK:
            return "it is a reranker, which scores texts and writes none"
        if name in _NOT_GENERATIVE and not model.pooling:
            return f"it does not generate token by token ({name})"
        return ""

    def with_gpus(self, machine: Machine) -> Machine:
        """Return the machine with AMD's, Intel's and integrated GPUs that this build can use."""
        from localchat_llamacpp.gpu_detection import detect_gpus

        return detect_gpus(machine)

    def plan(self, model: ModelSummary, options: LoadOptions, machine: Machine) -> MemoryPlan:
        """Plan the memory of a load. Raises UsageError, also for a safetensors checkpoint."""
        from localchat_llamacpp.plan import memory_plan as planner

        if isinstance(model, Checkpoint):
            raise UsageError(f"{model.name}: {self.objection(model)}", hint="Take a GGUF of it.")
        return planner.plan(model, options, as_built(machine), can_offload=can_offload())

    def expected_rate(self, model: ModelSummary, plan: MemoryPlan, threads: int) -> Estimate | None:
        """Predict the rate from the bandwidths of RAM and GPUs."""
        from localchat.fit.hardware import read_machine
        from localchat_llamacpp.plan.speed import expected_rate

        if isinstance(model, Checkpoint) or model.pooling or not self.available().ok:
            return None
        return expected_rate(model, plan, read_machine(), threads)

    def open(self, path: Path, notify: Callable[[str], None]) -> OpenModel:
        """Check the header, then read the vocabulary. Raises ModelMissing, ModelInvalid.

        Takes 0.2 s for 152k tokens.
        """
        from localchat_llamacpp.model import GgufModel

        return GgufModel(path)
