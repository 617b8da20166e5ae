"""Plans the memory of an embedding model. Loads no library."""

from dataclasses import replace
from typing import Final

from localchat.fit.hardware import Machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import (
    CacheSpec,
    MemoryPlan,
    Split,
    kv_layer_bytes,
    largest,
    spendable_gpu,
    spendable_ram,
    weights_split,
)
from localchat.model_files.architecture import ENCODERS, ModelShape
from localchat_llamacpp.plan.budget import Budget
from localchat_llamacpp.plan.buffers import (
    PROCESS_BYTES,
    TOKEN_BYTES,
    Steps,
    compute_bytes,
    gpu_context_bytes,
    input_bytes,
    repacked_weights,
)

MAX_TEXTS: Final = 16
"""Texts in one step."""
_GOAL_TOKENS = 8192
_MIN_TOKENS = 128
_SCORES_TOKENS = 512
"""Longest text without flash attention, which rounds keys and values."""


def plan_embedding(
    shape: ModelShape,
    options: LoadOptions,
    machine: Machine,
    *,
    can_offload: bool,
) -> MemoryPlan:
    """Plan an embedding model: weights, and the scratch of its longest text, computed in one step.

    The longest text has 8,192 tokens unless the options name a context, and never more than the model was
    trained for: the option may be meant for another model of the same server. A GPU gets all layers or none.
    """
    trained = shape.context_train
    limit = min(trained, options.context_tokens or _GOAL_TOKENS)
    on_gpu = can_offload and options.gpu_layers != 0 and bool(machine.gpus)
    placements = (shape.all_layers + 1, 0) if on_gpu else (0,)
    for layers in placements:
        budget = _EmbeddingBudget(
            shape,
            machine,
            layers,
            options.gpu_limit_bytes,
            anyway=options.anyway,
        )
        longest = largest(budget.fits, limit, step=_MIN_TOKENS)
        if longest >= limit or (options.context_tokens is None and longest >= min(trained, 512)):
            return _with_gpu(budget.plan(longest, longest, fits=True), options)
    return _with_gpu(budget.plan(limit, longest, fits=False), options)


def _with_gpu(memory: MemoryPlan, options: LoadOptions) -> MemoryPlan:
    """Return the plan, which is refused if a required GPU gets no layer."""
    if not options.require_gpu or memory.gpu_layers:
        return memory
    missing = "a GPU is required, and this embedding model would be computed on the CPU."
    advice = ("Leave --require-gpu out; `localchat doctor` shows devices.",)
    return replace(memory, fits=False, missing=missing, advice=advice)


class _EmbeddingBudget:
    """Memory by text length, for one placement of the layers."""

    def __init__(
        self,
        shape: ModelShape,
        machine: Machine,
        layers: int,
        gpu_limit_bytes: int | None,
        *,
        anyway: bool = False,
    ) -> None:
        self._shape = shape
        self._machine = machine
        self._layers = layers
        self._gpu_bytes = spendable_gpu(machine, gpu_limit_bytes, anyway=anyway)
        self._ram_bytes = spendable_ram(machine, anyway=anyway)
        weights = weights_split(shape, layers)
        repacked = repacked_weights(shape, machine, layers)
        self._weights = Split(weights.ram - repacked.originals + repacked.copies, weights.gpu)
        self._mapped_bytes = repacked.originals

    def budget(self, tokens: int) -> Budget:
        """Return the bytes for texts of this length."""
        shape = self._shape
        steps = Steps(MAX_TEXTS - 1, tokens)
        flash = tokens > _SCORES_TOKENS
        scratch = compute_bytes(shape, tokens, tokens, steps, flash=flash)
        cache = 0
        if self._shape.architecture not in ENCODERS:
            spec = CacheSpec(tokens, tokens, MAX_TEXTS, "f16", padded_values=not flash)
            cache = sum(kv_layer_bytes(shape, spec))
        process = PROCESS_BYTES + TOKEN_BYTES * shape.vocab_size
        kv = Split(cache, 0)
        compute = Split(scratch, 0)
        overhead = Split(process, 0)
        if self._layers:
            kv = Split(0, cache)
            compute = Split(input_bytes(shape, tokens, steps), scratch)
            overhead = Split(process, gpu_context_bytes(self._machine.gpus))
        return Budget(self._weights, kv, compute, overhead, flash, self._mapped_bytes)

    def fits(self, tokens: int) -> bool:
        """Return True if texts of this length fit."""
        budget = self.budget(tokens)
        return budget.ram <= self._ram_bytes and budget.gpu <= self._gpu_bytes

    def plan(self, tokens: int, longest: int, *, fits: bool) -> MemoryPlan:
        """Return the verdict on texts of this length."""
        budget = self.budget(tokens)
        gpu_free = self._gpu_bytes if budget.gpu else 0
        return MemoryPlan(
            backend="llama.cpp",
            weights_bytes=sum(budget.weights),
            kv_bytes=sum(budget.kv),
            compute_bytes=sum(budget.compute),
            overhead_bytes=sum(budget.overhead),
            free_bytes=self._ram_bytes + gpu_free,
            fits=fits,
            context_tokens=tokens,
            max_context_tokens=longest,
            kv_type="f16",
            flash_attention=budget.flash,
            gpu_layers=self._layers,
            cache_ram_bytes=0,
            max_step_tokens=tokens,
            layers=self._shape.all_layers + 1,
            gpu_bytes=budget.gpu,
            gpu_free_bytes=gpu_free,
            mapped_bytes=budget.mapped,
        )
