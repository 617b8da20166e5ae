"""Event sender: collects the events of a step for the parent process and sends them as one frame."""

from collections.abc import Callable

from msgspec import structs

from localchat.backend_api.sampling.reference import GREEDY_BELOW
from localchat.core.kv_cache.manager import KVUsage
from localchat.core.sequence import RequestState, Sequence
from localchat.core.spec_decode.sequence_drafts import SequenceDrafts
from localchat.engine.events import (
    Done,
    Event,
    Finished,
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
"""Time that events of fast steps wait for those of the next steps. A frame for every token would wake the
reader 700 times a second."""
CPU_COALESCE_S = 0.03
"""The limit for an engine on a CPU, whose cores the reader needs too. For SmolLM2 on two cores, the reader
takes 0.16 ms of CPU per token, and 0.33 with a limit of 0.015."""
_URGENT_TOKENS = 8
"""The first tokens of each choice never wait."""
_VISIBLE = (Text, Reasoning, ToolCall)


class EventSender:
    """Collects events between two frames.

    Text, reasoning and metrics wait up to `coalesce_s` if the next step is expected to end within that time.
    All other events are sent in their step, after those that waited. 0: nothing waits.
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
        self._on_failure = fail
        self._usage = usage
        self._fingerprint = fingerprint
        self._items: list[tuple[int, Event]] = []
        self._coalesce_s = coalesce_s
        self._sent_s = float("-inf")
        self._urgent = False
        self._last_metrics: dict[int, tuple[str, float]] = {}
        self._queued: dict[int, int] = {}
        self.evictions = 0
        """Evictions of the KV cache, as of the last snapshot."""

    def end_step(self, now_s: float, next_s: float) -> None:
        """Send the events, unless all can wait for the next step. `next_s`: time until its end."""
        if self._urgent or now_s + next_s > self._sent_s + self._coalesce_s:
            self.flush()
            self._sent_s = now_s

    def flush_urgent(self) -> None:
        """Send urgent events now. First tokens do not wait while the next step is planned."""
        if self._urgent:
            self.flush()

    def flush(self) -> None:
        """Send everything now."""
        self._urgent = False
        if self._items:
            items = self._items
            self._items = []
            self._send(_joined(items))

    def text(self, sequence: Sequence, events: list[Event], now_s: float) -> None:
        """Add the events of an answer's new tokens."""
        request_state = sequence.request_state
        for event in events:
            if isinstance(event, _VISIBLE):
                request_state.timer.visible(now_s)
            if isinstance(event, ToolCall):
                self._urgent = True
            self._items.append((request_state.id, event))
        if sequence.known <= request_state.prompt_tokens + _URGENT_TOKENS:
            self._urgent = True

    def plain_text(self, sequence: Sequence, text: str, now_s: float) -> None:
        """Add text of an answer, which is not empty."""
        request_state = sequence.request_state
        request_state.timer.visible(now_s)
        self._items.append((request_state.id, Text(sequence.choice, text)))
        if len(sequence.tokens) <= request_state.prompt_tokens + _URGENT_TOKENS:
            self._urgent = True

    def _add_urgent(self, id_: int, event: Event) -> None:
        """Add an event that does not wait."""
        self._urgent = True
        self._items.append((id_, event))

    def prefill(self, request_state: RequestState, done: int) -> None:
        # A preempted sequence, or one that lost its cached prefix, is computed again without events.
        if done > max(request_state.prefill_sent, request_state.cached - 1):
            request_state.prefill_sent = done
            self._add_urgent(
                request_state.id,
                Prefill(
                    done,
                    request_state.cached,
                    request_state.prompt_tokens,
                    request_state.why_missed,
                    request_state.read_back,
                    request_state.read_s,
                ),
            )

    def prompt_logprobs(self, request_state: RequestState) -> None:
        """Add the log probabilities of the whole prompt, once."""
        if request_state.request.prompt_logprobs is None or request_state.prompt_logprobs_sent:
            return
        request_state.prompt_logprobs_sent = True
        self._add_urgent(request_state.id, PromptLogprobs(tuple(request_state.prompt_logprobs)))

    def queued(self, request_state: RequestState, ahead: int) -> None:
        if self._queued.get(request_state.id) != ahead:
            self._queued[request_state.id] = ahead
            self._add_urgent(request_state.id, Queued(ahead))

    def finished(self, request_state: RequestState, event: Finished) -> None:
        """Add the end of a choice."""
        self._add_urgent(request_state.id, event)

    def done(self, request_state: RequestState, usage: KVUsage, now_s: float) -> None:
        """Add the end of a request. `usage`: KV usage while the request still held its KV."""
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
                    request_state.reasoning_tokens,
                ),
                timings=timings,
                kv_used_tokens=usage.live,
                kv_total_tokens=usage.total,
                speculation=speculation(request_state),
                fingerprint=self._fingerprint,
                read_back_tokens=request_state.read_back,
                read_back_s=request_state.read_s,
                why_missed=request_state.why_missed,
            ),
        )
        self._drop(request_state.id)

    def fail(self, id_: int, error: LocalchatError) -> None:
        """Report a failed request at once. Flush first, so that its events precede the failure."""
        self._on_failure(id_, error)

    def discard(self, id_: int) -> None:
        """Drop the unsent events of a request."""
        self._items = [item for item in self._items if item[0] != id_]
        self._drop(id_)

    def _drop(self, id_: int) -> None:
        self._last_metrics.pop(id_, None)
        self._queued.pop(id_, None)

    def send_metrics(
        self, request_state: RequestState, running: int, waiting: int, now_s: float
    ) -> None:
        """Add a metrics snapshot at each change of phase, and at most ten per second."""
        last_phase, last_s = self._last_metrics.get(request_state.id, ("", 0.0))
        if last_phase == "decode" and now_s - last_s < _METRICS_INTERVAL_S:
            return
        phase = "decode" if request_state.completion_tokens else "prefill"
        if last_phase == phase and now_s - last_s < _METRICS_INTERVAL_S:
            return
        self._last_metrics[request_state.id] = (phase, now_s)
        self._urgent = self._urgent or last_phase != phase
        self._items.append((request_state.id, self.snapshot(request_state, running, waiting)))

    def snapshot(
        self, request_state: RequestState | None, running: int, waiting: int
    ) -> MetricsSnapshot:
        """Return the metrics of a request, or of the whole engine for None."""
        usage = self._usage()
        self.evictions = usage.evictions
        engine_metrics = MetricsSnapshot(
            phase="decode" if running else "queued",
            kv_used_tokens=usage.live,
            kv_shared_tokens=usage.shared,
            kv_cached_tokens=usage.cached,
            kv_swapped_tokens=usage.swapped,
            kv_total_tokens=usage.total,
            running=running,
            waiting=waiting,
        )
        if request_state is None:
            return engine_metrics
        drafts = speculation(request_state)
        return structs.replace(
            engine_metrics,
            phase="decode" if request_state.completion_tokens else "prefill",
            ttft_s=request_state.timer.ttft_s,
            decode_tokens_per_s=request_state.timer.decode_tokens_per_s,
            completion_tokens=request_state.completion_tokens,
            drafted=drafts.drafted,
            accepted=drafts.accepted,
            speculation_off=drafts.off,
        )


def _joined(items: list[tuple[int, Event]]) -> list[tuple[int, Event]]:
    """Join consecutive pieces of text of the same choice.

    Every event costs the parent process about as much as the engine spends on a token.
    """
    joined: list[tuple[int, Event]] = []
    last: dict[int, tuple[int, Text]] = {}
    for item in items:
        id_, event = item
        if type(event) is not Text or event.logprobs:
            last.pop(id_, None)
            joined.append(item)
            continue
        index, previous = last.get(id_, (-1, event))
        if index < 0 or previous.choice != event.choice:
            last[id_] = (len(joined), event)
            joined.append(item)
            continue
        text = Text(event.choice, previous.text + event.text)
        last[id_] = (index, text)
        joined[index] = (id_, text)
    return joined


def speculation(request_state: RequestState) -> Speculation:
    """Return the drafts of all choices. Speedup and reason are those of the first choice."""
    choices: list[SequenceDrafts] = [
        sequence.drafts for sequence in request_state.sequences if sequence.drafts is not None
    ]
    if not choices:
        if not request_state.request.speculation:
            return Speculation(off="not asked")
        if request_state.seeded:
            return Speculation(off="off with a seed")
        if not request_state.deterministic:
            return Speculation()
        if request_state.sampling.temperature < GREEDY_BELOW:
            return Speculation(off="off at temperature 0")
        return Speculation(off="off for greedy answers")
    return Speculation(
        drafted=sum(drafts.drafted for drafts in choices),
        accepted=sum(drafts.accepted for drafts in choices),
        speedup=choices[0].speedup,
        off=choices[0].off,
    )
