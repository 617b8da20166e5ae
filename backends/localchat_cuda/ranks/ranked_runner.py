"""Runner of rank 0. It sends each step to the other ranks before it launches the step."""

from typing import Any

from localchat.backend_api.interface import Capabilities, StepPlan, StepResult
from localchat.errors import DeviceFault
from localchat_cuda.ranks.process_collective import ProcessCollective
from localchat_cuda.ranks.workers import Workers
from localchat_cuda.runner.input_batch import TokenSpan
from localchat_cuda.runner.model import DeviceModel
from localchat_cuda.runner.runner import CudaRunner
from localchat_cuda.runner.step_output import PendingStep


class RankedRunner(CudaRunner):
    """See CudaRunner. A rank that ends, or that has no memory left, ends the engine."""

    def __init__(
        self,
        model: DeviceModel,
        capabilities: Capabilities,
        workers: Workers,
        **options: Any,  # noqa: ANN401 (those of CudaRunner)
    ) -> None:
        """Take ownership of the other ranks. `options`: see CudaRunner."""
        super().__init__(model, capabilities, **options)
        self._workers = workers
        self._collective = model.collective

    def launch(self, plan: StepPlan) -> None:
        self._workers.launch(plan)
        with self._workers.watched():
            super().launch(plan)

    def _drop(self, step: PendingStep) -> None:
        # The other ranks compute this step, and wait for this one.
        raise DeviceFault(
            f"Rank 0 of {self._workers.job.ranks} ran out of GPU memory in a step. A shorter context (--ctx) "
            "or less KV (--kv-gb) leaves more."
        )

    def collect(self) -> StepResult:
        with self._workers.watched():
            return super().collect()

    def _before_padding(self, spans: list[TokenSpan], kind: str) -> None:
        self._workers.launch_padding(spans, kind)

    def host_block(self, number: int) -> memoryview | None:
        if not self._workers.copied(number):
            return None
        return super().host_block(number)

    def close(self) -> None:
        super().close()
        self._workers.close()
        if isinstance(self._collective, ProcessCollective):
            self._collective.close()
