"""Backend without a model, for tests of the engine core and of front ends.

It keeps every rule of the interface and makes up the logits; it ships so that third parties can test with it
over a real child process. A script is a JSON file (`Script`). Tokens are bytes and a few control tokens. The
runner keeps token ids where a real one keeps KV (scripted_kv.py refuses what a real cache would do wrongly),
and logits are a function of exactly those tokens, so a wrong byte in the cache changes the text.
"""

import hashlib
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from localchat.backend_api.interface import (
    Availability,
    Backend,
    Capabilities,
    LoadRequest,
    LogitsPosition,
    MemoryReport,
    ModelInfo,
    Progress,
    Runner,
    Sample,
    SamplingParams,
    StepPlan,
    StepResult,
    StepRow,
    StepStatus,
    Tokenizer,
)
from localchat.backend_api.sampling.reference import Sampler
from localchat.backend_api.sampling.token_counts import TokenCounts
from localchat.backend_api.special_tokens import SpecialToken
from localchat.errors import ContextExceeded, DeviceFault, EngineClosed, ModelInvalid, ModelMissing
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.kv_store.checksum import payload_sums
from tests.support.scripted_kv import BlockStorage, SlotStorage, storage_for

BOS = 256
EOS = 257
THINK = 258
END_THINK = 259
VOCAB = 260
_KV_TYPES = ("f16", "q8_0", "q4_0")
_SPECIALS = {BOS: b"<s>", EOS: b"</s>", THINK: b"<think>", END_THINK: b"</think>"}
_TOKENS = {text: token for token, text in _SPECIALS.items()}
_SPECIAL_TEXTS = re.compile(b"(" + b"|".join(map(re.escape, _TOKENS)) + b")")


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Behaviour of a scripted model."""

    reply: str | None = None
    """Its answer to everything, then its end; None: text by hash of all earlier tokens."""
    crash: Literal["", "open", "load", "warmup", "fault", "always", "step"] = ""
    """Where the process dies by SIGSEGV; `fault`: in the warm-up by a DeviceFault; `step`: after `crash_after`
    steps. Safe mode avoids it, apart from `open` and `always`, which dies in any warm-up."""
    crash_after: int = 3
    step_s: float = 0.0
    """Duration of a step."""
    load_s: float = 0.0
    """Duration of the load."""
    context_tokens: int = 4096
    block_tokens: int = 0
    """Above 0: its KV cache is paged, with as many host blocks as blocks."""
    template: str | None = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"
    )


FAULT = "a fault of the tokenizer"
"""A text that the tokenizer cannot encode."""


class ScriptedTokenizer:
    """Tokenizer whose tokens are bytes."""

    vocab_size = VOCAB
    bos = BOS
    eos = EOS
    eog = frozenset({EOS})
    add_bos = False
    longest_piece = 1

    @property
    def special_tokens(self) -> tuple[SpecialToken, ...]:
        control = (token for token in range(256, self.vocab_size) if not self.piece(token))
        texts = (self.piece(token, special=True).decode("utf-8", "replace") for token in control)
        return tuple(SpecialToken(text, control=True) for text in texts if text)

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        if text == FAULT:
            raise RuntimeError(text)
        tokens = [BOS] if add_bos else []
        encoded = text.encode("utf-8", "surrogatepass")
        if not special:
            return [*tokens, *encoded]
        for part in _SPECIAL_TEXTS.split(encoded):
            tokens += [_TOKENS[part]] if part in _TOKENS else part
        return tokens

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if not 0 <= token < VOCAB:
            raise ValueError(f"token {token} is not in 0..{VOCAB - 1}")
        if token < 256:
            return bytes([token])
        return _SPECIALS[token] if special else b""

    def special(self, name: str) -> int:
        return -1


Logits = Callable[[list[int], int], NDArray[np.float32]]
"""(tokens up to here, prompt tokens of the sequence) -> logits of the next token, (VOCAB,)."""


def hashed(tokens: list[int], prompt_tokens: int) -> NDArray[np.float32]:
    """Logits by hash of all tokens: any difference in them gives another text. Peaked, without an end."""
    digest = hashlib.blake2b(np.asarray(tokens, np.int32).tobytes(), digest_size=8).digest()
    random = np.random.default_rng(int.from_bytes(digest, "little"))
    logits = random.normal(0, 2, VOCAB).astype(np.float32)
    logits[32:127] += 4
    logits[256:] = -20
    return logits


def reply_logits(reply: str) -> Logits:
    """Logits of a fixed answer, then the end."""
    answer = list(reply.encode())

    def logits(tokens: list[int], prompt_tokens: int) -> NDArray[np.float32]:
        row = np.zeros(VOCAB, np.float32)
        at = len(tokens) - prompt_tokens
        row[answer[at] if at < len(answer) else EOS] = 30
        return row

    return logits


class ScriptedRunner:
    """Runner over made-up logits. A step launched after one of `stumble` or `halt` computes nothing.

    stumble: numbers of steps that find no memory. halt: numbers of steps that are cut short: some rows are
    computed by half, nothing is sampled.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        logits: Logits = hashed,
        *,
        step_s: float = 0.0,
        stumble: frozenset[int] = frozenset(),
        halt: frozenset[int] = frozenset(),
        crash_after: int | None = None,
    ) -> None:
        self.capabilities = replace(capabilities, moves_rows=True)
        self.storage = storage_for(capabilities)
        self.steps: list[StepPlan] = []
        self._logits = logits
        self._step_s = step_s
        self._stumble = stumble
        self._halt = halt
        self._crash_after = crash_after
        self._sampler = Sampler(VOCAB)
        self.known: dict[int, tuple[list[int], int, SamplingParams]] = {}
        self._results: list[StepResult] = []
        self._masks: dict[int, bytes] = {}
        self._abort = False

    def launch(self, plan: StepPlan) -> None:
        assert len(self._results) < self.capabilities.depth, "too many steps in flight"
        moved = bool(plan.moved)
        plan = plan.unmoved()
        width = sum(row.width for row in plan.rows)
        assert width <= self.capabilities.max_step_tokens, f"a step of {width} tokens"
        self.steps.append(plan)
        if self._crash_after is not None and len(self.steps) > self._crash_after:
            os.kill(os.getpid(), signal.SIGSEGV)
        if isinstance(self.storage, SlotStorage):
            self.storage.behind_short = self._behind_short()
        self.storage.begin(plan)
        for seq in plan.leave:
            self.known.pop(seq, None)
        for enter in plan.enter:
            self.known[enter.seq] = (list(enter.tokens), enter.prompt_tokens, enter.sampling)
        result = self._result(plan, width)
        if moved and result.status == "ok":
            tokens = tuple(sample.token for sample in result.samples)
            result = msgspec.structs.replace(result, samples=(), tokens=tokens)
        self._results.append(result)

    def _behind_short(self) -> bool:
        """Whether a step in flight comes back short."""
        return any(result.number in self._stumble | self._halt for result in self._results)

    def _result(self, plan: StepPlan, width: int) -> StepResult:
        behind_short = self._behind_short()
        if plan.number in self._stumble or behind_short:
            for row in plan.rows:
                self.storage.skip(row)
            status: StepStatus = "aborted" if behind_short else "out_of_memory"
            return self._short(plan, status, (0,) * len(plan.rows))
        if plan.number in self._halt:
            half = tuple(
                self._compute(row)[: row.width // 2] if place % 2 else self._compute(row)
                for place, row in enumerate(plan.rows)
            )
            for row, tokens in zip(plan.rows, half, strict=True):
                self.storage.write(row, tokens)
            return self._short(plan, "aborted", tuple(map(len, half)))
        return self._execute(plan, width)

    def _short(self, plan: StepPlan, status: StepStatus, computed: tuple[int, ...]) -> StepResult:
        return StepResult(plan.number, (), computed, self._earliest(plan), status)

    def _earliest(self, plan: StepPlan) -> tuple[int, ...]:
        return tuple(self.storage.earliest(row.slot) for row in plan.rows)

    def collect(self) -> StepResult:
        begun_s = time.perf_counter()
        while time.perf_counter() - begun_s < self._step_s and not self._abort:
            time.sleep(min(self._step_s, 0.002))
        self._abort = False
        return self._results.pop(0)

    def abort(self) -> None:
        self._abort = True

    def warm_up_next(self) -> bool:
        return False

    def export_slot(self, slot: int, start: int, end: int) -> memoryview:
        assert isinstance(self.storage, SlotStorage)
        return self.storage.export_slot(slot, start, end)

    def export_saved(self, key: int, start: int, end: int) -> memoryview | None:
        assert isinstance(self.storage, SlotStorage)
        return self.storage.export_saved(key, start, end)

    def host_block(self, number: int) -> memoryview | None:
        assert isinstance(self.storage, BlockStorage)
        return self.storage.host_block(number)

    def block_sums(self, numbers: Sequence[int]) -> list[bytes]:
        assert isinstance(self.storage, BlockStorage)
        return [payload_sums(self.storage.host_block(number)) for number in numbers]

    def memory(self) -> MemoryReport:
        return MemoryReport(1000, 100, 10, 1)

    def close(self) -> None:
        self.known.clear()

    def _execute(self, plan: StepPlan, width: int) -> StepResult:
        for row in plan.rows:
            self.storage.write(row, self._compute(row))
        samples: list[Sample] = []
        rejected: set[int] = set()
        self._masks = {mask.index: mask.words for mask in plan.masks}
        for number, target in enumerate(plan.positions):
            if (
                target.kind != "sample"
                or target.row not in rejected
                or not self._drafted(plan, target)
            ):
                samples.append(self._sample(plan, number, target))
            row = plan.rows[target.row]
            at = target.offset - (row.width - len(row.drafts) - 1)
            if target.kind != "sample" or at >= len(row.drafts):
                continue
            if samples[-1].token != row.drafts[at]:
                rejected.add(target.row)
        return StepResult(
            number=plan.number,
            samples=tuple(samples),
            computed=tuple(row.width for row in plan.rows),
            earliest=self._earliest(plan),
            elapsed_s=self._step_s or 1e-4 * (1 + 0.1 * width),
        )

    def _compute(self, row: StepRow) -> list[int]:
        """The tokens of a row, LAST resolved, drafts included."""
        known = self.known[row.seq][0]
        if isinstance(row.tokens, tuple):
            known[row.start :] = (*row.tokens, *row.drafts)
        return known[row.start : row.start + row.width]

    def _drafted(self, plan: StepPlan, target: LogitsPosition) -> bool:
        return bool(plan.rows[target.row].drafts)

    def _sample(self, plan: StepPlan, number: int, target: LogitsPosition) -> Sample:
        row = plan.rows[target.row]
        position = row.start + target.offset + 1
        text = self.storage.held(row.slot)[:position]
        known, prompt_tokens, sampling = self.known[target.seq]
        logits = self._logits(text, prompt_tokens)
        if target.kind == "prompt":
            drawn = self._sampler.logprobs(logits, target.token, target.top)
            whole = self._sampler.all_logprobs(logits) if target.all else b""
            return Sample(number, drawn.token, drawn.logprob, drawn.top, whole)
        counts = TokenCounts(text, prompt_tokens) if sampling.penalised else None
        drawn = self._sampler.draw(logits, sampling, position, counts, self._masks.get(number))
        if not row.drafts:
            # A step launched ahead reads some token, also behind logits without one.
            known[position:] = [max(drawn.token, 0)]
        return Sample(number, drawn.token, drawn.logprob, drawn.top)


class ScriptedModel:
    """Open model of a script."""

    def __init__(self, path: Path, script: Script) -> None:
        self._script = script
        self.tokenizer: Tokenizer = ScriptedTokenizer()
        self.info = ModelInfo(
            name=path.stem,
            architecture="script",
            quantization="none",
            parameters=0,
            context_train=script.context_tokens,
            vocab_size=VOCAB,
            file_bytes=path.stat().st_size,
            chat_template=script.template,
            identity=hashlib.sha256(path.read_bytes()).hexdigest(),
        )

    def plan(self, options: LoadOptions) -> MemoryPlan:
        context = options.context_tokens or self._script.context_tokens
        if context > 1 << 20:
            raise ContextExceeded("a script has no such context", context_tokens=1 << 20)
        return MemoryPlan(
            backend="scripted",
            weights_bytes=1000,
            kv_bytes=100,
            compute_bytes=10,
            overhead_bytes=1,
            free_bytes=1 << 30,
            fits=True,
            context_tokens=context,
            max_context_tokens=context,
            kv_type=options.kv_type or "f16",
            flash_attention=False,
            gpu_layers=0,
            cache_ram_bytes=1 << 20,
            max_step_tokens=64,
            kv_types=_KV_TYPES,
        )

    def load(
        self, request: LoadRequest, progress: Progress, notify: Callable[[str], None]
    ) -> Runner:
        script = self._script
        for tenth in range(10):
            if not progress(tenth * 100, 1000):
                raise EngineClosed("the load was stopped")
            time.sleep(script.load_s / 10)
        if script.crash == "load" and not request.safe_mode:
            os.kill(os.getpid(), signal.SIGSEGV)
        progress(1000, 1000)
        if script.crash == "fault" and not request.safe_mode:
            raise DeviceFault("a kernel failed")
        if script.crash == "always" or (script.crash == "warmup" and not request.safe_mode):
            os.kill(os.getpid(), signal.SIGSEGV)
        size = script.block_tokens
        blocks = request.plan.context_tokens // size if size else 0
        return ScriptedRunner(
            Capabilities(
                context_tokens=request.plan.context_tokens,
                kv_tokens=request.plan.context_tokens,
                max_slots=request.options.max_slots,
                max_rows=request.options.max_slots,
                max_step_tokens=request.plan.max_step_tokens,
                bytes_per_token=8,
                exports="" if script.block_tokens else "range",
                block_tokens=script.block_tokens,
                host_blocks=blocks,
                all_logprobs=True,
                kv_type=request.plan.kv_type,
                kv_types=_KV_TYPES,
            ),
            hashed if script.reply is None else reply_logits(script.reply),
            step_s=script.step_s,
            crash_after=script.crash_after if script.crash == "step" else None,
        )

    def close(self) -> None:
        """Nothing to give back."""


class ScriptedBackend(Backend):
    """Backend of scripts. Not an entry target: its name is `tests.support.scripted_backend:ScriptedBackend`."""

    name = "scripted"

    def build_key(self) -> str:
        return "scripted build"

    def available(self) -> Availability:
        return Availability(True, "a script needs nothing")

    def accepts(self, path: Path) -> bool:
        return path.suffix == ".script"

    def open(self, path: Path, notify: Callable[[str], None]) -> ScriptedModel:
        if not path.is_file():
            raise ModelMissing(f"no script at {path}")
        try:
            script = msgspec.json.decode(path.read_bytes(), type=Script)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ModelInvalid(f"{path} is no script: {error}") from error
        if script.crash == "open":
            os.kill(os.getpid(), signal.SIGSEGV)
        return ScriptedModel(path, script)
