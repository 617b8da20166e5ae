"""Computes the memory budget of each candidate load, and whether it fits."""

from functools import cache, partial
from itertools import zip_longest
from typing import NamedTuple

from msgspec import structs

from localchat.fit.hardware import Machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import (
    CacheSpec,
    GpuShare,
    Split,
    kv_layer_bytes,
    largest,
    ram_reserve_bytes,
    spendable_gpu,
    spendable_gpus,
    spendable_ram,
    weights_split,
)
from localchat.model_files.architecture import ModelShape
from localchat.model_files.projector import NO_PROJECTOR, Projector, find_projector
from localchat_llamacpp.adapters import adapter_bytes
from localchat_llamacpp.draft_shape import draft_shape
from localchat_llamacpp.plan.buffers import (
    PROCESS_BYTES,
    SPARE_STATES,
    STATE_WINDOW,
    TOKEN_BYTES,
    Repacked,
    Steps,
    borrowed_bytes,
    compute_bytes,
    context_cells,
    encoder_compute_bytes,
    gpu_context_bytes,
    head_cells,
    input_bytes,
    layer_weights,
    overhead_bytes,
    repacked_weights,
    split_layers,
    window_cells,
)
from localchat_llamacpp.plan.prediction_head import head_shape

_SCORES_BYTES = 512_000_000
"""Attention scores up to this size are always worth the faster decode of a long conversation."""
_SERVER_STEP_TOKENS = 256
_UNIFIED_SHARE = 0.75
"""Share of the RAM that the GPU of a machine with unified memory may use. Metal's own limit is similar."""


class Candidate(NamedTuple):
    """A combination of KV type, sliding window and offloaded layers."""

    kv_type: str
    window_only: bool
    """Whether sliding-window layers store only their window."""
    gpu_layers: int
    experts_on_cpu: int = 0
    """Leading layers whose experts stay in RAM."""

    @property
    def is_quantized(self) -> bool:
        """Whether the KV cache is quantized, which needs flash attention."""
        return self.kv_type not in ("f32", "f16", "bf16")


class Budget(NamedTuple):
    """Bytes of one candidate, in RAM and on the GPUs."""

    weights: Split
    kv: Split
    compute: Split
    overhead: Split
    flash: bool
    mapped: int = 0
    """See MemoryPlan.mapped_bytes. Not part of any sum."""
    shares: tuple[GpuShare, ...] = ()
    """Part of each GPU, if there are several. Not part of any sum."""

    @property
    def ram(self) -> int:
        """RAM of all parts."""
        return self.weights.ram + self.kv.ram + self.compute.ram + self.overhead.ram

    @property
    def gpu(self) -> int:
        """Graphics memory of all parts."""
        return self.weights.gpu + self.kv.gpu + self.compute.gpu + self.overhead.gpu

    def plus(self, draft: "Budget") -> "Budget":
        """Return the budget of both models in one process."""
        pairs = zip(self[:4], draft[:4], strict=True)
        weights, kv, compute, overhead = [
            Split(own.ram + other.ram, own.gpu + other.gpu) for own, other in pairs
        ]
        # Part of the draft model lies on each GPU too. The layer counts stay those of this model.
        shares = tuple(
            own._replace(size_bytes=own.size_bytes + other.size_bytes)
            for own, other in zip(self.shares, draft.shares, strict=False)
        )
        mapped = self.mapped + draft.mapped
        return Budget(weights, kv, compute, overhead, self.flash, mapped, shares)

    def pooled(self) -> "Budget":
        """Return the budget on unified memory, where everything is RAM."""
        weights, kv, compute, overhead = (Split(sum(part), 0) for part in self[:4])
        return Budget(weights, kv, compute, overhead, self.flash, self.mapped)


class Budgets:
    """Computes the budget of every candidate for one model, machine and set of options. Never changes."""

    def __init__(
        self,
        shape: ModelShape,
        options: LoadOptions,
        machine: Machine,
        *,
        can_offload: bool,
        head: bool = False,
    ) -> None:
        """head: whether the model's own prediction head drafts."""
        self.shape = shape
        self.options = options
        self.machine = machine
        self.can_offload = can_offload
        self.layers = shape.all_layers + 1
        """Layers that can be offloaded, as llama.cpp counts them: the output is one more."""
        self.unified = machine.unified_memory and can_offload
        self.trusted = can_offload and not self.unified and not machine.gpus
        """Whether the number of layers is unchecked, because a GPU's memory cannot be read."""
        self.ram_bytes = spendable_ram(machine, anyway=options.anyway)
        self.gpu_bytes = spendable_gpu(machine, options.gpu_limit_bytes, anyway=options.anyway)
        if self.unified:
            self.ram_bytes = min(self.ram_bytes, int(machine.ram_total_bytes * _UNIFIED_SHARE))
            self.gpu_bytes = 0
        self.all_gpu_bytes = spendable_gpu(machine, anyway=options.anyway)
        """Memory of all GPUs, whatever the user's limit."""
        self._free_per_gpu = spendable_gpus(machine, options.gpu_limit_bytes, anyway=options.anyway)
        # Cached: each call walks all weights, and a search tries hundreds of contexts.
        self._weights = cache(partial(weights_split, shape))
        self._repacked = cache(partial(repacked_weights, shape, machine))
        self._tables = sum(weight.size_bytes for weight in shape.weights if weight.part == "lookup")
        self._encoder: Projector | None = None
        if shape.header is not None and not shape.pooling:
            self._encoder = find_projector(shape.header, options.mmproj)
        self._adapter_bytes = adapter_bytes(options.lora, shape.header)
        self.head = head
        drafting: ModelShape | None = None
        if options.draft is not None:
            drafting = draft_shape(options.draft)
        elif head:
            drafting = head_shape(shape)
        self._draft: Budgets | None = None
        if drafting is not None:
            self._draft = Budgets(
                drafting,
                structs.replace(options, draft=None, mmproj=NO_PROJECTOR, lora=()),
                machine,
                can_offload=can_offload,
            )

    @property
    def reserve_bytes(self) -> int:
        """RAM that is kept free for other programs."""
        if self.options.anyway:
            return 0
        return ram_reserve_bytes(self.machine)

    @property
    def gpu_count(self) -> int:
        """GPUs that llama.cpp spreads layers over."""
        if self.unified:
            return 0
        return len(self.machine.gpus)

    def steps(self, gpu_layers: int) -> Steps:
        """Return the parameters of a context with this many offloaded layers."""
        spare = 0
        if self.shape.recurrent:
            spare = SPARE_STATES
        step = step_tokens(self.machine, gpu=gpu_layers >= self.layers)
        if self.options.room_for_slots:
            # A prompt's last step takes a narrow rest along, and needs room for both.
            step = max(step, _SERVER_STEP_TOKENS)
        if self._encoder is not None:
            step = max(step, self._encoder.whole_tokens)
        return Steps(self.options.max_slots + spare, step)

    def budget(self, context: int, candidate: Candidate) -> Budget:
        """Return the bytes at one context, without flash attention if that is faster and fits."""
        with_flash = self._budget(context, candidate, flash=True)
        if self.options.room_for_slots or candidate.gpu_layers or candidate.is_quantized:
            return with_flash
        without_flash = self._budget(context, candidate, flash=False)
        scores_limit = max(_SCORES_BYTES, self.ram_bytes // 8)
        if without_flash.compute.ram <= scores_limit and self.has_room(without_flash):
            return without_flash
        return with_flash

    def _budget(self, context: int, candidate: Candidate, *, flash: bool) -> Budget:
        layers = candidate.gpu_layers
        steps = self.steps(layers)
        cells = context_cells(context)
        sliding = window_cells(self.shape, cells, steps) if candidate.window_only else cells
        cache_spec = CacheSpec(
            cells, sliding, steps.sequences, candidate.kv_type, padded_values=not flash
        )
        kv_bytes = kv_layer_bytes(self.shape, cache_spec)
        first_on_gpu = max(self.layers - layers, 0)
        scratch = compute_bytes(self.shape, cells, sliding, steps, flash=flash)
        contexts = 0
        if layers and not self.unified:
            contexts = gpu_context_bytes(self.machine.gpus)
        weights, mapped = self._weights_in_memory(candidate)
        budget = Budget(
            weights,
            Split(sum(kv_bytes[:first_on_gpu]), sum(kv_bytes[first_on_gpu:])),
            self._compute(candidate, scratch, input_bytes(self.shape, cells, steps)),
            Split(overhead_bytes(self.shape, steps), contexts),
            flash,
            mapped,
        )
        if layers and self.gpu_count > 1:
            shares = self._gpu_shares(candidate, kv_bytes[first_on_gpu:], budget)
            budget = budget._replace(shares=shares)
        if self._encoder is not None:
            encoder = self._encoder
            weights_bytes = encoder.header.weights_bytes
            beside = self._budget_beside(
                weights_bytes, encoder_compute_bytes(encoder), gpu=layers > 0
            )
            budget = budget.plus(beside)
        if self._adapter_bytes:
            budget = budget.plus(self._budget_beside(self._adapter_bytes, 0, gpu=layers > 0))
        if self._draft is not None:
            budget = budget.plus(self._drafter_budget(self._draft, context, gpu=layers > 0))
        if self.unified:
            return budget.pooled()
        return budget

    def _weights_in_memory(self, candidate: Candidate) -> tuple[Split, int]:
        """Return the weights, and the mapped pages that the system may drop."""
        layers = candidate.gpu_layers
        weights = self._weights(layers, candidate.experts_on_cpu)
        repacked = Repacked()
        # With a GPU, weights in RAM stay as they are in the file: llama.cpp prefers RAM that the GPU can read.
        if not layers or self.unified:
            repacked = self._repacked(layers)
        # Of a lookup table, the system keeps only the rows in use when memory is short.
        tables = 0 if self.unified else self._tables
        in_ram = weights.ram - tables - repacked.originals + repacked.copies
        return Split(in_ram, weights.gpu), repacked.originals + tables

    def _compute(self, candidate: Candidate, scratch: int, inputs: int) -> Split:
        """Return the scratch buffers: one per device that runs a part of the graph."""
        layers = candidate.gpu_layers
        if not layers:
            return Split(scratch, 0)
        is_whole = layers >= self.layers and not candidate.experts_on_cpu
        borrowed = 0
        if not self.unified:
            borrowed = borrowed_bytes(self.shape, layers, candidate.experts_on_cpu)
        ram = inputs if is_whole else scratch
        return Split(ram, scratch * max(self.gpu_count, 1) + borrowed)

    def _gpu_shares(
        self, candidate: Candidate, kv_bytes: tuple[int, ...], budget: Budget
    ) -> tuple[GpuShare, ...]:
        """Return the layers and bytes of each GPU. A layer is never divided between two."""
        weights = layer_weights(self.shape, candidate.gpu_layers, candidate.experts_on_cpu)
        # Prediction layers and the output have weights, but no keys and values here.
        sizes = [weight + kv for weight, kv in zip_longest(weights, kv_bytes, fillvalue=0)]
        fixed = (budget.gpu - sum(sizes)) // self.gpu_count
        counts = split_layers(sizes, [free - fixed for free in self._free_per_gpu])
        shares: list[GpuShare] = []
        start = 0
        for count, gpu in zip(counts, self.machine.gpus, strict=True):
            end = start + count
            shares.append(GpuShare(count, fixed + sum(sizes[start:end]), gpu.total_bytes))
            start = end
        return tuple(shares)

    def _drafter_budget(self, drafter: "Budgets", context: int, *, gpu: bool) -> Budget:
        """Return the bytes of a draft model, or of the prediction head with the states that it reads."""
        if not self.head:
            return drafter.draft_budget(context, gpu=gpu)
        slots = self.options.max_slots
        budget = drafter.draft_budget(head_cells(context, slots), gpu=gpu)
        # The head has no vocabulary of its own.
        states = 4 * self.shape.embedding * (slots * STATE_WINDOW + self.steps(0).tokens)
        logits = budget.overhead.ram - TOKEN_BYTES * self.shape.vocab_size
        return budget._replace(overhead=Split(logits + states, 0))

    def draft_budget(self, context: int, *, gpu: bool) -> Budget:
        """Return the bytes of this model as the draft model of another."""
        layers = self.layers if gpu else 0
        candidate = Candidate("f16", window_only=False, gpu_layers=layers)
        budget = self._budget(context, candidate, flash=gpu)
        # Both models share one process.
        own = max(overhead_bytes(self.shape, self.steps(0)) - PROCESS_BYTES, 0)
        return budget._replace(overhead=Split(own, 0))

    def _budget_beside(self, weights: int, compute: int, *, gpu: bool) -> Budget:
        """Return the budget of an encoder or of adapters, which lie on the first GPU or in RAM."""
        nothing = Split(0, 0)
        if not gpu or self.unified:
            return Budget(Split(weights, 0), nothing, Split(compute, 0), nothing, flash=False)
        shares: tuple[GpuShare, ...] = ()
        if self.gpu_count > 1:
            first, *others = self.machine.gpus
            shares = (
                GpuShare(0, weights + compute, first.total_bytes),
                *(GpuShare(0, 0, other.total_bytes) for other in others),
            )
        return Budget(
            Split(0, weights), nothing, Split(0, compute), nothing, flash=False, shares=shares
        )

    def has_room(self, budget: Budget, spare_bytes: int = 0) -> bool:
        """Return True if memory is enough, with `spare_bytes` of RAM left over."""
        return budget.ram + spare_bytes <= self.ram_bytes and self._gpus_have_room(budget)

    def _gpus_have_room(self, budget: Budget) -> bool:
        if self.trusted:
            return True
        if not budget.shares:
            return budget.gpu <= self.gpu_bytes
        pairs = zip(budget.shares, self._free_per_gpu, strict=True)
        return all(share.size_bytes <= free for share, free in pairs)

    def is_allowed(self, budget: Budget) -> bool:
        """Return True if the KV cache is within the user's limit."""
        limit = self.options.kv_limit_bytes
        return limit is None or sum(budget.kv) <= limit

    def fits(self, context: int, candidate: Candidate, spare_bytes: int = 0) -> bool:
        """Return True if a candidate fits with `spare_bytes` of RAM left over."""
        budget = self.budget(context, candidate)
        return self.is_allowed(budget) and self.has_room(budget, spare_bytes)

    def longest_context(self, candidate: Candidate, limit: int, spare_bytes: int = 0) -> int:
        """Return the longest context up to `limit` that fits, or 0."""
        return largest(lambda context: self.fits(context, candidate, spare_bytes), limit)

    def max_gpu_layers(self, context: int, candidate: Candidate) -> int:
        """Return the most layers that fit on the GPU with the others in RAM, or 0."""
        layers = largest(
            lambda count: self._gpus_have_room(
                self.budget(context, candidate._replace(gpu_layers=count))
            ),
            self.layers,
            step=1,
        )
        if self.fits(context, candidate._replace(gpu_layers=layers)):
            return layers
        return 0

    def min_experts_on_cpu(self, context: int, candidate: Candidate) -> int:
        """Return the fewest layers whose experts must stay in RAM so that the others fit.

        0 if the model has no experts, or does not fit even with all of them in RAM.
        """
        layers = self.shape.all_layers
        if not self.shape.experts or self.unified:
            return 0
        on_gpu = largest(
            lambda count: self._gpus_have_room(
                self.budget(context, candidate._replace(experts_on_cpu=layers - count))
            ),
            layers,
            step=1,
        )
        experts = layers - on_gpu
        if self.fits(context, candidate._replace(experts_on_cpu=experts)):
            return experts
        return 0

    def free_bytes(self, budget: Budget) -> int:
        """Return the free memory of the kinds that the load uses."""
        return self.ram_bytes + self.gpu_free_bytes(budget)

    def gpu_free_bytes(self, budget: Budget) -> int:
        """Return the free graphics memory that the load uses. If it cannot be read, the required amount."""
        if not budget.gpu:
            return 0
        if self.trusted:
            return budget.gpu
        return self.gpu_bytes


def step_tokens(machine: Machine, *, gpu: bool) -> int:
    """Return the tokens of a step: more only lengthen it on few cores."""
    if gpu or machine.cores > 15:
        return 512
    if machine.cores <= 4:
        return 128
    return 256
