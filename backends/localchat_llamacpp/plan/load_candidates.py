"""Candidate ways to load one model on one machine: the memory of each, and whether it fits."""

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
from localchat_llamacpp.draft_shape import draft_shape
from localchat_llamacpp.plan.compute_buffers import (
    PROCESS_BYTES,
    SPARE_STATES,
    Repacked,
    Steps,
    borrowed_bytes,
    compute_bytes,
    context_cells,
    gpu_context_bytes,
    input_bytes,
    overhead_bytes,
    repacked_weights,
    window_cells,
)
from localchat_llamacpp.plan.layer_split import layer_weights, split_layers

SCORES_BYTES = 512_000_000
"""Attention scores up to this size are always paid for a faster decode."""
_UNIFIED_SHARE = 0.75
"""Share of the RAM that the GPU of a machine with unified memory may hold (Metal's own limit is near it)."""


class LoadCandidate(NamedTuple):
    """One combination of KV type, sliding window and offloaded layers."""

    kv_type: str
    window_only: bool
    """Sliding-window layers keep only their window."""
    gpu_layers: int
    experts_on_cpu: int = 0
    """Layers, from the first, whose experts stay in RAM."""

    @property
    def coarse(self) -> bool:
        """True if the KV cache is quantized, which needs flash attention."""
        return self.kv_type not in ("f32", "f16", "bf16")


class Needs(NamedTuple):
    """Bytes of one candidate, in RAM and on the GPU."""

    weights: Split
    kv: Split
    compute: Split
    overhead: Split
    flash: bool
    mapped: int = 0
    """See MemoryPlan.mapped_bytes; in no sum."""
    shares: tuple[GpuShare, ...] = ()
    """Of each GPU, where there are several; in no sum."""

    @property
    def ram(self) -> int:
        """All RAM."""
        return self.weights.ram + self.kv.ram + self.compute.ram + self.overhead.ram

    @property
    def gpu(self) -> int:
        """All graphics memory."""
        return self.weights.gpu + self.kv.gpu + self.compute.gpu + self.overhead.gpu

    def plus(self, other: "Needs") -> "Needs":
        """The same with another model beside it."""
        parts = zip(self[:4], other[:4], strict=True)
        weights, kv, compute, overhead = [
            Split(mine.ram + more.ram, mine.gpu + more.gpu) for mine, more in parts
        ]
        # A part of the other one lies on each GPU too; the layers told are this model's.
        shares = tuple(
            mine._replace(size_bytes=mine.size_bytes + more.size_bytes)
            for mine, more in zip(self.shares, other.shares, strict=False)
        )
        mapped = self.mapped + other.mapped
        return Needs(weights, kv, compute, overhead, self.flash, mapped, shares)

    def pooled(self) -> "Needs":
        """The same with unified memory: everything is RAM."""
        whole = [
            Split(sum(part), 0) for part in (self.weights, self.kv, self.compute, self.overhead)
        ]
        return Needs(whole[0], whole[1], whole[2], whole[3], self.flash, self.mapped)


class MemoryCheck:
    """Computes the memory of every candidate for one model, machine and set of options."""

    def __init__(
        self,
        shape: ModelShape,
        options: LoadOptions,
        machine: Machine,
        *,
        can_offload: bool,
        safe_mode: bool,
    ) -> None:
        self.shape = shape
        self.options = options
        self.machine = machine
        self.layers = self.shape.all_layers + 1
        """As llama.cpp counts what can be offloaded: the output is one more."""
        self.unified = machine.unified_memory and can_offload
        self.trusted = can_offload and not self.unified and not machine.gpus
        """True if a GPU's memory cannot be read, so that a number of layers is taken on trust."""
        self.ram_bytes = spendable_ram(machine, anyway=options.anyway)
        if self.unified:
            self.ram_bytes = min(self.ram_bytes, int(machine.ram_total_bytes * _UNIFIED_SHARE))
        self.gpu_bytes = (
            0
            if self.unified
            else spendable_gpu(machine, options.gpu_limit_bytes, anyway=options.anyway)
        )
        self.all_gpu_bytes = spendable_gpu(machine, anyway=options.anyway)
        """Of all GPUs, whatever the user's limit."""
        self._safe_mode = safe_mode
        # They read every weight, and hundreds of contexts are tried.
        self._weights = cache(partial(weights_split, shape))
        self._repacked = cache(partial(repacked_weights, shape, machine))
        self._tables = sum(one.size_bytes for one in shape.weights if one.part == "lookup")
        self._cards = spendable_gpus(machine, options.gpu_limit_bytes, anyway=options.anyway)
        self._draft = _draft_check(options, machine, can_offload=can_offload, safe_mode=safe_mode)

    @property
    def reserve_bytes(self) -> int:
        """RAM that is kept for other programs."""
        if self.options.anyway:
            return 0
        return ram_reserve_bytes(self.machine)

    @property
    def gpu_count(self) -> int:
        """GPUs that llama.cpp spreads layers over."""
        return 0 if self.unified else len(self.machine.gpus)

    def steps(self, gpu_layers: int) -> Steps:
        """Parameters of the context when so many layers are offloaded."""
        spare = SPARE_STATES if self.shape.recurrent else 0
        return Steps(
            self.options.max_slots + spare, step_tokens(self.machine, gpu=gpu_layers >= self.layers)
        )

    def needs(self, context: int, candidate: LoadCandidate) -> Needs:
        """Bytes at one context, without flash attention where that is faster and fits."""
        with_flash = self._needs(context, candidate, flash=True)
        if candidate.gpu_layers or candidate.coarse:
            return with_flash
        without = self._needs(context, candidate, flash=False)
        small = max(SCORES_BYTES, self.ram_bytes // 8)
        if without.compute.ram <= small and self.holds(without):
            return without
        return with_flash

    def _needs(self, context: int, candidate: LoadCandidate, *, flash: bool) -> Needs:
        layers = candidate.gpu_layers
        experts = candidate.experts_on_cpu
        steps = self.steps(layers)
        cells = context_cells(context)
        sliding = window_cells(self.shape, cells, steps) if candidate.window_only else cells
        cache = CacheSpec(
            cells, sliding, steps.sequences, candidate.kv_type, padded_values=not flash
        )
        rows = kv_layer_bytes(self.shape, cache)
        first = max(self.layers - layers, 0)
        weights = self._weights(layers, experts)
        repacked = Repacked()
        # With a GPU, weights in RAM stay as the file has them: llama.cpp prefers RAM that the GPU can read.
        if not self._safe_mode and (not layers or self.unified):
            repacked = self._repacked(layers)
        scratch = compute_bytes(self.shape, cells, sliding, steps, flash=flash)
        compute = Split(scratch, 0)
        if layers:
            whole = layers >= self.layers and not experts
            borrowed = 0 if self.unified else borrowed_bytes(self.shape, layers, experts)
            ram = input_bytes(self.shape, cells, steps) if whole else scratch
            # Every GPU runs its part of the graph in a scratch buffer of its own.
            compute = Split(ram, scratch * max(self.gpu_count, 1) + borrowed)
        contexts = gpu_context_bytes(self.machine.gpus) if layers and not self.unified else 0
        # Of a table that is looked up in, the system keeps the rows in use alone where memory is short.
        tables = 0 if self.unified else self._tables
        found = Needs(
            Split(weights.ram - tables - repacked.originals + repacked.copies, weights.gpu),
            Split(sum(rows[:first]), sum(rows[first:])),
            compute,
            Split(overhead_bytes(self.shape, steps), contexts),
            flash,
            repacked.originals + tables,
        )
        if layers and self.gpu_count > 1:
            found = found._replace(shares=self._shares(candidate, rows[first:], found))
        if self._draft is not None:
            found = found.plus(self._draft.needs_of_draft(context, gpu=layers > 0))
        return found.pooled() if self.unified else found

    def _shares(
        self, candidate: LoadCandidate, rows: tuple[int, ...], needs: Needs
    ) -> tuple[GpuShare, ...]:
        """Layers and bytes of each GPU. A layer is never divided between two."""
        weights = layer_weights(self.shape, candidate.gpu_layers, candidate.experts_on_cpu)
        # Prediction layers and the output have weights, and no keys and values here.
        sizes = [weight + row for weight, row in zip_longest(weights, rows, fillvalue=0)]
        fixed = (needs.gpu - sum(sizes)) // self.gpu_count
        counts = split_layers(sizes, [card - fixed for card in self._cards])
        ends = [sum(counts[: place + 1]) for place in range(len(counts))]
        return tuple(
            GpuShare(count, fixed + sum(sizes[end - count : end]), gpu.total_bytes)
            for count, end, gpu in zip(counts, ends, self.machine.gpus, strict=True)
        )

    def needs_of_draft(self, context: int, *, gpu: bool) -> Needs:
        """Bytes of this model as the draft model of another."""
        candidate = LoadCandidate("f16", False, self.layers if gpu else 0)
        found = self._needs(context, candidate, flash=gpu)
        # Both models are in one process.
        more = max(overhead_bytes(self.shape, self.steps(0)) - PROCESS_BYTES, 0)
        return found._replace(overhead=Split(more, 0))

    def holds(self, needs: Needs, spare_bytes: int = 0) -> bool:
        """True if there is memory enough, with `spare_bytes` of RAM left over."""
        host_cache = self.options.cache_ram_bytes or 0
        return needs.ram + host_cache + spare_bytes <= self.ram_bytes and self._gpus_hold(needs)

    def _gpus_hold(self, needs: Needs) -> bool:
        if self.trusted or not needs.shares:
            return self.trusted or needs.gpu <= self.gpu_bytes
        shares = zip(needs.shares, self._cards, strict=True)
        return all(share.size_bytes <= card for share, card in shares)

    def allowed(self, needs: Needs) -> bool:
        """True if the KV cache is within the user's limit."""
        most = self.options.kv_limit_bytes
        return most is None or sum(needs.kv) <= most

    def fits(self, context: int, candidate: LoadCandidate, spare_bytes: int = 0) -> bool:
        """True if it fits within memory and the user's limits, with `spare_bytes` of RAM left over."""
        needs = self.needs(context, candidate)
        return self.allowed(needs) and self.holds(needs, spare_bytes)

    def largest_context(self, candidate: LoadCandidate, most: int, spare_bytes: int = 0) -> int:
        """Longest context up to `most`; 0: none."""
        return largest(lambda context: self.fits(context, candidate, spare_bytes), most)

    def largest_layers(self, context: int, candidate: LoadCandidate) -> int:
        """Most layers that the GPU holds, where the RAM holds the others; 0: none."""
        layers = largest(
            lambda count: self._gpus_hold(
                self.needs(context, candidate._replace(gpu_layers=count))
            ),
            self.layers,
            step=1,
        )
        if self.fits(context, candidate._replace(gpu_layers=layers)):
            return layers
        return 0

    def least_experts(self, context: int, candidate: LoadCandidate) -> int:
        """Fewest layers whose experts must stay in RAM so that the rest fits; 0: not even all help, or the
        model has none."""
        every = self.shape.all_layers
        if not self.shape.experts or self.unified:
            return 0
        on_gpu = largest(
            lambda count: self._gpus_hold(
                self.needs(context, candidate._replace(experts_on_cpu=every - count))
            ),
            every,
            step=1,
        )
        experts = every - on_gpu
        fits = self.fits(context, candidate._replace(experts_on_cpu=experts))
        return experts if fits else 0

    def free_bytes(self, needs: Needs) -> int:
        """Free memory of the kinds that the load uses."""
        return self.ram_bytes + self.gpu_free_bytes(needs)

    def gpu_free_bytes(self, needs: Needs) -> int:
        """Graphics memory within that; where it cannot be read, what is needed."""
        if not needs.gpu:
            return 0
        return needs.gpu if self.trusted else self.gpu_bytes


def _draft_check(
    options: LoadOptions, machine: Machine, *, can_offload: bool, safe_mode: bool
) -> MemoryCheck | None:
    """The check of the draft model, if one was asked for. Raises ModelMissing, ModelInvalid."""
    if options.draft is None:
        return None
    alone = structs.replace(options, draft=None)
    shape = draft_shape(options.draft)
    return MemoryCheck(shape, alone, machine, can_offload=can_offload, safe_mode=safe_mode)


def step_tokens(machine: Machine, *, gpu: bool) -> int:
    """Most tokens of a step: what the time of a step could need at best."""
    if gpu or machine.cores > 15:
        return 512
    return 128 if machine.cores <= 4 else 256
