"""An opened checkpoint folder or GGUF file: its config, tokenizer, memory plan and load."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from localchat.backend_api.drafter import shared_vocabulary
from localchat.backend_api.interface import LoadRequest, ModelInfo, Progress, Runner, Tokenizer
from localchat.errors import LocalchatError, ModelMissing
from localchat.fit.hardware import Gpu, read_gpus, read_machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan, demand
from localchat.model_files.byte_source import digest_of
from localchat.model_files.chat_templates import DEFAULT, chat_templates
from localchat.model_files.checkpoint import weight_paths
from localchat.model_files.safetensors import read_safetensors
from localchat_cuda.compile_ahead.process import CompileProcess
from localchat_cuda.config.model import ModelConfig, rounded_config, runtime_config
from localchat_cuda.config.reader import read_config
from localchat_cuda.environment import usable_gpus
from localchat_cuda.gguf_files import OpenedFiles, open_gguf
from localchat_cuda.plan.draft_plan import DraftShape, read_draft
from localchat_cuda.plan.preflight import refuse_adapters
from localchat_cuda.plan.rank_plan import RankLoad
from localchat_cuda.plan.weight_sizes import parameters
from localchat_cuda.ranks.split import split_config
from localchat_cuda.tokenizer import CheckpointTokenizer, read_tokenizer_files, sampling_defaults

if TYPE_CHECKING:
    from localchat_cuda.runner.runner import CudaRunner


class CheckpointModel:
    """See backend_api.interface.OpenModel. Only `load` reads weights."""

    def __init__(self, path: Path, device: str, notify: Callable[[str], None]) -> None:
        """Read config, tokenizer and headers. Raises ModelMissing, ModelInvalid.

        `device`: cuda, or cpu for the references."""
        self._path = path
        self._device = device
        self._ordinals = [0]
        """Numbers of the GPUs that may compute, as CUDA counts them, the best one first."""
        opened = open_gguf(path) if path.is_file() else _open_folder(path)
        self.config, notes = runtime_config(opened.config, gpu=device == "cuda")
        for note in notes:
            notify(note)
        if self.config.vision:
            notify(
                "This model can read images, but only its text part is loaded. Its GGUF version "
                "with a projector (mmproj) reads them, with llama.cpp."
            )
        self.headers = opened.headers
        self.tokenizer: Tokenizer = CheckpointTokenizer(opened.tokenizer, self.config.vocabulary)
        self.info = _info(opened, self.config, self.tokenizer)

    def plan(self, options: LoadOptions) -> MemoryPlan:
        """Plan a load with the memory that is free now.

        Raises DoesNotFit with advice, ModelMissing without weights, and UsageError for impossible options."""
        refuse_adapters(options)
        if not self.headers and not options.dummy_weights:
            raise ModelMissing(
                f"{self._path} contains no safetensors file.",
                hint="Download the model again, or use a GGUF file with llama.cpp. --dummy-weights measures "
                "speed without weights.",
            )
        headers = () if options.dummy_weights else self.headers
        config = rounded_config(self.config, options.quantize, self.info.name)
        ram_bytes = read_machine().ram_free_bytes
        gpus = self._target_gpus(options)
        draft = self._draft(options)
        load = RankLoad(self.info.name, config, headers, options, gpus, ram_bytes, draft)
        return demand(load.plan(), self.info.name)

    def _draft(self, options: LoadOptions) -> DraftShape | None:
        if options.draft is None:
            return None
        return read_draft(options.draft, self.config, gpu=self._device == "cuda")

    def _target_gpus(self, options: LoadOptions) -> list[Gpu]:
        """Return the GPUs that may compute, the best one first.

        For the references, they describe this machine's memory."""
        if self._device == "cpu":
            machine = read_machine()
            cpu = Gpu(0, "CPU", machine.ram_total_bytes, machine.ram_free_bytes)
            count = 1 if options.gpus == "auto" else options.gpus
            self._ordinals = [0] * count
            return [cpu] * count
        gpus, note = read_gpus()
        if not gpus:
            raise LocalchatError(f"No NVIDIA GPU is available. {note}".strip())
        self._ordinals = usable_gpus(gpus)
        return [gpus[n] for n in self._ordinals]

    def load(
        self, request: LoadRequest, progress: Progress, notify: Callable[[str], None]
    ) -> Runner:
        """Load weights and warm up. Raises ModelInvalid, DoesNotFit, EngineClosed."""
        # Before torch is imported, which takes seconds.
        model = self._path if self._device == "cuda" else None
        with CompileProcess(model) as compile_process:
            return self._load(request, progress, notify, compile_process)

    def _load(
        self,
        request: LoadRequest,
        progress: Progress,
        notify: Callable[[str], None],
        compile_process: CompileProcess,
    ) -> Runner:
        # The plan chose a GPU by the driver's order, so CUDA must use that order, too. CUDA reads this when it
        # starts.
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        from localchat_cuda.load import load_runner, source_of
        from localchat_cuda.load_drafts import (
            attach_draft_model,
            attach_head,
            attach_reader_of_states,
        )

        path = None if request.options.dummy_weights else self._path
        if path is None:
            notify("The weights are random, so the text is meaningless.")
        device = f"cuda:{self._ordinals[0]}" if self._device == "cuda" else self._device
        config = rounded_config(self.config, request.options.quantize, self.info.name)
        draft = self._draft(request.options)
        shared = 0
        if draft is not None and not draft.reads_states:
            tokenizer = _tokenizer(Path(request.options.draft or ""), draft.config.vocabulary)
            shared = shared_vocabulary(
                draft.name,
                (tokenizer.vocab_size, self.tokenizer.vocab_size),
                partial(tokenizer.piece, special=True),
                partial(self.tokenizer.piece, special=True),
            )
        if request.plan.gpus > 1:
            runner = self._load_ranks(config, path, request, progress, notify, compile_process)
        else:
            runner = load_runner(config, path, device, request, progress, notify, compile_process)
        if draft is not None and draft.reads_states:
            attach_reader_of_states(runner, draft, request, notify)
        elif draft is not None:
            attach_draft_model(runner, draft, request, progress, notify, shared)
        elif request.plan.prediction_head:
            attach_head(runner, config, source_of(config, path, runner.device), request, notify)
        return runner

    def _load_ranks(
        self,
        config: ModelConfig,
        path: Path | None,
        request: LoadRequest,
        progress: Progress,
        notify: Callable[[str], None],
        compile_process: CompileProcess,
    ) -> "CudaRunner":
        """Load a model on several GPUs, with a process for each but the first."""
        from localchat_cuda.load import load_runner
        from localchat_cuda.ranks import host_memory, workers
        from localchat_cuda.ranks.messages import RankJob

        ranks = request.plan.gpus
        devices = ["cpu"] * ranks
        if self._device == "cuda":
            devices = [f"cuda:{ordinal}" for ordinal in self._ordinals[:ranks]]
        part = split_config(config, ranks, self.info.name)
        with host_memory.created(part, request.plan) as file:
            job = RankJob(0, ranks, devices[0], config, path, request, Path(), file)
            with workers.started(job, devices[1:]) as group:
                return load_runner(
                    part, path, devices[0], request, progress, notify, compile_process, group
                )

    def close(self) -> None:
        """Do nothing: an opened model has no resources. Idempotent."""


def _tokenizer(path: Path, vocabulary: int) -> Tokenizer:
    files = open_gguf(path).tokenizer if path.is_file() else read_tokenizer_files(path)
    return CheckpointTokenizer(files, vocabulary)


def _open_folder(folder: Path) -> OpenedFiles:
    config = read_config(folder)
    headers = {path: read_safetensors(path) for path in weight_paths(folder)}
    return OpenedFiles(
        folder.name,
        config,
        tuple(headers.values()),
        read_tokenizer_files(folder),
        chat_templates(folder).get(DEFAULT),
        sampling_defaults(folder),
        digest_of((folder / "config.json").read_bytes(), headers),
    )


def _info(opened: OpenedFiles, config: ModelConfig, tokenizer: Tokenizer) -> ModelInfo:
    return ModelInfo(
        name=opened.name,
        architecture=config.architecture,
        quantization=config.quantization.label if config.quantization else config.dtype,
        parameters=parameters(config),
        context_train=config.context_train,
        vocab_size=tokenizer.vocab_size,
        file_bytes=sum(header.file_bytes for header in opened.headers),
        chat_template=opened.template,
        sampling=opened.sampling,
        layers=config.layers + 1,
        identity=opened.identity,
    )
