"""Loads a GGUF file into a runner, for a `with` block."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from localchat.backend_api.interface import LoadRequest, Runner
from localchat.fit.load_options import LoadOptions
from localchat_llamacpp.model import GgufModel


@contextmanager
def load_model(path: Path, **options: Any) -> Iterator[Runner]:
    """Load on the CPU with one thread. options: more load options."""
    load = LoadOptions(
        **{"context_tokens": 512, "gpu_layers": 0, "threads": 1, "max_slots": 4, **options}
    )
    model = GgufModel(path)
    wanted = LoadRequest(model.plan(load), load, safe_mode=True)
    runner = model.load(wanted, lambda _done, _total: True, lambda _note: None)
    model.close()
    try:
        yield runner
    finally:
        runner.close()
