"""The CUDA backend as doors and the loop find it. Importing this imports neither torch nor triton."""

from collections.abc import Callable, Sequence
from pathlib import Path

from localchat.backend_api.interface import Availability, BuildInfo, Device, OpenModel, Remedy
from localchat.fit.hardware import Machine, read_gpus, read_machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.fit.report import Kind
from localchat.fit.speed_history import NO_MEASUREMENTS, Estimate, MeasurementCache, PastRun
from localchat.model_files.checkpoint import ModelSummary
from localchat_cuda import environment, preflight


class CudaBackend:
    """Folders of safetensors on an NVIDIA GPU. See backend_api.interface.Backend."""

    name = "cuda"
    kinds: tuple[Kind, ...] = preflight.KINDS

    def build_key(self) -> str:
        """Empty: nothing native of ours could crash in a way that a safe mode avoids."""
        return ""

    def available(self) -> Availability:
        """Looks for a GPU, its driver and the libraries; imports none of them but the driver's reader."""
        return environment.check_installation()

    def accepts(self, path: Path) -> bool:
        """A folder with config.json, as the hub has them: `open` says what is wrong with one."""
        return (path / "config.json").is_file()

    def objection(self, model: ModelSummary) -> str:
        """What config.json asks for and this engine lacks."""
        return preflight.objection(model)

    def with_gpus(self, machine: Machine) -> Machine:
        """NVIDIA's cards are seen already."""
        return machine

    def plan(self, model: ModelSummary, wish: LoadOptions, machine: Machine) -> MemoryPlan:
        """What a load would take of the card that computes. Raises UsageError, ModelInvalid."""
        return preflight.plan_for(model, wish, machine)

    def expected_rate(
        self,
        model: ModelSummary,
        plan: MemoryPlan,
        threads: int,
        past: Sequence[PastRun] = (),
        measures: MeasurementCache = NO_MEASUREMENTS,
    ) -> Estimate | None:
        """By the card's bandwidth, no probe; None where the driver does not tell it."""
        rate = preflight.expected_rate(model, plan, read_machine(), past)
        return None if rate is None else Estimate(rate)

    def build_info(self) -> BuildInfo:
        """What the driver and the installed torch say of themselves; loads neither torch nor triton."""
        found = self.available()
        gpus, _ = read_gpus()
        devices = tuple(
            Device(f"CUDA{gpu.index}", gpu.name, "gpu", gpu.free_bytes, gpu.total_bytes)
            for gpu in gpus
        )
        toolkit = environment.torch_cuda()
        text = ", ".join(f"{name} {number}" for name, number in found.versions) or found.reason
        features = frozenset(
            f"sm_{gpu.compute_capability[0]}{gpu.compute_capability[1]}" for gpu in gpus
        )
        return BuildInfo("torch", text, features, bool(toolkit and gpus), devices)

    def remedies(self) -> tuple[Remedy, ...]:
        """What is missing on a machine that has an NVIDIA GPU; on others nothing is."""
        found = self.available()
        gpus, _ = read_gpus()
        if found.ok or not gpus:
            return ()
        return (Remedy(f"{found.reason} {found.hint}".strip()),)

    def open(self, path: Path, say: Callable[[str], None]) -> OpenModel:
        """Read config, vocabulary and headers. Raises ModelMissing, ModelInvalid."""
        from localchat_cuda.checkpoint_model import CheckpointModel

        return CheckpointModel(path, "cuda", say)


class ReferenceBackend(CudaBackend):
    """The same runner over the kernels' plain references on a CPU, to test it without a GPU: slow, and never
    chosen by itself. Asked for as `localchat_cuda.backend:ReferenceBackend`."""

    name = "cuda-reference"

    def available(self) -> Availability:
        return Availability(True, f"References on {read_machine().cpu_name or 'this CPU'}.")

    def open(self, path: Path, say: Callable[[str], None]) -> OpenModel:
        from localchat_cuda.checkpoint_model import CheckpointModel

        return CheckpointModel(path, "cpu", say)
