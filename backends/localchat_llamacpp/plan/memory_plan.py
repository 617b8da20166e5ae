"""Plans a load with llama.cpp: KV type, flash attention, layers on the GPU, tokens a step, context.

Loads no library. Choices, measured on CPUs: flash attention off for f16 KV (decode 1.2 to
2.7 times faster) while its scores fit, on for quantized KV, which needs it; 128 tokens a step on few cores,
because more only lengthen a step.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from msgspec import structs

from localchat.errors import UsageError
from localchat.fit.hardware import Machine
from localchat.fit.kv_types import FP8, canonical_kv_type
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import (
    MIN_CONTEXT_TOKENS,
    MemoryPlan,
    check_context,
    is_rough,
    kv_types,
    largest,
    smaller_quantization,
)
from localchat.model_files.architecture import ModelShape
from localchat.units import gigabytes_flag, size, tokens
from localchat_llamacpp.plan.load_candidates import LoadCandidate, MemoryCheck, Needs

GOAL_TOKENS = 8192
"""Context worth a quantized cache, window-only layers or layers left in RAM; a longer one must cost nothing."""
_ROOMY = 4
"""A context of so many times the goal may cost the experts of a tenth of the layers."""
_HOST_CACHE_BYTES = 2_000_000_000
_SHORT_TOKENS = 2048
"""Context of a load that does not fit and is wanted all the same."""
_LITTLE = 20
"""Weights of less than this part of the need are not the reason that it does not fit."""
_SHORT_REQUEST_TOKENS = 2048
"""Room for each slot that is worth flash attention, which makes decoding slower on a CPU."""
_DEFAULT_SHARE = 4
"""Part of the free memory that room for more slots takes if the user named no number of them."""
_FOUR_BITS = (
    "A q4_0 KV cache makes answers worse: SmolLM2-135M lost one of three facts in a long text. "
    "Use q8_0."
)
_FOUR_BIT_KEYS = (
    "A q4_0 KV cache damages models whose keys have biases, like this one: the perplexity of "
    "Qwen2.5-Coder-1.5B rose from 14 to 2,702. Use q8_0."
)
_MOST_SLOTS = 255
"""llama.cpp counts 256 sequences, and one is the scratch sequence."""


def plan(
    shape: ModelShape, options: LoadOptions, machine: Machine, *, can_offload: bool, safe_mode: bool
) -> MemoryPlan:
    """The verdict on a load. Never raises for lack of memory; `demand` does that.

    can_offload: whether the installed llama.cpp can. safe_mode: no repacked copies. Raises UsageError for a
    KV type that this model cannot have, and for numbers out of range.
    """
    _check(options)
    if not shape.positions:
        limit = max(shape.context_train, shape.context_scaled)
        check_context(shape.name, options.context_tokens, limit, anyway=options.anyway)
    _check_experts(shape, options, can_offload=can_offload)
    memory = MemoryCheck(shape, options, machine, can_offload=can_offload, safe_mode=safe_mode)
    return _CandidateChooser(memory, can_offload=can_offload).plan()


def _check(options: LoadOptions) -> None:
    if options.context_tokens is not None and options.context_tokens < 1:
        raise UsageError(f"A context of {options.context_tokens} tokens is not possible.")
    if not 1 <= options.max_slots <= _MOST_SLOTS:
        raise UsageError(f"{options.max_slots} sequences at once: 1 to {_MOST_SLOTS} are possible.")
    if options.head_int8:
        raise UsageError(
            "llama.cpp cannot round the output head at the load.",
            hint="Leave out --head-int8: a GGUF file stores its head quantized already.",
        )
    if options.quantize:
        raise UsageError(
            f"llama.cpp cannot round a model to {options.quantize} at the load.",
            hint="Leave out --quantize, and take a GGUF file of the quantization that you want: "
            "localchat fit NAME lists them.",
        )
    if isinstance(options.gpu_layers, int) and options.gpu_layers < 0:
        raise UsageError(
            f"{options.gpu_layers} layers on the GPU are not possible.",
            hint="Give a number, auto or all.",
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


class _CandidateChooser:
    """Chooses the first candidate that fits."""

    def __init__(self, memory: MemoryCheck, *, can_offload: bool) -> None:
        self.memory = memory
        self.can_offload = can_offload
        self.trained = memory.shape.context_train
        self.notes: list[str] = []
        self.options = self._within_positions(memory.options)
        self.possible_types = kv_types(memory.shape)
        self.types = self._types()
        self.layers = self._layers()
        # Below this context a coarser candidate is tried.
        self.goal = self.options.context_tokens or min(self.trained, GOAL_TOKENS)
        self.most = max(self.trained, self.goal)
        self.least = min(MIN_CONTEXT_TOKENS, self.trained)
        if self.options.kv_type == "q4_0":
            self.notes.append(_FOUR_BIT_KEYS if memory.shape.key_biases else _FOUR_BITS)

    def _within_positions(self, options: LoadOptions) -> LoadOptions:
        """The options within learned positions (GPT-2, StarCoder, MPT): a token after the last ends the
        process."""
        last = self.memory.shape.positions
        if not last or (options.context_tokens or 0) <= last:
            return options
        self.notes.append(
            f"The model supports a context of at most {tokens(last)}, which is used instead of "
            f"{options.context_tokens:,}."
        )
        return structs.replace(options, context_tokens=last)

    def _types(self) -> tuple[str, ...]:
        if self.options.kv_type is None:
            # q8_0 loses nothing that can be noticed; anything coarser must be asked for.
            return tuple(name for name in ("f16", "q8_0") if name in self.possible_types)
        asked = canonical_kv_type(self.options.kv_type)
        if asked not in self.possible_types:
            raise UsageError(
                f"This model's KV cache cannot be {self.options.kv_type}.",
                hint=f"Possible here: {', '.join(self.possible_types)}."
                + (" The CUDA backend has fp8, for safetensors." if asked == FP8 else ""),
            )
        return (self.options.kv_type,)

    def _layers(self) -> int | None:
        """A number of layers, or None: as many as fit."""
        asked = self.options.gpu_layers
        machine = self.memory.machine
        if not self.can_offload:
            if asked == "auto" and machine.gpus:
                names = ", ".join(sorted({gpu.name for gpu in machine.gpus}))
                self.notes.append(
                    f"llama.cpp is built for the CPU alone here, so {names} stays idle; "
                    "`localchat doctor --rebuild` builds it for the GPU."
                )
            elif asked not in ("auto", 0):
                self.notes.append(
                    "llama.cpp is built for the CPU alone here: no layer goes to a GPU."
                )
            return 0
        if asked == "all" or (asked == "auto" and self.memory.unified):
            return self.memory.layers
        if asked == "auto":
            return None if machine.gpus else 0
        if asked and self.memory.trusted:
            self.notes.append(
                "The GPU's memory cannot be read here: its layers are taken on trust."
            )
        return min(asked, self.memory.layers)

    def _kv_candidates(self, layers: int) -> Iterator[LoadCandidate]:
        asked = self.options.experts_on_cpu
        experts = 0 if asked == "auto" or not layers else min(asked, self.memory.shape.all_layers)
        for kv_type in self.types:
            if not (self.options.window_only and self.memory.shape.window):
                yield LoadCandidate(kv_type, False, layers, experts)
            if self.memory.shape.window:
                yield LoadCandidate(kv_type, True, layers, experts)

    def _expert_candidates(self) -> Iterator[LoadCandidate]:
        """All layers on the GPU, and of the experts as many as fit there at the goal.

        A token reads few of the experts and all of the rest, so they are what costs least in RAM.
        """
        if self.options.experts_on_cpu != "auto":
            return
        found = [
            candidate._replace(experts_on_cpu=count)
            for candidate in self._kv_candidates(self.memory.layers)
            if (count := self._experts(candidate))
        ]
        yield from self._worth(found, lambda one: -one.experts_on_cpu)

    def _experts(self, candidate: LoadCandidate) -> int:
        """Layers whose experts stay in RAM, a few more where a long context is the gain; 0: none help."""
        count = self.memory.least_experts(self.goal, candidate)
        if not count or self.options.context_tokens is not None:
            return count
        roomy = self.memory.least_experts(min(_ROOMY * self.goal, self.trained), candidate)
        if roomy and roomy - count <= self.memory.shape.all_layers // 10:
            return roomy
        return count

    def _worth(
        self, found: list[LoadCandidate], on_gpu: Callable[[LoadCandidate], int]
    ) -> list[LoadCandidate]:
        """The candidates, best first: one that keeps windows only goes before one that keeps everything, where
        that puts a tenth of the layers more on the GPU."""
        enough = self.memory.layers // 10
        for place in range(len(found) - 1):
            first = found[place]
            second = found[place + 1]
            same = first.kv_type == second.kv_type and second.window_only
            if same and on_gpu(second) - on_gpu(first) >= enough:
                found[place], found[place + 1] = second, first
        return found

    def _candidates(self) -> Iterator[LoadCandidate]:
        """Candidates, best first. Where the layers are chosen here: all, then all without experts, then as
        many as fit at the goal, then none."""
        if self.layers is not None:
            yield from self._kv_candidates(self.layers)
            if self.layers == self.memory.layers and self.memory.gpu_count:
                yield from self._expert_candidates()
            return
        yield from self._kv_candidates(self.memory.layers)
        yield from self._expert_candidates()
        found = [
            candidate._replace(gpu_layers=count)
            for candidate in self._kv_candidates(0)
            if (count := self.memory.largest_layers(self.goal, candidate))
        ]
        yield from self._worth(found, lambda one: one.gpu_layers)
        yield from self._kv_candidates(0)

    def plan(self) -> MemoryPlan:
        """See the function `plan`."""
        found = self._best()
        if not self.options.require_gpu or found.gpu_layers:
            return found
        missing, advice = self._no_gpu()
        return replace(
            found, fits=False, missing=missing, advice=advice, cache_ram_bytes=0, notes=()
        )

    def _no_gpu(self) -> tuple[str, tuple[str, ...]]:
        """Why a required GPU is not used, and what to do."""
        machine = self.memory.machine
        names = ", ".join(sorted({gpu.name for gpu in machine.gpus})) or "the GPU"
        if self.options.gpu_layers == 0:
            return "a GPU is required, but --gpu-layers is 0.", ()
        if not self.can_offload:
            return (
                "a GPU is required, and llama.cpp is built for the CPU alone here.",
                ("Build it for your GPU: `localchat doctor --rebuild`.",),
            )
        if not machine.gpus and not self.memory.unified:
            note = f" {machine.gpu_note}" if machine.gpu_note else ""
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

    def _best(self) -> MemoryPlan:
        found: list[tuple[int, LoadCandidate]] = []
        for candidate in self._candidates():
            longest = self.memory.largest_context(candidate, self.most)
            if longest >= self.goal:
                return self._fitting(candidate, longest)
            found.append((longest, candidate))
        longest, candidate = max(found, key=lambda pair: pair[0])
        if self.options.context_tokens is None and longest >= self.least:
            return self._fitting(candidate, longest)
        if self.options.anyway:
            return self._overcommitted(candidate, longest)
        advice = tuple(self._advice(candidate))
        return self._result(candidate, self.goal, longest, fits=False, advice=advice)

    def _overcommitted(self, candidate: LoadCandidate, longest: int) -> MemoryPlan:
        """The plan that the user wants although it does not fit, with a short context unless one was asked.

        The user's own limits hold all the same."""
        short = max(longest, min(_SHORT_TOKENS, self.trained))
        context = self.options.context_tokens or short
        plan = self._result(candidate, context, longest, fits=True)
        if plan.total_bytes <= plan.free_bytes:
            advice = tuple(self._advice(candidate))
            return self._result(candidate, context, longest, fits=False, advice=advice)
        over = f"{size(plan.total_bytes)} are needed and {size(plan.free_bytes)} are free"
        return replace(plan, notes=(*plan.notes, f"{over}: the system may end the model."))

    def _fitting(self, candidate: LoadCandidate, longest: int) -> MemoryPlan:
        context = self.options.context_tokens
        if context is None:
            context = max(self._comfortable(candidate, longest), min(self.goal, longest))
        elif context > self.trained:
            self.notes.append(
                f"The model was trained for {tokens(self.trained)}; beyond that it may ramble."
            )
        if self.options.kv_type is None and candidate.kv_type != self.types[0]:
            self.notes.append(
                f"The KV cache is {candidate.kv_type}, so that {tokens(context)} fit."
            )
        if candidate.window_only:
            self.notes.append("Sliding-window layers keep only their window, to save memory.")
        elif self.memory.shape.window:
            self.notes += self._window_note(candidate, context)
        if 0 < candidate.gpu_layers < self.memory.layers:
            self.notes.append(
                f"{candidate.gpu_layers} of {self.memory.layers} layers go to the GPU."
            )
        self.notes += self._placement_notes(candidate, context)
        return self._result(candidate, context, longest, fits=True)

    def _window_note(self, candidate: LoadCandidate, context: int) -> Iterator[str]:
        """What keeping only the windows would save."""
        whole, windows = (
            sum(self.memory.needs(context, one).kv)
            for one in (candidate, candidate._replace(window_only=True))
        )
        if windows < whole:
            yield (
                f"Layers with a sliding window of {self.memory.shape.window:,} keep all tokens, so that "
                f"prompts can be reused anywhere. --window-only saves {size(whole - windows)}."
            )

    def _room(self, candidate: LoadCandidate, context: int) -> int:
        """Tokens of the KV cache: a full context for each slot, as far as memory allows."""
        shape = self.memory.shape
        options = self.options
        # Long rope factors follow the size of the cache, so more room would change the answers.
        if not options.room_for_slots or options.max_slots < 2 or shape.long_rope:
            return context
        wanted = options.max_slots * context
        spare = min(_HOST_CACHE_BYTES // 2, self.memory.ram_bytes // 8)
        if options.more_slots:
            spare = self.memory.ram_bytes - self.memory.ram_bytes // _DEFAULT_SHARE
        room = self.memory.largest_context(candidate, wanted, spare)
        if not candidate.gpu_layers and not candidate.coarse and room > context:
            quick = largest(lambda count: not self.memory.needs(count, candidate).flash, room)
            room = min(room, max(quick, options.max_slots * _SHORT_REQUEST_TOKENS))
        return max(room, context)

    def _room_note(self, candidate: LoadCandidate, context: int, room: int) -> Iterator[str]:
        """What the room for requests at once costs."""
        if room <= context:
            return
        one, all_ = (sum(self.memory.needs(count, candidate).kv) for count in (context, room))
        slots = self.options.max_slots
        limit = "" if room >= slots * context else f" of {tokens(slots * context)}"
        yield (
            f"{slots} requests at once share a KV cache of {room:,}{limit or ' tokens'}: {size(all_)}, where "
            f"one of {tokens(context)} takes {size(one)}. --kv-gb limits it."
        )

    def _placement_notes(self, candidate: LoadCandidate, context: int) -> Iterator[str]:
        """Sentences on experts in RAM, and on the layers of each of several GPUs."""
        if candidate.experts_on_cpu:
            every = self.memory.shape.all_layers
            yield (
                f"The experts of {candidate.experts_on_cpu} of {every} layers stay in RAM; everything "
                "that each token reads is on the GPU."
            )
        if shares := self.memory.needs(context, candidate).shares:
            told = (f"{one.layers} ({size(one.size_bytes)})" for one in shares)
            yield f"Layers of each GPU: {', '.join(told)}."

    def _comfortable(self, candidate: LoadCandidate, longest: int) -> int:
        """The default context: the longest that leaves RAM for the host cache, and on a CPU does not force
        flash attention upon every step."""
        spare = min(_HOST_CACHE_BYTES // 2, self.memory.ram_bytes // 8)
        context = self.memory.largest_context(candidate, longest, spare)
        if candidate.gpu_layers or candidate.coarse:
            return context
        return max(
            largest(lambda count: not self.memory.needs(count, candidate).flash, context), self.goal
        )

    def _result(
        self,
        candidate: LoadCandidate,
        context: int,
        longest: int,
        *,
        fits: bool,
        advice: tuple[str, ...] = (),
    ) -> MemoryPlan:
        room = self._room(candidate, context) if fits else context
        needs = self.memory.needs(room, candidate)
        self.notes += self._room_note(candidate, context, room)
        return MemoryPlan(
            backend="llama.cpp",
            weights_bytes=sum(needs.weights),
            kv_bytes=sum(needs.kv),
            compute_bytes=sum(needs.compute),
            overhead_bytes=sum(needs.overhead),
            free_bytes=self.memory.free_bytes(needs),
            fits=fits,
            context_tokens=context,
            max_context_tokens=longest,
            kv_type=candidate.kv_type,
            flash_attention=needs.flash,
            gpu_layers=candidate.gpu_layers,
            cache_ram_bytes=self._host_cache_bytes(needs) if fits else 0,
            max_step_tokens=self.memory.steps(candidate.gpu_layers).tokens,
            advice=advice,
            notes=tuple(self.notes),
            layers=self.memory.layers,
            gpu_bytes=needs.gpu,
            gpu_free_bytes=self.memory.gpu_free_bytes(needs),
            missing="" if fits else self._forbidden(needs, context),
            window_only=candidate.window_only,
            mapped_bytes=needs.mapped,
            kv_types=self.possible_types,
            kv_tokens=room,
            reserve_bytes=self.memory.reserve_bytes,
            experts_on_cpu=candidate.experts_on_cpu,
            gpu_shares=needs.shares,
        )

    def _host_cache_bytes(self, needs: Needs) -> int:
        """RAM for swapped prefixes: as requested, else half of what stays free, at most 2 GB."""
        if self.options.cache_ram_bytes is not None:
            return self.options.cache_ram_bytes
        return min(max(self.memory.ram_bytes - needs.ram, 0) // 2, _HOST_CACHE_BYTES)

    def _forbidden(self, needs: Needs, context: int) -> str:
        """The user's own limit that forbids a load for which there is memory; empty: none does."""
        most = self.options.kv_limit_bytes
        memory = self.memory
        if spare := self._spare_bytes(needs):
            return (
                f"--cache-ram reserves {size(self.options.cache_ram_bytes or 0)} for idle KV, but the load "
                f"leaves only {size(spare)} free."
            )
        if most is None or memory.allowed(needs) or not memory.holds(needs):
            return ""
        return (
            f"the KV cache of {tokens(context)} takes {size(sum(needs.kv))}, and --kv-gb allows "
            f"{size(most)}."
        )

    def _spare_bytes(self, needs: Needs) -> int:
        """RAM left by a load that only the requested host cache keeps from fitting; 0: something else does."""
        host_cache = self.options.cache_ram_bytes or 0
        memory = self.memory
        if memory.holds(needs) or not memory.allowed(needs) or not memory.holds(needs, -host_cache):
            return 0
        return memory.ram_bytes - needs.ram

    def _raised_limits(self, candidate: LoadCandidate) -> Iterator[str]:
        """Flags of the user that could be raised."""
        needs = self.memory.needs(self.goal, candidate)
        most = self.options.gpu_limit_bytes
        if spare := self._spare_bytes(needs):
            yield f"--cache-ram {spare >> 20}: what the load leaves free."
        if not self.memory.allowed(needs) and self.memory.holds(needs):
            kv = gigabytes_flag(sum(needs.kv))
            yield f"--kv-gb {kv}: what {tokens(self.goal)} take."
        if (
            most is not None
            and self.memory.gpu_count == 1
            and most < needs.gpu <= self.memory.all_gpu_bytes
        ):
            yield f"--vram-gb {gigabytes_flag(needs.gpu)}: what {candidate.gpu_layers} layers take."

    def _advice(self, candidate: LoadCandidate) -> Iterator[str]:
        """Sentences on what would help, cheapest for the user first."""
        yield from self._raised_limits(candidate)
        small = (
            candidate._replace(kv_type="q8_0")
            if "q8_0" in self.possible_types and not candidate.coarse
            else candidate
        )
        if small != candidate and self.memory.fits(self.goal, small):
            yield f"--kv-type q8_0: {self._total(self.goal, small)} in all."
        for shorter, flag in ((candidate, ""), (small, f" --kv-type {small.kv_type}")):
            longest = self.memory.largest_context(shorter, min(self.goal, self.trained))
            if self.least <= longest < self.goal:
                yield f"--ctx {longest}{flag}: {self._total(longest, shorter)} in all."
                break
        needs = self.memory.needs(self.goal, candidate)
        if self.memory.holds(needs) or self._spare_bytes(needs):
            return  # the user limited the cache, and neither layers nor weights help
        if candidate.gpu_layers and not self.memory.unified:
            fewer = self.memory.largest_layers(self.goal, candidate)
            if fewer or self.memory.fits(self.goal, candidate._replace(gpu_layers=0)):
                yield f"--gpu-layers {fewer}: the rest stays in RAM."
        whole = self.memory.needs(self.goal, candidate)
        needs = self.memory.needs(self.least, small)
        if self.memory.fits(self.least, small) and sum(needs.weights) < (
            (whole.ram + whole.gpu) // _LITTLE
        ):
            return  # it is the context that does not fit
        yield from self._smaller_weights(small)

    def _smaller_weights(self, small: LoadCandidate) -> Iterator[str]:
        """Advise other weights: a smaller model goes before a quantization that spoils this one."""
        shorter = ""
        name = self._coarser_quantization(self.options.context_tokens or self.least, small)
        if not name:
            shorter = ", and a shorter --ctx"
            name = self._coarser_quantization(self.least, small)
        if name and not is_rough(name):
            yield f"A smaller quantization of this model, such as {name}{shorter}."
            return
        if not name and self.memory.fits(self.least, small):
            return
        limit = self._weights_limit(self.least, small)
        if not limit:
            yield "No memory is free here; close other programs."
            return
        yield f"A smaller model: at most {size(limit)} of weights fit here now."
        if name:
            yield f"{name} of this model{shorter}: it would fit, and answer much worse."

    def _coarser_quantization(self, context: int, candidate: LoadCandidate) -> str:
        """The finest usual quantization that fits with this context; empty: none."""
        return smaller_quantization(self.memory.shape, self._weights_limit(context, candidate))

    def _weights_limit(self, context: int, candidate: LoadCandidate) -> int:
        """Bytes of a file that would fit with everything else that such a load takes."""
        needs = self.memory.needs(context, candidate)
        weights = sum(needs.weights)
        rest = self.memory.free_bytes(needs) - (needs.ram + needs.gpu - weights)
        # A tied embedding on a GPU lies there twice, so that a byte of the file takes more than one.
        return max(rest, 0) * self.memory.shape.weights_bytes // max(weights, 1)

    def _total(self, context: int, candidate: LoadCandidate) -> str:
        needs = self.memory.needs(context, candidate)
        return size(needs.ram + needs.gpu)
