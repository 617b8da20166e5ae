"""Loads a checked GGUF file into a native model and context."""

import ctypes
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from localchat.backend_api.interface import Progress
from localchat.errors import DoesNotFit, EngineClosed, ModelInvalid
from localchat.fit.memory_plan import GpuShare
from localchat_llamacpp.build_advice import devices
from localchat_llamacpp.c_api import BufferOverride
from localchat_llamacpp.gguf_writer import TYPE_CODES
from localchat_llamacpp.native import Buffer, library
from localchat_llamacpp.plan.buffers import Steps, context_cells, tensor_split

_MTP_CONTEXT = 1
"""LLAMA_CONTEXT_TYPE_MTP: the context runs the model's prediction head."""
FLASH_AUTO = -1
FLASH_OFF = 0
_NO_DEVICES = ctypes.cast((ctypes.c_void_p * 1)(None), ctypes.c_void_p)
"""An empty list of devices.

Without it, llama.cpp reads the free memory of a CUDA GPU, so even a vocabulary takes 0.5 GB of it. A 7B without
offloaded layers takes 1.4 GB for long prompts.
"""

_END = BufferOverride(None, None)
"""Ends a list of overrides."""

_AGAIN = (
    "The file may be damaged, or newer than this llama.cpp: download it again, or update localchat."
)


class ContextSpec(NamedTuple):
    """Parameters of a native context."""

    context_tokens: int
    slots: int
    """Slots without the scratch slot."""
    step_tokens: int
    kv_type: str
    flash_attention: bool
    threads: int
    window_only: bool
    """Whether sliding-window layers store only their window."""


class Weights:
    """A native model, owned until `close`."""

    def __init__(self, handle: int, buffers: list[Buffer]) -> None:
        self.handle = handle
        self.buffers = buffers
        self._api: Any = library().api

    def close(self) -> None:
        """Release the model. Idempotent."""
        if self.handle:
            self._api.llama_model_free(self.handle)
            self.handle = 0


def load_vocabulary(path: Path) -> tuple[int, tuple[str, ...]]:
    """Load a native model with the vocabulary alone, and return it with its log lines.

    Takes 0.2 s for 152k tokens. Raises ModelInvalid.
    """
    native = library()
    parameters = native.api.llama_model_default_params()
    parameters.vocab_only = True
    parameters.devices = _NO_DEVICES
    with native.log.capture() as captured:
        model = native.api.llama_model_load_from_file(os.fsencode(path), parameters)
    if not model:
        raise ModelInvalid(f"{path} cannot be read: {captured.reason()}", hint=_AGAIN)
    if any("newline token not found" in line for line in captured.complaints):
        # Native code would end the process at the first text with a byte that has no token.
        native.api.llama_model_free(model)
        raise ModelInvalid(f"{path}: its vocabulary has no tokens for single bytes.", hint=_AGAIN)
    return int(model), tuple(captured.lines)


class Placement(NamedTuple):
    """Devices for the weights of a model."""

    gpu_layers: int = 0
    """Layers on GPUs, from the last. -1: all."""
    experts_on_cpu: int = 0
    """Leading layers whose experts stay in RAM."""
    shares: tuple[GpuShare, ...] = ()
    """Layers of each GPU. Empty if llama.cpp divides them."""


def load_weights(
    path: Path,
    *,
    placement: Placement,
    safe_mode: bool,
    total_bytes: int,
    progress: Progress,
    head: bool = False,
) -> Weights:
    """Load the whole model. path: the first file of a split one, beside which llama.cpp finds the others.

    head: whether to load the prediction head, too.

    Raises ModelInvalid with the library's reason, EngineClosed if `progress` returns False.
    """
    native = library()
    callback_body = _ProgressCallback(progress, total_bytes)
    parameters = native.api.llama_model_default_params()
    parameters.n_gpu_layers = placement.gpu_layers
    if not placement.gpu_layers:
        parameters.devices = _NO_DEVICES
    overrides = _expert_overrides(placement.experts_on_cpu)
    shares = _split(placement.shares)
    parameters.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
    parameters.tensor_split = ctypes.cast(shares, ctypes.c_void_p)
    # Repacked weights and AMX are faster for some models. AMX crashes some compilers' builds.
    parameters.use_extra_bufts = not safe_mode
    parameters.load_mtp = head
    parameters.progress_callback = callback = native.api.llama_progress_callback(callback_body)
    with native.log.capture() as captured:
        model = native.api.llama_model_load_from_file(os.fsencode(path), parameters)
    del callback, overrides, shares
    if callback_body.stopped:
        if model:
            native.api.llama_model_free(model)
        raise EngineClosed(f"The load of {path.name} was stopped.") from callback_body.failure
    if not model:
        raise ModelInvalid(
            f"{path} cannot be loaded: {captured.reason()}",
            hint=_AGAIN,
        )
    return Weights(int(model), captured.buffers)


def expert_pattern(layers: int) -> str:
    """Return a regular expression for expert tensors in the first layers."""
    numbers = "|".join(str(layer) for layer in range(layers))
    return rf"^blk\.({numbers})\..*_exps\."


def _expert_overrides(layers: int) -> Any:  # noqa: ANN401 - an array of ctypes, or a null pointer
    """Return overrides that keep the experts of the first layers in RAM."""
    if not layers:
        return None
    ram = library().api.ggml_backend_cpu_buffer_type()
    return (BufferOverride * 2)(BufferOverride(expert_pattern(layers).encode(), ram), _END)


def _split(shares: tuple[GpuShare, ...]) -> Any:  # noqa: ANN401 - an array of ctypes, or a null pointer
    """Return the shares of the library's GPUs. Null if the library sees other GPUs than the plan.

    The library may list GPUs in another order than the driver, so each share goes to the GPU of its size.
    """
    if not shares:
        return None
    native = [device.total_bytes for device in devices() if device.kind == "gpu"]
    if len(native) != len(shares):
        return None
    left = list(shares)
    layers = []
    for total in native:
        nearest = min(left, key=lambda device: abs(device.total_bytes - total))
        left.remove(nearest)
        layers.append(nearest.layers)
    return (ctypes.c_float * len(layers))(*tensor_split(layers))


def open_context(
    weights: Weights, spec: ContextSpec, *, head: bool = False
) -> tuple[int, list[Buffer]]:
    """Create a native context, and return it with its buffers. Raises DoesNotFit with the reason.

    head: whether the context runs the prediction head rather than the model.
    """
    native = library()
    parameters = native.api.llama_context_default_params()
    parameters.n_ctx = context_cells(spec.context_tokens)
    parameters.n_batch = parameters.n_ubatch = spec.step_tokens
    parameters.n_seq_max = spec.slots + 1
    # Limits the compute buffer: its default takes 300 MiB with a vocabulary of 152k.
    parameters.n_outputs_max = outputs_max(spec)
    parameters.kv_unified = True
    parameters.swa_full = not spec.window_only
    parameters.type_k = parameters.type_v = TYPE_CODES[spec.kv_type.upper()]
    parameters.flash_attn_type = FLASH_AUTO if spec.flash_attention else FLASH_OFF
    parameters.n_threads = parameters.n_threads_batch = spec.threads
    parameters.no_perf = True
    if head:
        parameters.ctx_type = _MTP_CONTEXT
    return new_context(
        weights,
        parameters,
        f"A context of {spec.context_tokens} tokens ({spec.kv_type} KV)",
        hint="Try a shorter context (--ctx) or a smaller KV type (--kv-type q8_0).",
    )


def new_context(
    weights: Weights,
    parameters: Any,  # noqa: ANN401 - a struct of ctypes
    subject: str,
    *,
    hint: str,
) -> tuple[int, list[Buffer]]:
    """Create a native context, and return it with its buffers. Raises DoesNotFit about the subject."""
    native = library()
    with native.log.capture() as captured:
        context = native.api.llama_init_from_model(weights.handle, parameters)
    if not context:
        raise DoesNotFit(f"{subject} could not be allocated: {captured.reason()}", hint=hint)
    return int(context), captured.buffers


def outputs_max(spec: ContextSpec) -> int:
    """Return the rows with logits in one decode. More is SIGABRT, so wider steps are split."""
    return Steps(spec.slots, spec.step_tokens).output_rows


class _ProgressCallback:
    """Native progress callback that forwards at most ten calls per second.

    An exception must not cross native code. It counts as a stop, and load_weights raises it.
    """

    def __init__(self, progress: Progress, total_bytes: int) -> None:
        self._progress = progress
        self._total_bytes = total_bytes
        self._last_s = 0.0
        self.stopped = False
        self.failure: Exception | None = None

    def __call__(self, done: float, _user: object = None) -> bool:
        now_s = time.monotonic()
        if now_s - self._last_s < 0.1 and done < 1.0:
            return True
        self._last_s = now_s
        try:
            self.stopped = not self._progress(int(done * self._total_bytes), self._total_bytes)
        except Exception as failure:  # noqa: BLE001  raised again by load_weights
            self.failure = failure
            self.stopped = True
        return not self.stopped
