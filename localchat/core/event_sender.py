"""What the loop tells the doors: events of a job, gathered in a step and sent as one frame."""

from collections.abc import Callable

from msgspec import structs

from localchat.core.kv_cache.manager import KVUsage
from localchat.core.sequence import RequestState, Sequence
from localchat.core.spec_decode.ngram_proposer import NgramProposer
from localchat.engine.events import (
    Done,
    Event,
    Finished,
    FinishReason,
    MetricsSnapshot,
    Prefill,
    PromptLogprobs,
    Queued,
    Reasoning,
    Speculation,
    Text,
    ToolCall,
    Usage,
)
from localchat.errors import LocalchatError

_FIGURES_GAP_S = 0.1
TOGETHER_S = 0.015
"""What fast steps tell waits so long for what the next ones will tell. A frame for every token wakes its reader
700 times a second, and where the engine computes on all cores, each time from one of them."""
_AT_ONCE_TOKENS = 8
"""Of each choice: its first words never wait."""
_VISIBLE = (Text, Reasoning, ToolCall)


class EventSender:
    """Gathers events between two sendings. `fingerprint` goes with every end of a request.

    `together_s`: how long a piece of text, of reasoning or a figure may wait at most, where the turn after this
    one is known to come within that time; anything else is sent by the turn that brings it, and what waited
    goes before. 0: nothing waits.
    """

    def __init__(
        self,
        send: Callable[[list[tuple[int, Event]]], None],
        fail: Callable[[int, LocalchatError], None],
        usage: Callable[[], KVUsage],
        fingerprint: str,
        together_s: float = 0.0,
    ) -> None:
        self._send = send
        self._fail = fail
        self._usage = usage
        self._fingerprint = fingerprint
        self._items: list[tuple[int, Event]] = []
        self._together_s = together_s
        self._sent_s = float("-inf")
        self._pressing = False
        self._figured: dict[int, tuple[str, float]] = {}
        self._queued: dict[int, int] = {}
        self.evictions = 0
        """Of the books, as of the last `now`."""

    def turned(self, now_s: float, next_s: float) -> None:
        """A turn ends at `now_s`, and the next one in about `next_s`: send, unless all can wait for that
        one."""
        if self._pressing or now_s + next_s > self._sent_s + self._together_s:
            self.flush()
            self._sent_s = now_s

    def hurry(self) -> None:
        """Send what cannot wait: first tokens do not stand behind the plan of the next step."""
        if self._pressing:
            self.flush()

    def flush(self) -> None:
        """Send everything now."""
        self._pressing = False
        if self._items:
            items, self._items = self._items, []
            self._send(items)

    def text(self, sequence: Sequence, events: list[Event], now_s: float) -> None:
        """Parts of an answer."""
        job = sequence.job
        if any(isinstance(event, _VISIBLE) for event in events):
            job.clock.visible(now_s)
        if sequence.known <= job.prompt_tokens + _AT_ONCE_TOKENS or any(
            isinstance(event, ToolCall) for event in events
        ):
            self._pressing = True
        self._items += [(job.id, event) for event in events]

    def _tell(self, id_: int, event: Event) -> None:
        """What does not wait."""
        self._pressing = True
        self._items.append((id_, event))

    def prefill(self, job: RequestState, done: int) -> None:
        # A text that was set back, or that lost what the cache held of it, is computed again in silence.
        if done > max(job.prefill_told, job.cached - 1):
            job.prefill_told = done
            self._tell(job.id, Prefill(done, job.cached, job.prompt_tokens, job.why_missed))

    def prompt_logprobs(self, job: RequestState) -> None:
        """All of them, once."""
        if job.request.prompt_logprobs is None or job.prompt_logprobs_told:
            return
        job.prompt_logprobs_told = True
        self._tell(job.id, PromptLogprobs(tuple(job.prompt_logprobs)))

    def queued(self, job: RequestState, ahead: int) -> None:
        if self._queued.get(job.id) != ahead:
            self._queued[job.id] = ahead
            self._tell(job.id, Queued(ahead))

    def finished(self, sequence: Sequence, reason: FinishReason, stop: str) -> None:
        self._tell(sequence.job.id, Finished(sequence.choice, reason, stop))

    def done(self, job: RequestState, usage: KVUsage, now_s: float) -> None:
        """The end of a request. `usage`: the books while it still held its KV."""
        timings = job.clock.timings(job.prompt_tokens, job.cached, now_s)
        self._tell(
            job.id,
            Done(
                usage=Usage(job.prompt_tokens, job.cached, job.completion_tokens),
                timings=timings,
                kv_used_tokens=usage.live,
                kv_total_tokens=usage.total,
                speculation=speculation(job),
                fingerprint=self._fingerprint,
            ),
        )
        self._drop(job.id)

    def failure(self, id_: int, error: LocalchatError) -> None:
        """Why a request ends, at once: flush first, what was gathered comes before it."""
        self._fail(id_, error)

    def forget(self, id_: int) -> None:
        """Nothing more of this request is told, also not what was gathered for it."""
        self._items = [item for item in self._items if item[0] != id_]
        self._drop(id_)

    def _drop(self, id_: int) -> None:
        self._figured.pop(id_, None)
        self._queued.pop(id_, None)

    def figures(self, job: RequestState, running: int, waiting: int, now_s: float) -> None:
        """The figures now: ten a second at most, and at each change of phase."""
        phase, told_s = self._figured.get(job.id, ("", 0.0))
        current = "decode" if job.completion_tokens else "prefill"
        if phase == current and now_s - told_s < _FIGURES_GAP_S:
            return
        self._figured[job.id] = (current, now_s)
        self._pressing = self._pressing or phase != current
        self._items.append((job.id, self.now(job, running, waiting)))

    def now(self, job: RequestState | None, running: int, waiting: int) -> MetricsSnapshot:
        """MetricsSnapshot of one request, or of the whole engine."""
        usage = self._usage()
        self.evictions = usage.evictions
        whole = MetricsSnapshot(
            phase="decode" if running else "queued",
            kv_used_tokens=usage.live,
            kv_shared_tokens=usage.shared,
            kv_cached_tokens=usage.cached,
            kv_parked_tokens=usage.parked,
            kv_total_tokens=usage.total,
            running=running,
            waiting=waiting,
        )
        if job is None:
            return whole
        drafts = speculation(job)
        return structs.replace(
            whole,
            phase="decode" if job.completion_tokens else "prefill",
            ttft_s=job.clock.ttft_s,
            decode_tokens_per_s=job.clock.decode_tokens_per_s,
            completion_tokens=job.completion_tokens,
            drafted=drafts.drafted,
            accepted=drafts.accepted,
            speculation_off=drafts.off,
        )


def speculation(job: RequestState) -> Speculation:
    """Drafts of all choices together; the speed-up and the reason are those of the first."""
    ledgers: list[NgramProposer] = [one.drafts for one in job.sequences if one.drafts is not None]
    if not ledgers:
        return Speculation(off="not asked" if not job.request.speculation else "")
    return Speculation(
        drafted=sum(ledger.drafted for ledger in ledgers),
        accepted=sum(ledger.accepted for ledger in ledgers),
        speedup=ledgers[0].speedup,
        off=ledgers[0].off,
    )
