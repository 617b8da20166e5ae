"""LoRA adapters of a load: their files, and the native adapters of a context."""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from localchat.errors import ModelInvalid
from localchat.fit.load_options import LoraAdapter
from localchat.model_files.adapter import PEFT_WEIGHTS, Adapter, check_adapter, read_adapter
from localchat.model_files.gguf import Header
from localchat_llamacpp.native import Buffer, library


def open_adapters(adapters: Sequence[LoraAdapter], model: Header) -> tuple[Adapter, ...]:
    """Return the adapters of a load, checked against the model. Converts folders in the format of PEFT.

    Raises ModelMissing, ModelInvalid.
    """
    opened = []
    for option in adapters:
        path = Path(option.path)
        if path.is_dir():
            from localchat_llamacpp.convert.peft import converted_adapter

            path = converted_adapter(path, model)
        adapter = read_adapter(path)
        check_adapter(adapter, model, Path(option.path).name)
        opened.append(adapter)
    return tuple(opened)


def adapter_bytes(adapters: Sequence[LoraAdapter], model: Header | None) -> int:
    """Return the memory of the adapters of a load. Raises like open_adapters if the model's header is known."""
    if model is not None:
        return sum(adapter.size_bytes for adapter in open_adapters(adapters, model))
    sizes = 0
    for adapter in adapters:
        file = Path(adapter.path)
        if file.is_dir():
            file /= PEFT_WEIGHTS
        if file.is_file():
            sizes += file.stat().st_size
    return sizes


class LoadedAdapters:
    """Native adapters of a model. They are freed with the model."""

    def __init__(self, model: int, adapters: Sequence[Adapter]) -> None:
        """Read the adapters into the memory of the model's devices. Raises ModelInvalid."""
        native = library()
        self._api: Any = native.api
        self._handles: list[int] = []
        self._active: tuple[float, ...] = ()
        self.buffers: list[Buffer] = []
        """Allocations of all adapters."""
        for adapter in adapters:
            with native.log.capture() as captured:
                handle = self._api.llama_adapter_lora_init(model, os.fsencode(adapter.path))
            if not handle:
                raise ModelInvalid(
                    f"{adapter.path} cannot be loaded: {captured.reason()}",
                    hint="Use an adapter that was trained on this model.",
                )
            self._handles.append(handle)
            self.buffers += captured.buffers

    def apply(self, context: int, scales: tuple[float, ...]) -> None:
        """Set the scales of the next decodes. Missing scales are 0, and an adapter at 0 costs nothing."""
        if scales == self._active:
            return
        self._active = scales
        pairs = [pair for pair in zip(self._handles, scales, strict=False) if pair[1]]
        handles = (ctypes.c_void_p * max(len(pairs), 1))(*(handle for handle, _ in pairs))
        numbers = (ctypes.c_float * max(len(pairs), 1))(*(scale for _, scale in pairs))
        self._api.llama_set_adapters_lora(context, handles, len(pairs), numbers)
