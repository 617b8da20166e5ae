"""Entry point of the CUDA backend. Importing it imports neither torch nor triton."""

from collections.abc import Callable
from pathlib import Path

from localchat.backend_api.interface import (
    Availability,
    Backend,
    BuildInfo,
    Device,
    OpenModel,
    Remedy,
)
from localchat.fit.hardware import Machine, read_gpus, read_machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.fit.report import Kind
from localchat.fit.speed import Estimate
from localchat.model_files.checkpoint import ModelSummary
from localchat_cuda import environment
from localchat_cuda.plan import preflight


class CudaBackend(Backend):
    """Run folders of safetensors and GGUF files on an NVIDIA GPU. See backend_api.interface.Backend."""

    name = "cuda"
    device = "cuda"
    kinds: tuple[Kind, ...] = ("safetensors", "gguf")

    def build_key(self) -> str:
        """Return a digest of GPU, driver, torch, Triton and our kernels.

        A crash counts only until one of them changes."""
        return environment.build_key()

    def available(self) -> Availability:
        """Look for a GPU, its driver and the libraries, without importing torch or triton."""
        return environment.check_installation()

    def accepts(self, path: Path) -> bool:
        """Return True for a folder with config.json and for a GGUF file. `open` checks the content."""
        return (path / "config.json").is_file() or (path.suffix == ".gguf" and path.is_file())

    def objection(self, model: ModelSummary) -> str:
        """Return the reason why this backend cannot run a model; empty if it can."""
        return preflight.objection(model)

    def plan(self, model: ModelSummary, options: LoadOptions, machine: Machine) -> MemoryPlan:
        """Plan the memory of a load on the GPU that computes. Raises UsageError, ModelInvalid."""
        return preflight.plan_for(model, options, machine)

    def expected_rate(self, model: ModelSummary, plan: MemoryPlan, threads: int) -> Estimate | None:
        """Estimated from the GPU's bandwidth, without a probe; None if the driver does not report it."""
        return preflight.expected_rate(model, plan, read_machine())

    def build_info(self) -> BuildInfo:
        """Return versions and devices, without importing torch or triton."""
        availability = self.available()
        gpus, _ = read_gpus()
        devices = tuple(
            Device(f"CUDA{gpu.index}", gpu.name, "gpu", gpu.free_bytes, gpu.total_bytes)
            for gpu in gpus
        )
        toolkit = environment.torch_cuda()
        versions = [f"{name} {number}" for name, number in availability.versions]
        text = ", ".join(versions) or availability.reason
        features = frozenset(
            f"sm_{gpu.compute_capability[0]}{gpu.compute_capability[1]}" for gpu in gpus
        )
        return BuildInfo("torch", text, features, bool(toolkit and gpus), devices)

    def remedies(self) -> tuple[Remedy, ...]:
        """Return what is missing on a machine with an NVIDIA GPU; empty on other machines."""
        availability = self.available()
        gpus, _ = read_gpus()
        if availability.ok or not gpus:
            return ()
        return (Remedy(f"{availability.reason} {availability.hint}".strip()),)

    def open(self, path: Path, notify: Callable[[str], None]) -> OpenModel:
        """Read config, tokenizer and headers. Raises ModelMissing, ModelInvalid."""
        from localchat_cuda.checkpoint_model import CheckpointModel

        return CheckpointModel(path, self.device, notify)


class ReferenceBackend(CudaBackend):
    """Run the kernels' plain-torch references on a CPU, to test the runner without a GPU.

    It is slow and never chosen automatically. Its name is `localchat_cuda.backend:ReferenceBackend`."""

    name = "cuda-reference"
    device = "cpu"

    def build_key(self) -> str:
        """Return an empty key, because no kernel runs."""
        return ""

    def available(self) -> Availability:
        return Availability(True, f"References on {read_machine().cpu_name or 'this CPU'}.")
