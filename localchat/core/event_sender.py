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

_METRICS_INTERVAL_S = 0.1
COALESCE_S = 0.015
"""What fast steps tell waits so long for what the next ones will tell. A frame for every token wakes its reader
700 times a second, and where the engine computes on all cores, each time from one of them."""
_URGENT_TOKENS = 8
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
        coalesce_s: float = 0.0,
    ) -> None:
        self._send = send
        self._fail = fail
        self._usage = usage
        self._fingerprint = fingerprint
        self._items: list[tuple[int, Event]] = []
        self._coalesce_s = coalesce_s
        self._sent_s = float("-inf")
        self._urgent = False
        self._last_metrics: dict[int, tuple[str, float]] = {}
        self._queued: dict[int, int] = {}
        self.evictions = 0
        """Of the books, as of the last `now`."""

    def end_step(self, now_s: float, next_s: float) -> None:
        """A turn ends at `now_s`, and the next one in about `next_s`: send, unless all can wait for that
        one."""
        if self._urgent or now_s + next_s > self._sent_s + self._coalesce_s:
            self.flush()
            self._sent_s = now_s

    def flush_urgent(self) -> None:
        """Send what cannot wait: first tokens do not stand behind the plan of the next step."""
        if self._urgent:
            self.flush()

    def flush(self) -> None:
        """Send everything now."""
        self._urgent = False
        if self._items:
            items, self._items = self._items, []
            self._send(items)

    def text(self, sequence: Sequence, events: list[Event], now_s: float) -> None:
        """Parts of an answer."""
        request_state = sequence.request_state
        if any(isinstance(event, _VISIBLE) for event in events):
            request_state.timer.visible(now_s)
        if sequence.known <= request_state.prompt_tokens + _URGENT_TOKENS or any(
            isinstance(event, ToolCall) for event in events
        ):
            self._urgent = True
        self._items += [(request_state.id, event) for event in events]

    def _add_urgent(self, id_: int, event: Event) -> None:
        """What does not wait."""
        self._urgent = True
        self._items.append((id_, event))

    def prefill(self, request_state: RequestState, done: int) -> None:
        # A text that was set back, or that lost what the cache held of it, is computed again in silence.
        if done > max(request_state.prefill_sent, request_state.cached - 1):
            request_state.prefill_sent = done
            self._add_urgent(
                request_state.id,
                Prefill(
                    done,
                    request_state.cached,
                    request_state.prompt_tokens,
                    request_state.why_missed,
                ),
            )

    def prompt_logprobs(self, request_state: RequestState) -> None:
        """All of them, once."""
        if request_state.request.prompt_logprobs is None or request_state.prompt_logprobs_sent:
            return
        request_state.prompt_logprobs_sent = True
        self._add_urgent(request_state.id, PromptLogprobs(tuple(request_state.prompt_logprobs)))

    def queued(self, request_state: RequestState, ahead: int) -> None:
        if self._queued.get(request_state.id) != ahead:
            self._queued[request_state.id] = ahead
            self._add_urgent(request_state.id, Queued(ahead))

    def finished(self, sequence: Sequence, reason: FinishReason, stop: str) -> None:
        self._add_urgent(sequence.request_state.id, Finished(sequence.choice, reason, stop))

    def done(self, request_state: RequestState, usage: KVUsage, now_s: float) -> None:
        """The end of a request. `usage`: the books while it still held its KV."""
        timings = request_state.timer.timings(
            request_state.prompt_tokens, request_state.cached, now_s
        )
        self._add_urgent(
            request_state.id,
            Done(
                usage=Usage(
                    request_state.prompt_tokens,
                    request_state.cached,
                    request_state.completion_tokens,
                ),
                timings=timings,
                kv_used_tokens=usage.live,
                kv_total_tokens=usage.total,
                speculation=speculation(request_state),
                fingerprint=self._fingerprint,
            ),
        )
        self._drop(request_state.id)

    def failure(self, id_: int, error: LocalchatError) -> None:
        """Why a request ends, at once: flush first, what was gathered comes before it."""
        self._fail(id_, error)

    def discard(self, id_: int) -> None:
        """Nothing more of this request is told, also not what was gathered for it."""
        self._items = [item for item in self._items if item[0] != id_]
        self._drop(id_)

    def _drop(self, id_: int) -> None:
        self._last_metrics.pop(id_, None)
        self._queued.pop(id_, None)

    def metrics(
        self, request_state: RequestState, running: int, waiting: int, now_s: float
    ) -> None:
        """The figures now: ten a second at most, and at each change of phase."""
        phase, told_s = self._last_metrics.get(request_state.id, ("", 0.0))
        current = "decode" if request_state.completion_tokens else "prefill"
        if phase == current and now_s - told_s < _METRICS_INTERVAL_S:
            return
        self._last_metrics[request_state.id] = (current, now_s)
        self._urgent = self._urgent or phase != current
        self._items.append((request_state.id, self.now(request_state, running, waiting)))

    def now(
        self, request_state: RequestState | None, running: int, waiting: int
    ) -> MetricsSnapshot:
        """MetricsSnapshot of one request, or of the whole engine."""
        usage = self._usage()
        self.evictions = usage.evictions
        whole = MetricsSnapshot(
            phase="decode" if running else "queued",
            kv_used_tokens=usage.live,
            kv_shared_tokens=usage.shared,
            kv_cached_tokens=usage.cached,
            kv_parked_tokens=usage.swapped,
            kv_total_tokens=usage.total,
            running=running,
            waiting=waiting,
        )
        if request_state is None:
            return whole
        drafts = speculation(request_state)
        return structs.replace(
            whole,
            phase="decode" if request_state.completion_tokens else "prefill",
            ttft_s=request_state.timer.ttft_s,
            decode_tokens_per_s=request_state.timer.decode_tokens_per_s,
            completion_tokens=request_state.completion_tokens,
            drafted=drafts.drafted,
            accepted=drafts.accepted,
            speculation_off=drafts.off,
        )


def speculation(request_state: RequestState) -> Speculation:
    """Drafts of all choices together; the speed-up and the reason are those of the first."""
    ledgers: list[NgramProposer] = [
        one.proposer for one in request_state.sequences if one.proposer is not None
    ]
    if not ledgers:
        return Speculation(off="not asked" if not request_state.request.speculation else "")
    return Speculation(
        drafted=sum(ledger.drafted for ledger in ledgers),
        accepted=sum(ledger.accepted for ledger in ledgers),
        speedup=ledgers[0].speedup,
        off=ledgers[0].off,
    )
