"""An engine core stepped by hand over a scripted runner, and a simulation of every expected answer."""

import hashlib
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from localchat.backend_api.interface import (
    Capabilities,
    LoadRequest,
    ModelInfo,
    Progress,
    Runner,
    SamplingParams,
    Tokenizer,
)
from localchat.backend_api.sampling.reference import Sampler
from localchat.backend_api.sampling.token_counts import TokenCounts
from localchat.core.engine_core import EngineCallbacks, EngineCore
from localchat.core.input_processor import InputProcessor
from localchat.core.kv_cache import (
    PagedKVCacheManager,
    SlotKVCacheManager,
    make_kv_cache_manager,
)
from localchat.core.kv_cache.block_disk_tier import BlockDiskTier
from localchat.core.kv_cache.disk_tier import DiskTier
from localchat.core.kv_cache.slot_disk_tier import SlotDiskTier
from localchat.core.sequence import RequestState
from localchat.core.structured_output.compiler import grammar_spec, llguidance_tokenizer
from localchat.core.structured_output.length_guard import ClosingState, LengthGuard
from localchat.engine.events import (
    Accepted,
    Done,
    Event,
    Finished,
    MetricsSnapshot,
    Prefill,
    PromptLogprobs,
    Queued,
    Text,
    TokenLogprob,
)
from localchat.engine.request import GenerateRequest, Sampling, TokenIds
from localchat.errors import LocalchatError
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.kv_store.store import KVStore
from tests.support.cache_integrity import check
from tests.support.greedy import NEARLY_GREEDY
from tests.support.scripted_backend import EOS, VOCAB, Logits, ScriptedRunner, ScriptedTokenizer

MAX_STEPS = 6000


def capabilities(**changes: Any) -> Capabilities:
    """One slot cache of 400 tokens and eight rows, unless told otherwise."""
    usual = Capabilities(
        context_tokens=400,
        kv_tokens=400,
        max_slots=8,
        max_rows=8,
        max_step_tokens=64,
        bytes_per_token=1,
    )
    return replace(usual, **changes)


def peaked(tokens: list[int], prompt_tokens: int) -> NDArray[np.float32]:
    """Few letters, by hash of the last 24 tokens, sometimes the end: texts that differ, stop and repeat."""
    tail = np.asarray([*tokens[-24:], len(tokens) % 7], np.int32).tobytes()
    digest = hashlib.blake2b(tail, digest_size=8).digest()
    logits = np.full(VOCAB, -30, np.float32)
    random = np.random.default_rng(int.from_bytes(digest, "little"))
    logits[97:103] = random.normal(0, 1.5, 6)
    logits[0xC3] = random.normal(-0.5, 1)
    logits[0xA9] = random.normal(-0.5, 1)
    if len(tokens) - prompt_tokens > 2:
        logits[EOS] = random.normal(-2.5, 1)
    return logits


def copying(tokens: list[int], prompt_tokens: int) -> NDArray[np.float32]:
    """Mostly what followed the last three tokens when they stood there before, else by hash: drafts pay."""
    logits = peaked(tokens, prompt_tokens)
    for at in range(len(tokens) - 4, -1, -1):
        if tokens[at : at + 3] == tokens[-3:]:
            if len(tokens) % 11:
                logits[tokens[at + 3]] += 9
            break
    return logits


def periodic(tokens: list[int], prompt_tokens: int) -> NDArray[np.float32]:
    """The alphabet, for ever."""
    logits = np.zeros(VOCAB, np.float32)
    logits[97 + (tokens[-1] - 96) % 26] = 30
    return logits


def _ignore(seconds: float) -> None:
    """Learn nothing."""


class _Model:
    """The part of an open model that the input processor uses."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.info = ModelInfo("m", "script", "none", 0, 400, VOCAB, 0, None, identity="m")

    def plan(self, requested: LoadOptions) -> MemoryPlan:
        raise AssertionError("the input processor plans nothing")

    def load(self, options: LoadRequest, progress: Progress, say: Any) -> Runner:
        raise AssertionError("the input processor loads nothing")

    def close(self) -> None:
        """Nothing to give back."""


@dataclass
class Received:
    """Events of one request, in order."""

    accepted: Accepted
    events: list[Event] = field(default_factory=list)
    error: LocalchatError | None = None

    @property
    def done(self) -> Done:
        last = self.events[-1]
        assert isinstance(last, Done)
        return last

    def text(self, choice: int = 0) -> str:
        """The whole text of a choice."""
        parts = [one.text for one in self.events if isinstance(one, Text) and one.choice == choice]
        return "".join(parts)

    def logprobs(self, choice: int = 0) -> list[TokenLogprob]:
        texts = [one for one in self.events if isinstance(one, Text) and one.choice == choice]
        return [entry for one in texts for entry in one.logprobs]

    def finished(self) -> dict[int, Finished]:
        return {one.choice: one for one in self.events if isinstance(one, Finished)}

    def all(self, kind: type[Any]) -> list[Any]:
        return [one for one in self.events if isinstance(one, kind)]


class Bench:
    """One engine core with a real input processor; `run_until_idle` steps until nothing is left to do."""

    def __init__(
        self,
        can: Capabilities | None = None,
        logits: Logits = peaked,
        *,
        ram: int = 100_000,
        speculation: bool = True,
        stumble: Iterable[int] = (),
        halt: Iterable[int] = (),
        coalesce_s: float = 0.0,
        disk: KVStore | None = None,
        model: str = "m",
    ) -> None:
        """`disk`: a store of KV, with ranges of 8 tokens, from 8 tokens on, or with blocks."""
        self.can = can or capabilities()
        self.runner = ScriptedRunner(
            self.can, logits, stumble=frozenset(stumble), halt=frozenset(halt)
        )
        self.kv_cache = make_kv_cache_manager(self.can, model, ram)
        self.disk_tier: DiskTier | None = None
        if disk is not None:
            self.disk_tier = self._disk_tier(disk, model)
        self.sent: list[str] = []
        self.frames: list[list[Event]] = []
        """Events that were sent together."""
        self.received: dict[int, Received] = {}
        self.requests: dict[int, RequestState] = {}
        vocabulary = ScriptedTokenizer()
        self.core = EngineCore(
            self.runner,
            vocabulary,
            self.kv_cache,
            EngineCallbacks(self._events, self._failure, self.sent.append),
            speculation=speculation,
            coalesce_s=coalesce_s,
            disk_tier=self.disk_tier,
        )
        # Scripted steps last tenths of a millisecond by their own account: next to those the real time
        # between two of them would be a long wait on a slow machine, and there would be no drafts.
        self.core._step_costs.observe_wait = _ignore  # type: ignore[method-assign]
        self.core._step_costs.observe_pause = _ignore  # type: ignore[method-assign]
        self.input_processor = InputProcessor(
            _Model(vocabulary), self.can.context_tokens, {}, self.sent.append
        )
        self._ids = itertools.count(1)

    def _disk_tier(self, disk: KVStore, model: str) -> DiskTier:
        if isinstance(self.kv_cache, PagedKVCacheManager):
            return BlockDiskTier(
                disk, model, model, self.runner, self.kv_cache, min_tokens=8, part_bytes=160
            )
        assert isinstance(self.kv_cache, SlotKVCacheManager)
        return SlotDiskTier(
            disk, model, model, self.runner, self.kv_cache,
            min_tokens=8, min_read_tokens=2, range_tokens=8,
        )  # fmt: skip

    def _events(self, items: list[tuple[int, Event]]) -> None:
        assert items, "an empty frame was sent"
        self.frames.append([event for _, event in items])
        for id_, event in items:
            received = self.received[id_]
            assert received.error is None, "an event after the failure"
            received.events.append(event)

    def _failure(self, id_: int, error: LocalchatError) -> None:
        assert self.received[id_].error is None, "two failures"
        self.received[id_].error = error

    def ask(self, request: GenerateRequest) -> int:
        """Submit a request; its number."""
        id_ = next(self._ids)
        request_state, accepted = self.input_processor.accept(id_, request)
        self.received[id_] = Received(accepted, [accepted])
        self.requests[id_] = request_state
        self.core.submit(request_state)
        return id_

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            if self.core._reading:
                time.sleep(0.0002)  # the reader is another thread
            self.core.process_commands()
            self.core.step()

    def run_until_idle(self) -> None:
        """Step until all is done, then check that nothing is left over."""
        for _ in range(MAX_STEPS):
            if self.core.idle:
                break
            self.step()
        else:
            raise AssertionError("the engine core does not become idle")
        self.step()
        self.check_nothing_left()

    def store(self, ranges: int = 1_000) -> None:
        """Write so many ranges to the disk, as an idle engine does."""
        assert self.disk_tier is not None
        while ranges and self.disk_tier.store_next():
            ranges -= 1

    def recompute(self, chunks: int = 1_000) -> int:
        """Recompute so many chunks of answers, as an idle engine does. Their number."""
        computed = 0
        while computed < chunks and self.core._answer_kv.compute_next():
            computed += 1
        return computed

    def check_nothing_left(self) -> None:
        check(self.kv_cache)
        assert self.kv_cache.usage().live == 0
        assert self.runner.known == {}, "the runner still knows a sequence"
        assert not self.core.output_processor.requests
        assert not self.core._event_sender._last_metrics
        assert not self.core._event_sender._queued
        assert not self.core._scheduler._entered
        for request_state in self.requests.values():
            for sequence in request_state.sequences:
                assert not sequence.steps_in_flight
                assert sequence.unknown <= 0 or sequence.state.name == "ENDED"

    def say(self, request: GenerateRequest) -> Received:
        """Run one request to its end."""
        id_ = self.ask(request)
        self.run_until_idle()
        return self.received[id_]


def request(prompt: str | Iterable[int], **changes: Any) -> GenerateRequest:
    """A request of plain tokens. Sampling fields may be given by name; greedy unless a temperature is."""
    tokens = tuple(prompt.encode()) if isinstance(prompt, str) else tuple(prompt)
    fields = set(Sampling.__struct_fields__)
    sampling = {name: changes.pop(name) for name in list(changes) if name in fields}
    sampling.setdefault("temperature", NEARLY_GREEDY)
    changes.setdefault("max_tokens", 20)
    return GenerateRequest(
        prompt=TokenIds(tokens), loop_guard=False, sampling=Sampling(**sampling), **changes
    )


@dataclass(frozen=True)
class Said:
    """Expected output of a choice."""

    tokens: tuple[int, ...]
    text: str
    reason: str
    stop: str = ""


LEXICON = llguidance_tokenizer(ScriptedTokenizer())
ENDINGS = LengthGuard(ScriptedTokenizer())


class Rules:
    """A grammar, one token after the other. Tokens are bytes: what is forced is what a mask alone allows."""

    def __init__(self, asked: GenerateRequest, room: int) -> None:
        assert asked.grammar is not None
        self._schedule = ClosingState(check_at=room // 2)
        self._room = room
        self._said = 0
        self._matcher = LLMatcher(LEXICON, grammar_spec(asked.grammar).source, log_level=0)
        self._ignore_eos = asked.ignore_eos
        self.shortened = False

    def mask(self) -> bytes:
        bits = np.unpackbits(
            np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little"
        )
        if self._ignore_eos and bits.sum() > 1:
            bits[EOS] = 0
        words = np.packbits(bits, bitorder="little").tobytes()[: 4 * ((VOCAB + 31) // 32)]
        if self._matcher.compute_ff_tokens():
            return words
        if not self._schedule.closing and self._said >= self._schedule.check_at:
            left = self._room - self._said
            self._schedule = ENDINGS.check(self._matcher, self._said, left)
        if not self._schedule.closing:
            return words
        self.shortened |= ENDINGS.narrows(words, ENDINGS.closing_tokens(words))
        return ENDINGS.closing_mask(words)

    def take(self, token: int) -> bool:
        """Whether nothing can follow."""
        assert self._matcher.consume_token(token)
        self._said += 1
        return self._matcher.is_stopped()


def simulate(asked: GenerateRequest, logits: Logits, sampling: SamplingParams, room: int) -> Said:
    """One choice, one token after the other, nothing cached, nothing shared."""
    assert isinstance(asked.prompt, TokenIds)
    tokens = list(asked.prompt.tokens)
    prompt = len(tokens)
    most = room if asked.max_tokens is None else min(asked.max_tokens, room)
    sampler, vocabulary, raw = Sampler(VOCAB), ScriptedTokenizer(), b""
    rules = Rules(asked, most) if asked.grammar is not None else None
    while len(tokens) - prompt < most:
        tally = TokenCounts(tokens, prompt) if sampling.penalised else None
        mask = rules.mask() if rules is not None else None
        token = sampler.draw(logits(tokens, prompt), sampling, len(tokens), tally, mask).token
        tokens.append(token)
        said = tuple(tokens[prompt:])
        if token == EOS and not asked.ignore_eos:
            return Said(said, _whole(raw), _end(rules))
        raw += vocabulary.piece(token)
        text = _whole(raw)
        ends = [
            (text.find(stop) + len(stop), -len(stop), stop) for stop in asked.stop if stop in text
        ]
        if ends:
            end, length, stop = min(ends)
            return Said(said, text[: end + length], "stop", stop)
        if rules is not None and rules.take(token):
            return Said(said, _whole(raw), _end(rules))
    text = _whole(raw)
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in asked.stop if stop in text]
    if ends:
        end, length, _ = min(ends)
        text = text[: end + length]
    return Said(tuple(tokens[prompt:]), text, "length")


def _end(rules: Rules | None) -> str:
    return "length" if rules is not None and rules.shortened else "stop"


def _whole(raw: bytes) -> str:
    """The text so far without a code point that may still become whole."""
    import codecs

    return codecs.getincrementaldecoder("utf-8")("replace").decode(raw)


def expected(bench: Bench, id_: int, logits: Logits) -> list[Said]:
    """Expected output of every choice of a request."""
    request_state = bench.requests[id_]
    room = bench.can.context_tokens - request_state.prompt_tokens
    return [
        simulate(request_state.request, logits, one.sampling, room)
        for one in request_state.sequences
    ]


def check_received(bench: Bench, id_: int, logits: Logits) -> None:
    """The right text, and events in the order of their contract."""
    received, request_state = bench.received[id_], bench.requests[id_]
    assert received.error is None, received.error
    check_order(received, request_state)
    saids = expected(bench, id_, logits)
    for choice, said in enumerate(saids):
        assert received.text(choice) == said.text
        end = received.finished()[choice]
        assert (end.reason, end.stop) == (said.reason, said.stop)
    usage = received.done.usage
    assert usage.prompt_tokens == request_state.prompt_tokens
    assert usage.completion_tokens == sum(len(said.tokens) for said in saids)
    assert 0 <= usage.cached_tokens < usage.prompt_tokens
    assert received.done.kv_used_tokens <= received.done.kv_total_tokens
    msgspec.msgpack.encode(received.events)


def check_order(received: Received, request_state: RequestState) -> None:
    """Accepted first, Done last, one Finished for each choice and nothing of it behind, prefill before
    text."""
    events = received.events
    assert isinstance(events[0], Accepted)
    assert isinstance(events[-1], Done)
    assert [type(one) for one in events].count(Accepted) == 1
    assert [type(one) for one in events].count(Done) == 1
    assert sorted(one.choice for one in received.all(Finished)) == list(
        range(request_state.request.n)
    )
    ended: set[int] = set()
    reply_logits = False
    prefill = -1
    for event in events:
        match event:
            case Text(choice, text):
                assert choice not in ended, "text after its end"
                assert text or event.logprobs
                reply_logits = True
            case Finished(choice):
                ended.add(choice)
            case Prefill(done, cached, total):
                assert not reply_logits, "prefill after text"
                assert prefill < done <= total
                assert cached <= done
                prefill = done
            case PromptLogprobs() | Queued():
                assert not reply_logits
            case MetricsSnapshot():
                assert event.running >= 0
            case _:
                pass
    assert prefill == request_state.prompt_tokens, (
        "prefill events stopped before the end of the prompt"
    )
    wanted = request_state.request.prompt_logprobs is not None
    assert len(received.all(PromptLogprobs)) == wanted
