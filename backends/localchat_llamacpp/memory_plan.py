"""What llama.cpp will take of this machine, and the choices that follow from it: KV type, flash attention,
layers on the GPU, tokens a step, context. Imports neither torch nor llama_cpp.

Choices, measured on CPUs: flash attention off for f16 KV (decode 1.2 to 2.7 times faster) while its scores
have room, on for quantized KV, which needs it; 128 tokens a step on few cores, for more only lengthen a step.
"""

from collections.abc import Iterator
from dataclasses import replace

from msgspec import structs

from localchat.errors import UsageError
from localchat.fit.hardware import Machine
from localchat.fit.kv_types import FP8, named
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import (
    LEAST_CONTEXT_TOKENS,
    MemoryPlan,
    kv_types,
    largest,
    smaller_quantization,
)
from localchat.model_files.architecture import ModelShape
from localchat.units import gigabytes_flag, size, tokens
from localchat_llamacpp.load_candidates import LoadCandidate, MemoryCheck, Needs

GOAL_TOKENS = 8192
"""A context worth a quantized cache, cut windows or layers left in RAM; longer ones come only for free."""
_PARKED_BYTES = 2_000_000_000
_LITTLE = 20
"""Weights of less than this part of what is needed are not what does not fit."""
_MOST_SLOTS = 255
"""llama.cpp counts 256 sequences, and one is the scratch sequence."""


def plan(
    shape: ModelShape, wish: LoadOptions, machine: Machine, *, can_offload: bool, safe_mode: bool
) -> MemoryPlan:
    """The verdict on a load. It never raises for memory: `fit.plan.demand` makes the error of a plan that
    does not fit. can_offload: what the installed llama.cpp can do. safe_mode: no repacked copies.

    Raises UsageError for a KV type that this model cannot have, and for nonsense numbers.
    """
    _check(wish)
    room = MemoryCheck(shape, wish, machine, can_offload=can_offload, safe_mode=safe_mode)
    return _Planner(room, can_offload=can_offload).plan()


def _check(wish: LoadOptions) -> None:
    if wish.context_tokens is not None and wish.context_tokens < 1:
        raise UsageError(f"A context of {wish.context_tokens} tokens is not possible.")
    if not 1 <= wish.max_slots <= _MOST_SLOTS:
        raise UsageError(f"{wish.max_slots} sequences at once: 1 to {_MOST_SLOTS} are possible.")
    if wish.head_int8:
        raise UsageError(
            "llama.cpp cannot round the output head at the load.",
            hint="Leave out --head-int8: a GGUF file stores its head quantized already.",
        )
    if isinstance(wish.gpu_layers, int) and wish.gpu_layers < 0:
        raise UsageError(
            f"{wish.gpu_layers} layers on the GPU are not possible.",
            hint="Give a number, auto or all.",
        )


class _Planner:
    """Chooses among the ways of loading."""

    def __init__(self, room: MemoryCheck, *, can_offload: bool) -> None:
        self.room, self.can_offload = room, can_offload
        self.trained = room.shape.context_train
        self.notes: list[str] = []
        self.wish = self._within_positions(room.wish)
        self.possible_types = kv_types(room.shape)
        self.types = self._types()
        self.layers = self._layers()
        # A context below which a coarser way of loading is tried.
        self.goal = self.wish.context_tokens or min(self.trained, GOAL_TOKENS)
        self.most = max(self.trained, self.goal)
        self.least = min(LEAST_CONTEXT_TOKENS, self.trained)

    def _within_positions(self, wish: LoadOptions) -> LoadOptions:
        """Learned positions have an end (GPT-2, StarCoder, MPT): a token behind it ends the process there."""
        last = self.room.shape.positions
        if not last or (wish.context_tokens or 0) <= last:
            return wish
        self.notes.append(
            f"The model has positions for {tokens(last)}, so its context is that long and not "
            f"{wish.context_tokens:,}."
        )
        return structs.replace(wish, context_tokens=last)

    def _types(self) -> tuple[str, ...]:
        if self.wish.kv_type is None:
            # q8_0 loses nothing that can be noticed; anything coarser must be asked for.
            return tuple(name for name in ("f16", "q8_0") if name in self.possible_types)
        asked = named(self.wish.kv_type)
        if asked not in self.possible_types:
            raise UsageError(
                f"This model's KV cache cannot be {self.wish.kv_type}.",
                hint=f"Possible here: {', '.join(self.possible_types)}."
                + (" The CUDA backend has fp8, for safetensors." if asked == FP8 else ""),
            )
        return (self.wish.kv_type,)

    def _layers(self) -> int | None:
        """A number of layers, or None: as many as fit."""
        asked, machine = self.wish.gpu_layers, self.room.machine
        if not self.can_offload:
            if asked == "auto" and machine.gpus:
                names = ", ".join(sorted({gpu.name for gpu in machine.gpus}))
                self.notes.append(
                    f"llama.cpp is built for the CPU alone here: {names} stays idle; "
                    "`localchat doctor --rebuild` builds it anew."
                )
            elif asked not in ("auto", 0):
                self.notes.append(
                    "llama.cpp is built for the CPU alone here: no layer goes to a GPU."
                )
            return 0
        if asked == "all" or (asked == "auto" and self.room.unified):
            return self.room.layers
        if asked == "auto":
            return None if machine.gpus else 0
        if asked and self.room.trusted:
            self.notes.append(
                "The GPU's memory cannot be read here: its layers are taken on trust."
            )
        return min(asked, self.room.layers)

    def _caches(self, layers: int) -> Iterator[LoadCandidate]:
        for kv_type in self.types:
            yield LoadCandidate(kv_type, False, layers)
            if self.room.shape.window:
                yield LoadCandidate(kv_type, True, layers)

    def _ways(self) -> Iterator[LoadCandidate]:
        """Ways of loading, best first; where layers are chosen here, all of them first, then as many as
        fit at the goal, then none."""
        if self.layers is not None:
            yield from self._caches(self.layers)
            return
        yield from self._caches(self.room.layers)
        for way in self._caches(0):
            if count := self.room.largest_layers(self.goal, way):
                yield way._replace(gpu_layers=count)
        yield from self._caches(0)

    def plan(self) -> MemoryPlan:
        """See the function `plan`."""
        found = self._best()
        if not self.wish.require_gpu or found.gpu_layers:
            return found
        missing, advice = self._no_gpu()
        return replace(
            found, fits=False, missing=missing, advice=advice, cache_ram_bytes=0, notes=()
        )

    def _no_gpu(self) -> tuple[str, tuple[str, ...]]:
        """What a GPU was required for and is not there; and what to do."""
        machine = self.room.machine
        names = ", ".join(sorted({gpu.name for gpu in machine.gpus})) or "the GPU"
        if self.wish.gpu_layers == 0:
            return "a GPU is required, and 0 layers on it were asked for.", ()
        if not self.can_offload:
            return (
                "a GPU is required, and llama.cpp is built for the CPU alone here.",
                ("Build it for your GPU: `localchat doctor --rebuild`.",),
            )
        if not machine.gpus and not self.room.unified:
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
        for way in self._ways():
            longest = self.room.largest_context(way, self.most)
            if longest >= self.goal:
                return self._fitting(way, longest)
            found.append((longest, way))
        longest, way = max(found, key=lambda pair: pair[0])
        if self.wish.context_tokens is None and longest >= self.least:
            return self._fitting(way, longest)
        advice = tuple(self._advice(way))
        return self._result(way, self.goal, longest, fits=False, advice=advice)

    def _fitting(self, way: LoadCandidate, longest: int) -> MemoryPlan:
        context = self.wish.context_tokens
        if context is None:
            context = max(self._comfortable(way, longest), min(self.goal, longest))
        elif context > self.trained:
            self.notes.append(
                f"The model was trained for {tokens(self.trained)}; beyond them it may ramble."
            )
        if self.wish.kv_type is None and way.kv_type != self.types[0]:
            self.notes.append(f"The KV cache is {way.kv_type}, so that {tokens(context)} fit.")
        if way.window_only:
            self.notes.append("Sliding-window layers keep only their window, to save memory.")
        if 0 < way.gpu_layers < self.room.layers:
            self.notes.append(f"{way.gpu_layers} of {self.room.layers} layers go to the GPU.")
        return self._result(way, context, longest, fits=True)

    def _comfortable(self, way: LoadCandidate, longest: int) -> int:
        """The context that is taken when nobody asks: the longest that leaves room for parked prefixes, and
        that does not force flash attention upon every step of a CPU."""
        spare = min(_PARKED_BYTES // 2, self.room.ram_bytes // 8)
        context = self.room.largest_context(way, longest, spare)
        if way.gpu_layers or way.coarse:
            return context
        return max(largest(lambda count: not self.room.needs(count, way).flash, context), self.goal)

    def _result(
        self,
        way: LoadCandidate,
        context: int,
        longest: int,
        *,
        fits: bool,
        advice: tuple[str, ...] = (),
    ) -> MemoryPlan:
        needs = self.room.needs(context, way)
        return MemoryPlan(
            backend="llama.cpp",
            weights_bytes=sum(needs.weights),
            kv_bytes=sum(needs.kv),
            compute_bytes=sum(needs.compute),
            overhead_bytes=sum(needs.overhead),
            free_bytes=self.room.free_bytes(needs),
            fits=fits,
            context_tokens=context,
            max_context_tokens=longest,
            kv_type=way.kv_type,
            flash_attention=needs.flash,
            gpu_layers=way.gpu_layers,
            cache_ram_bytes=self._parked(needs) if fits else 0,
            max_step_tokens=self.room.steps(way.gpu_layers).tokens,
            advice=advice,
            notes=tuple(self.notes),
            layers=self.room.layers,
            gpu_bytes=needs.gpu,
            gpu_free_bytes=self.room.gpu_free_bytes(needs),
            missing="" if fits else self._forbidden(needs, context),
            window_only=way.window_only,
            mapped_bytes=needs.mapped,
            kv_types=self.possible_types,
        )

    def _parked(self, needs: Needs) -> int:
        """RAM for parked prefixes: what was asked, else half of what stays free, at most 2 GB."""
        if self.wish.cache_ram_bytes is not None:
            return self.wish.cache_ram_bytes
        return min(max(self.room.ram_bytes - needs.ram, 0) // 2, _PARKED_BYTES)

    def _forbidden(self, needs: Needs, context: int) -> str:
        """Where there is memory enough, and it is the user's own wish for the cache that forbids the load."""
        most, room = self.wish.kv_limit_bytes, self.room
        if spare := self._beside(needs):
            return (
                f"--cache-ram keeps {size(self.wish.cache_ram_bytes or 0)} for KV that nobody uses, and "
                f"{size(spare)} are free beside the load."
            )
        if most is None or room.allowed(needs) or not room.holds(needs):
            return ""
        return (
            f"the KV cache of {tokens(context)} takes {size(sum(needs.kv))}, and --kv-gb allows "
            f"{size(most)}."
        )

    def _beside(self, needs: Needs) -> int:
        """RAM beside a load that would fit, were it not for parked prefixes; 0 where those are not what is in
        the way."""
        parked, room = self.wish.cache_ram_bytes or 0, self.room
        if room.holds(needs) or not room.allowed(needs) or not room.holds(needs, -parked):
            return 0
        return room.ram_bytes - needs.ram

    def _raised_limits(self, way: LoadCandidate) -> Iterator[str]:
        """Wishes of the user's that could be others."""
        needs, most = self.room.needs(self.goal, way), self.wish.gpu_limit_bytes
        if spare := self._beside(needs):
            yield f"--cache-ram {spare >> 20}: what is free beside the load."
        if not self.room.allowed(needs) and self.room.holds(needs):
            kv = gigabytes_flag(sum(needs.kv))
            yield f"--kv-gb {kv}: what {tokens(self.goal)} take."
        if most is not None and self.room.cards == 1 and most < needs.gpu <= self.room.card_bytes:
            yield f"--vram-gb {gigabytes_flag(needs.gpu)}: what {way.gpu_layers} layers take."

    def _advice(self, way: LoadCandidate) -> Iterator[str]:
        """What would help, in the order of what it costs the user."""
        yield from self._raised_limits(way)
        small = (
            way._replace(kv_type="q8_0")
            if "q8_0" in self.possible_types and not way.coarse
            else way
        )
        if small != way and self.room.fits(self.goal, small):
            yield f"--kv-type q8_0: {self._total(self.goal, small)} in all."
        for shorter, flag in ((way, ""), (small, f" --kv-type {small.kv_type}")):
            longest = self.room.largest_context(shorter, min(self.goal, self.trained))
            if self.least <= longest < self.goal:
                yield f"--ctx {longest}{flag}: {self._total(longest, shorter)} in all."
                break
        wanted = self.room.needs(self.goal, way)
        if self.room.holds(wanted) or self._beside(wanted):
            return  # the user's wish for the cache forbids it, and neither layers nor weights help
        if way.gpu_layers and not self.room.unified:
            fewer = self.room.largest_layers(self.goal, way)
            if fewer or self.room.fits(self.goal, way._replace(gpu_layers=0)):
                yield f"--gpu-layers {fewer}: what is left over stays in RAM."
        whole = self.room.needs(self.goal, way)
        needs = self.room.needs(self.least, small)
        if self.room.fits(self.least, small) and sum(needs.weights) < (
            (whole.ram + whole.gpu) // _LITTLE
        ):
            return  # it is the context that does not fit
        if name := self._coarser(self.wish.context_tokens or self.least, small):
            yield f"A smaller quantization of this model, such as {name}."
        elif name := self._coarser(self.least, small):
            yield f"A smaller quantization of this model, such as {name}, and a shorter --ctx."
        elif not self.room.fits(self.least, small):
            yield f"A smaller model: weights of {size(self._rest(self.least, small))} at most fit here now."

    def _coarser(self, context: int, way: LoadCandidate) -> str:
        """The finest usual quantization that fits with so much context; empty: none."""
        return smaller_quantization(self.room.shape, self._rest(context, way))

    def _rest(self, context: int, way: LoadCandidate) -> int:
        """Bytes of a file that there is room for beside all else that such a load takes."""
        needs = self.room.needs(context, way)
        weights = sum(needs.weights)
        rest = self.room.free_bytes(needs) - (needs.ram + needs.gpu - weights)
        # A tied embedding on a GPU lies there twice, so that a byte of the file takes more than one.
        return max(rest, 0) * self.room.shape.weights_bytes // max(weights, 1)

    def _total(self, context: int, way: LoadCandidate) -> str:
        needs = self.room.needs(context, way)
        return size(needs.ram + needs.gpu)
