"""The CUDA backend without a GPU: the references of its kernels on a CPU."""

from collections.abc import Callable
from pathlib import Path

from localchat.backend_api.interface import Availability, OpenModel
from localchat.fit.hardware import read_machine
from localchat_cuda.backend import CudaBackend


class ReferenceBackend(CudaBackend):
    """Run the kernels' plain-torch references on a CPU, to test the runner without a GPU.

    It is slow and never chosen automatically. Its name is `tests.support.reference_backend:ReferenceBackend`.
    """

    name = "cuda-reference"

    def build_key(self) -> str:
        """Return an empty key, because no kernel runs."""
        return ""

    def available(self) -> Availability:
        return Availability(True, f"References on {read_machine().cpu_name or 'this CPU'}.")

    def open(self, path: Path, notify: Callable[[str], None]) -> OpenModel:
        from localchat_cuda.checkpoint_model import CheckpointModel

        return CheckpointModel(path, "cpu", notify)
