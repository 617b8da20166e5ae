"""Plans a load with llama.cpp: KV type, flash attention, layers on the GPU, tokens per step, context.

Loads no library. Quantized KV and GPUs need flash attention. On a CPU with f16 KV it depends on the load. Plain
attention reads all cells in use for every row, those of other clients too, and flash attention only the cells
of the row's own text. So a server uses flash attention: SmolLM2 then reads prompts 10 % faster, Gemma 270M 7 %
and Qwen 1.5B 2 %. A chat decodes one long text, and its loads use plain attention while the scores fit. With
SmolLM2, plain attention is slower at first and 1.4 times as fast behind 2,000 tokens. Other models were not
measured behind long texts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from msgspec import structs

from localchat.errors import UsageError
from localchat.fit.hardware import Machine
from localchat.fit.kv_types import FP8, canonical_kv_type
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import (
    MIN_CONTEXT_TOKENS,
    MemoryPlan,
    check_context,
    kv_types,
    largest,
)
from localchat.model_files.architecture import ModelShape
from localchat.units import gigabytes_flag, size, tokens
from localchat_llamacpp.plan.budget import Budget, Budgets, Candidate
from localchat_llamacpp.plan.embedding_plan import plan_embedding
from localchat_llamacpp.plan.prediction_head import has_head

GOAL_TOKENS = 8192
"""Context that is worth a quantized cache, window-only layers or layers in RAM. More must cost nothing."""
_LONG_GOALS = 4
"""Goals of context that are worth a tenth of the layers' experts in RAM."""
_HOST_CACHE_BYTES = 2_000_000_000
_CPU_TOKENS = 32_768
"""Longest default context on a CPU. An 8B model reads a prompt of that length in half an hour."""
_SHORT_TOKENS = 2048
"""Context of a load that the user requests although it does not fit."""
_DEFAULT_SHARE = 4
"""Part of the memory left beside one context that the room for other requests may take unasked."""
_USUAL_CONVERSATION_TOKENS = 8192
"""Room for each request if no context was chosen. With 16 full contexts of Qwen2.5, `batch` took 15 GB for
answers of 300 tokens."""
_FOUR_BITS = (
    "A q4_0 KV cache makes answers worse: SmolLM2-135M lost one of three facts in a long text. "
    "Use q8_0."
)
_FOUR_BIT_KEYS = (
    "A q4_0 KV cache damages models whose keys have biases, like this one: the perplexity of "
    "Qwen2.5-Coder-1.5B rose from 14 to 2,702. Use q8_0."
)


def plan(
    shape: ModelShape,
    options: LoadOptions,
    machine: Machine,
    *,
    can_offload: bool,
) -> MemoryPlan:
    """Plan a load, also of an embedding model. Never raises for lack of memory; `demand` does that.

    can_offload: whether the installed llama.cpp can use a GPU. Raises UsageError for a KV type that this model
    cannot have.
    """
    if shape.pooling:
        return plan_embedding(shape, options, machine, can_offload=can_offload)
    check_options(options)
    if not shape.positions:
        limit = max(shape.context_train, shape.context_scaled)
        check_context(shape.name, options.context_tokens, limit, anyway=options.anyway)
    _check_experts(shape, options, can_offload=can_offload)

    def planned(*, head: bool) -> MemoryPlan:
        budgets = Budgets(shape, options, machine, can_offload=can_offload, head=head)
        return _chooser(budgets).plan()

    without = planned(head=False)
    if not has_head(shape) or not options.speculation or options.draft is not None:
        return without
    if without.gpu_layers and not machine.unified_memory:
        note = "Its prediction head drafts only on a CPU and on Apple silicon."
        return replace(without, notes=(*without.notes, note))
    if not without.fits:
        return without
    with_head = planned(head=True)
    own_bytes = with_head.total_bytes - without.total_bytes
    if _layout(with_head) != _layout(without):
        note = f"Its prediction head is not loaded: with it, the context would be shorter ({size(own_bytes)})."
        return replace(without, notes=(*without.notes, note))
    note = f"Its prediction head drafts, and takes {size(own_bytes)}."
    return replace(with_head, prediction_head=True, notes=(*with_head.notes, note))


def _layout(plan: MemoryPlan) -> tuple[object, ...]:
    """Return what a prediction head must not change."""
    placement = (plan.gpu_layers, plan.experts_on_cpu)
    return (plan.fits, plan.context_tokens, plan.kv_type, plan.window_only, *placement)


def check_options(options: LoadOptions) -> None:
    """Raise UsageError for options that llama.cpp lacks. Settings and flags have checked ranges."""
    if options.quantize:
        raise UsageError(
            f"llama.cpp cannot round a model to {options.quantize} at the load.",
            hint="Leave out --quantize, and take a GGUF file of the quantization that you want: "
            "localchat fit NAME lists them.",
        )


def _check_experts(shape: ModelShape, options: LoadOptions, *, can_offload: bool) -> None:
    if options.experts_on_cpu in ("auto", 0):
        return
    if not shape.experts:
        raise UsageError(
            f"{shape.name} has no experts that could stay in RAM.",
            hint="Leave out --experts-on-cpu; --gpu-layers keeps whole layers in RAM.",
        )
    if not can_offload:
        raise UsageError(
            "llama.cpp is built for the CPU alone here: all experts are in RAM anyway.",
            hint="Leave out --experts-on-cpu, or `localchat doctor --rebuild` builds it for the GPU.",
        )


def _chooser(budgets: Budgets) -> "_Chooser":
    """Read the options: the KV types and layers to try, the context to reach, and notes for the user."""
    shape = budgets.shape
    options = budgets.options
    notes: list[str] = []
    if shape.positions and (options.context_tokens or 0) > shape.positions:
        # A token beyond learned positions (GPT-2, StarCoder, MPT) ends the process.
        notes.append(
            f"The model supports a context of at most {tokens(shape.positions)}, which is used instead of "
            f"{options.context_tokens:,}."
        )
        options = structs.replace(options, context_tokens=shape.positions)
    possible_types = kv_types(shape)
    candidate_types = _candidate_types(options, possible_types)
    layers, layer_notes = _requested_layers(budgets)
    notes += layer_notes
    if options.gpus != 1:
        notes.append("llama.cpp divides the layers among all GPUs, so --gpus has no effect.")
    loss = _loss(options.kv_type, shape)
    if loss:
        notes.append(loss)
    trained = shape.context_train
    return _Chooser(
        budgets=budgets,
        options=options,
        possible_types=possible_types,
        candidate_types=candidate_types,
        layers=layers,
        goal=options.context_tokens or min(trained, GOAL_TOKENS),
        notes=tuple(notes),
        loss=loss,
    )


def _loss(kv_type: str | None, shape: ModelShape) -> str:
    """Describe the quality that a chosen KV type costs, if any."""
    if kv_type == "q4_0":
        return _FOUR_BIT_KEYS if shape.key_biases else _FOUR_BITS
    return ""


def _candidate_types(options: LoadOptions, possible: tuple[str, ...]) -> tuple[str, ...]:
    """Return the KV types to try, in order."""
    if options.kv_type is None:
        # q8_0 loses nothing noticeable. The user must ask for anything coarser.
        return tuple(name for name in ("f16", "q8_0") if name in possible)
    requested = canonical_kv_type(options.kv_type)
    if requested not in possible:
        hint = f"Possible here: {', '.join(possible)}."
        if requested == FP8:
            hint += " The CUDA backend has fp8, for safetensors."
        raise UsageError(f"This model's KV cache cannot be {options.kv_type}.", hint=hint)
    return (options.kv_type,)


def _requested_layers(budgets: Budgets) -> tuple[int | None, list[str]]:
    """Return the number of layers on the GPU (None: as many as fit), and notes."""
    requested = budgets.options.gpu_layers
    gpus = budgets.machine.gpus
    if not budgets.can_offload:
        if requested == "auto" and gpus:
            names = ", ".join(sorted({gpu.name for gpu in gpus}))
            note = (
                f"llama.cpp is built for the CPU alone here, so {names} stays idle; "
                "`localchat doctor --rebuild` builds it for the GPU."
            )
            return 0, [note]
        if requested not in ("auto", 0):
            note = (
                "llama.cpp is built for the CPU alone here: no layer goes to a GPU. `localchat doctor` "
                "says whether another build would help."
            )
            return 0, [note]
        return 0, []
    if requested == "all" or (requested == "auto" and budgets.unified):
        return budgets.layers, []
    if requested == "auto":
        return (None if gpus else 0), []
    notes = []
    if requested and budgets.trusted:
        notes.append("The GPU's memory cannot be read here: its layers are taken on trust.")
    return min(requested, budgets.layers), notes


@dataclass(frozen=True, slots=True)
class _Chooser:
    """Chooses the first candidate that fits."""

    budgets: Budgets
    options: LoadOptions
    possible_types: tuple[str, ...]
    candidate_types: tuple[str, ...]
    layers: int | None
    """Layers on the GPU. None: as many as fit."""
    goal: int
    """Context below which a coarser candidate is tried."""
    notes: tuple[str, ...]
    loss: str

    @property
    def trained(self) -> int:
        """Context that the model was trained for."""
        return self.budgets.shape.context_train

    @property
    def min_context(self) -> int:
        """Shortest context that is chosen without a request."""
        return min(MIN_CONTEXT_TOKENS, self.trained)

    def _candidates(self) -> Iterator[Candidate]:
        """Yield the candidates, best first.

        Without a requested number of layers: all, then all without experts, then as many as fit at the goal,
        then none.
        """
        all_layers = self.budgets.layers
        if self.layers is not None:
            yield from self._kv_candidates(self.layers)
            if self.layers == all_layers and self.budgets.gpu_count:
                yield from self._expert_candidates()
            return
        yield from self._kv_candidates(all_layers)
        yield from self._expert_candidates()
        partial = [
            candidate._replace(gpu_layers=count)
            for candidate in self._kv_candidates(0)
            if (count := self.budgets.max_gpu_layers(self.goal, candidate))
        ]
        yield from self._preferred(partial, lambda candidate: candidate.gpu_layers)
        yield from self._kv_candidates(0)

    def _kv_candidates(self, layers: int) -> Iterator[Candidate]:
        """Yield the KV types and windows for a number of layers on the GPU."""
        requested = self.options.experts_on_cpu
        window = self.budgets.shape.window
        experts = 0
        if requested != "auto" and layers:
            experts = min(requested, self.budgets.shape.all_layers)
        for kv_type in self.candidate_types:
            candidate = Candidate(kv_type, bool(window), layers, experts)
            if not (self.options.window_only and window):
                yield candidate._replace(window_only=False)
            if window:
                yield candidate

    def _expert_candidates(self) -> Iterator[Candidate]:
        """Yield all layers on the GPU, and the experts that fit there at the goal.

        A token reads few of the experts and everything else, so experts cost least in RAM.
        """
        if self.options.experts_on_cpu != "auto":
            return
        candidates = [
            candidate._replace(experts_on_cpu=count)
            for candidate in self._kv_candidates(self.budgets.layers)
            if (count := self._experts_on_cpu(candidate))
        ]
        yield from self._preferred(candidates, lambda candidate: -candidate.experts_on_cpu)

    def _experts_on_cpu(self, candidate: Candidate) -> int:
        """Return the layers whose experts stay in RAM, a few more for a long context. 0: none help."""
        count = self.budgets.min_experts_on_cpu(self.goal, candidate)
        if not count or self.options.context_tokens is not None:
            return count
        long_context = min(_LONG_GOALS * self.goal, self.trained)
        long_count = self.budgets.min_experts_on_cpu(long_context, candidate)
        if long_count and long_count - count <= self.budgets.shape.all_layers // 10:
            return long_count
        return count

    def _preferred(
        self, candidates: list[Candidate], on_gpu: Callable[[Candidate], int]
    ) -> list[Candidate]:
        """Prefer a window-only candidate with a tenth more of the layers on the GPU."""
        ordered = list(candidates)
        enough = self.budgets.layers // 10
        for index in range(len(ordered) - 1):
            first = ordered[index]
            second = ordered[index + 1]
            is_window_variant = first.kv_type == second.kv_type and second.window_only
            if is_window_variant and on_gpu(second) - on_gpu(first) >= enough:
                ordered[index : index + 2] = [second, first]
        return ordered

    def plan(self) -> MemoryPlan:
        """See the function `plan`."""
        best = self._best()
        if not self.options.require_gpu or best.gpu_layers:
            return best
        missing, advice = self._no_gpu()
        return replace(
            best, fits=False, missing=missing, advice=advice, cache_ram_bytes=0, notes=()
        )

    def _best(self) -> MemoryPlan:
        tried: list[tuple[int, Candidate]] = []
        max_context = max(self.trained, self.goal)
        for candidate in self._candidates():
            longest = self.budgets.longest_context(candidate, max_context)
            if longest >= self.goal:
                return self._fitting(candidate, longest)
            tried.append((longest, candidate))
        longest, candidate = max(tried, key=lambda pair: pair[0])
        if self.options.context_tokens is None and longest >= self.min_context:
            return self._fitting(candidate, longest)
        if self.options.anyway:
            return self._overcommitted(candidate, longest)
        return self._refused(candidate, self.goal, longest)

    def _fitting(self, candidate: Candidate, longest: int) -> MemoryPlan:
        context = self.options.context_tokens
        if context is None:
            context = max(self._comfortable_context(candidate, longest), min(self.goal, longest))
        room = self._room(candidate, context)
        notes = (
            *self.notes,
            *self._choice_notes(candidate, context),
            *self._placement_notes(candidate, context),
            *self._room_notes(candidate, context, room),
        )
        longest = self._longest_with_windows(candidate, longest)
        plan = self._result(candidate, context, longest, room, fits=True, notes=notes)
        if (self.options.cache_ram_bytes or 0) > plan.cache_ram_bytes:
            note = f"--cache-ram is {size(plan.cache_ram_bytes)} here: the load leaves no more."
            return replace(plan, notes=(*plan.notes, note))
        return plan

    def _longest_with_windows(self, candidate: Candidate, longest: int) -> int:
        """Return the longest context that a request for it would get.

        Where only the windows fit, sliding-window layers keep no more than those.
        """
        if candidate.window_only or not self.budgets.shape.window:
            return longest
        windowed = candidate._replace(window_only=True)
        return max(longest, self.budgets.longest_context(windowed, max(self.trained, self.goal)))

    def _refused(self, candidate: Candidate, context: int, longest: int) -> MemoryPlan:
        plan = self._result(candidate, context, longest, context, fits=False, notes=self.notes)
        budget = self.budgets.budget(context, candidate)
        return replace(
            plan,
            missing=self._exceeded_limit(budget, context),
            advice=tuple(self._limit_advice(budget)),
        )

    def _overcommitted(self, candidate: Candidate, longest: int) -> MemoryPlan:
        """Return the plan that the user requests although it does not fit. The user's own limits still apply.

        The context is short unless the user requested one.
        """
        short = max(longest, min(_SHORT_TOKENS, self.trained))
        context = self.options.context_tokens or short
        room = self._room(candidate, context)
        notes = (*self.notes, *self._room_notes(candidate, context, room))
        plan = self._result(candidate, context, longest, room, fits=True, notes=notes)
        if plan.total_bytes <= plan.free_bytes:
            return self._refused(candidate, context, longest)
        over = f"{size(plan.total_bytes)} are needed and {size(plan.free_bytes)} are free"
        return replace(plan, notes=(*plan.notes, f"{over}: the system may end the model."))

    def _comfortable_context(self, candidate: Candidate, longest: int) -> int:
        """Return the default context: the longest that leaves other programs half of the RAM beside the model.

        On a CPU it is limited, and a chat there has no longer one than plain attention allows. A single request
        that is longer has none of these limits.
        """
        budgets = self.budgets
        options = self.options
        host_spare = self._spare_for_host()
        left = max(budgets.ram_bytes - budgets.budget(self.goal, candidate).ram, 0)
        limit = longest
        if not candidate.gpu_layers:
            limit = min(longest, _CPU_TOKENS)
        context = budgets.longest_context(candidate, limit, max(host_spare, left // 2))
        if not (options.room_for_slots or candidate.gpu_layers or candidate.is_quantized):
            context = self._longest_without_flash(candidate, context)
        request_tokens = min(options.single_request_tokens, longest)
        if request_tokens <= context:
            return context
        return budgets.longest_context(candidate, request_tokens, host_spare)

    def _longest_without_flash(self, candidate: Candidate, limit: int) -> int:
        return largest(lambda context: not self.budgets.budget(context, candidate).flash, limit)

    def _spare_for_host(self) -> int:
        if self.options.cache_ram_bytes is not None:
            return self.options.cache_ram_bytes
        return min(_HOST_CACHE_BYTES // 2, self.budgets.ram_bytes // 8)

    def _room(self, candidate: Candidate, context: int) -> int:
        """Return the tokens of the KV cache, as far as memory allows.

        Each slot has room for a context that the user chose, or else for a usual conversation.
        """
        options = self.options
        budgets = self.budgets
        # Long rope factors follow the size of the cache, so more room would change the answers.
        if not options.room_for_slots or options.max_slots < 2 or budgets.shape.long_rope:
            return context
        spare = self._spare_for_host()
        if options.more_slots:
            left = max(budgets.ram_bytes - budgets.budget(context, candidate).ram, 0)
            spare = left - left // _DEFAULT_SHARE
        slot_tokens = context
        if options.context_tokens is None:
            slot_tokens = min(context, _USUAL_CONVERSATION_TOKENS)
        wanted = max(context, options.max_slots * slot_tokens)
        return max(budgets.longest_context(candidate, wanted, spare), context)

    def _result(
        self,
        candidate: Candidate,
        context: int,
        longest: int,
        room: int,
        *,
        fits: bool,
        notes: tuple[str, ...],
    ) -> MemoryPlan:
        budgets = self.budgets
        budget = budgets.budget(room, candidate)
        return MemoryPlan(
            backend="llama.cpp",
            weights_bytes=sum(budget.weights),
            kv_bytes=sum(budget.kv),
            compute_bytes=sum(budget.compute),
            overhead_bytes=sum(budget.overhead),
            free_bytes=budgets.free_bytes(budget),
            fits=fits,
            context_tokens=context,
            max_context_tokens=longest,
            kv_type=candidate.kv_type,
            flash_attention=budget.flash,
            gpu_layers=candidate.gpu_layers,
            cache_ram_bytes=self._host_cache_bytes(budget) if fits else 0,
            max_step_tokens=budgets.steps(candidate.gpu_layers).tokens,
            notes=notes,
            loss=self.loss,
            layers=budgets.layers,
            gpu_bytes=budget.gpu,
            gpu_free_bytes=budgets.gpu_free_bytes(budget),
            window_only=candidate.window_only,
            mapped_bytes=budget.mapped,
            kv_types=self.possible_types,
            kv_tokens=room,
            reserve_bytes=budgets.reserve_bytes,
            experts_on_cpu=candidate.experts_on_cpu,
            gpu_shares=budget.shares,
        )

    def _host_cache_bytes(self, budget: Budget) -> int:
        """Return the RAM for swapped prefixes: as requested, else half of what stays free, at most 2 GB."""
        left = max(self.budgets.ram_bytes - budget.ram, 0)
        if self.options.cache_ram_bytes is not None:
            return min(self.options.cache_ram_bytes, left)
        return min(left // 2, _HOST_CACHE_BYTES)

    def _choice_notes(self, candidate: Candidate, context: int) -> Iterator[str]:
        """Explain the context, the KV type and the windows."""
        if (self.options.context_tokens or 0) > self.trained:
            yield f"The model was trained for {tokens(self.trained)}; beyond that it may ramble."
        if self.options.kv_type is None and candidate.kv_type != self.candidate_types[0]:
            yield f"The KV cache is {candidate.kv_type}, so that {tokens(context)} fit."
        window = self.budgets.shape.window
        if candidate.window_only:
            yield "Sliding-window layers keep only their window, to save memory."
        elif window:
            kv = sum(self.budgets.budget(context, candidate).kv)
            windowed = candidate._replace(window_only=True)
            saved = kv - sum(self.budgets.budget(context, windowed).kv)
            if saved > 0:
                yield (
                    f"Layers with a sliding window of {window:,} keep all tokens, so that prompts can be "
                    f"reused anywhere. --window-only saves {size(saved)}."
                )
        if 0 < candidate.gpu_layers < self.budgets.layers:
            yield f"{candidate.gpu_layers} of {self.budgets.layers} layers go to the GPU."

    def _placement_notes(self, candidate: Candidate, context: int) -> Iterator[str]:
        """Explain experts in RAM, and the layers of each of several GPUs."""
        if candidate.experts_on_cpu:
            yield (
                f"The experts of {candidate.experts_on_cpu} of {self.budgets.shape.all_layers} layers stay in "
                "RAM; everything that each token reads is on the GPU."
            )
        if shares := self.budgets.budget(context, candidate).shares:
            layers = (f"{share.layers} ({size(share.size_bytes)})" for share in shares)
            yield f"Layers of each GPU: {', '.join(layers)}."

    def _room_notes(self, candidate: Candidate, context: int, room: int) -> Iterator[str]:
        """Explain what the room for several requests costs."""
        if room <= context:
            return
        shared = sum(self.budgets.budget(room, candidate).kv)
        yield (
            f"Up to {self.options.max_slots} requests at once share a KV cache of {tokens(room)} "
            f"({size(shared)}). --kv-gb limits it."
        )

    def _no_gpu(self) -> tuple[str, tuple[str, ...]]:
        """Return why a required GPU is not used, and what to do."""
        machine = self.budgets.machine
        names = ", ".join(sorted({gpu.name for gpu in machine.gpus})) or "the GPU"
        if self.options.gpu_layers == 0:
            return "a GPU is required, but --gpu-layers is 0.", ()
        if not self.budgets.can_offload:
            return (
                "a GPU is required, and llama.cpp is built for the CPU alone here.",
                ("Build it for your GPU: `localchat doctor --rebuild`.",),
            )
        if not machine.gpus and not self.budgets.unified:
            note = ""
            if machine.gpu_note:
                note = f" {machine.gpu_note}"
            return (
                f"a GPU is required, and none was found.{note}",
                (
                    "Leave --require-gpu out to compute on the CPU; `localchat doctor` shows devices.",
                ),
            )
        return (
            f"a GPU is required, and {size(machine.gpu_free_bytes)} free on {names} hold not even "
            "one layer.",
            ("Close what else uses the GPU, or take a shorter --ctx.",),
        )

    def _exceeded_limit(self, budget: Budget, context: int) -> str:
        """Return the message if only a limit of the user forbids the load, else empty."""
        budgets = self.budgets
        limit = self.options.kv_limit_bytes
        if limit is None or budgets.is_allowed(budget) or not budgets.has_room(budget):
            return ""
        return (
            f"the KV cache of {tokens(context)} takes {size(sum(budget.kv))}, and --kv-gb allows "
            f"{size(limit)}."
        )

    def _limit_advice(self, budget: Budget) -> Iterator[str]:
        """Suggest raising limits that the user set."""
        budgets = self.budgets
        if not budgets.is_allowed(budget) and budgets.has_room(budget):
            kv = gigabytes_flag(sum(budget.kv))
            yield f"--kv-gb {kv}: what {tokens(self.goal)} take."
        limit = self.options.gpu_limit_bytes
        if (
            limit is not None
            and budgets.gpu_count == 1
            and (limit < budget.gpu <= budgets.all_gpu_bytes)
        ):
            yield f"--vram-gb {gigabytes_flag(budget.gpu)}: what the layers on the GPU take."
