"""llama.cpp with the AMX fault put in by hand: the process dies by SIGSEGV in its first wide step, unless the
model was loaded in safe mode. For machines whose build does not have it."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

from localchat.backend_api.interface import LoadRequest, Progress, Runner
from localchat_llamacpp import LlamaCppBackend
from localchat_llamacpp.model import GgufModel


class CrashingModel(GgufModel):
    def load(self, options: LoadRequest, progress: Progress, say: Callable[[str], None]) -> Runner:
        def watched(done: int, total: int) -> bool:
            goes_on = progress(done, total)
            if done >= total and not options.safe_mode:
                os.kill(os.getpid(), signal.SIGSEGV)
            return goes_on

        return super().load(options, watched, say)


class CrashingBackend(LlamaCppBackend):
    def open(self, path: Path, say: Callable[[str], None]) -> CrashingModel:
        return CrashingModel(path)
