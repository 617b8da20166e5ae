"""An engine core stepped by hand over the llama.cpp runner and a tiny random file."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from localchat.backend_api.interface import ModelInfo, Runner
from localchat.backend_api.special_tokens import SpecialToken
from localchat.core.engine_core import EngineCallbacks, EngineCore
from localchat.core.input_processor import InputProcessor
from localchat.core.kv_cache import make_kv_cache_manager
from localchat.engine.events import Done, Event, PromptLogprobs, Text, TokenLogprob
from localchat.engine.request import GenerateRequest, Sampling, TokenIds
from localchat.errors import LocalchatError
from tests.support.cache_integrity import check
from tests.support.greedy import NEARLY_GREEDY
from tests.support.llamacpp_models import VOCAB

MOST_STEPS = 20_000
CACHE_BYTES = 50_000_000


class Numbers:
    """A vocabulary of VOCAB tokens that never ends a text."""

    vocab_size = VOCAB
    bos = eos = -1
    eog: frozenset[int] = frozenset()
    add_bos = False
    longest_piece = 1
    special_tokens: tuple[SpecialToken, ...] = ()

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        return [byte % VOCAB for byte in text.encode()]

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return bytes([97 + token % 26])

    def special(self, name: str) -> int:
        return -1


class _Model:
    """The part of an open model that the input processor uses."""

    def __init__(self, adapters: tuple[tuple[str, float], ...]) -> None:
        self.tokenizer = Numbers()
        self.info = ModelInfo(
            "m", "tiny", "none", 0, 4096, VOCAB, 0, None, adapters=adapters, identity="m"
        )


@dataclass
class Received:
    """Events of one request."""

    events: list[Event] = field(default_factory=list)
    error: LocalchatError | None = None

    @property
    def tokens(self) -> list[int]:
        texts = [one for one in self.events if isinstance(one, Text)]
        return [entry.token for one in texts if not one.choice for entry in one.logprobs]

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        prompts = [one for one in self.events if isinstance(one, PromptLogprobs)]
        return [entry for one in prompts for entry in one.tokens]

    @property
    def done(self) -> Done:
        return next(one for one in self.events if isinstance(one, Done))


class Core:
    """One engine core over one runner, its KV cache checked whenever it is idle."""

    def __init__(
        self,
        runner: Runner,
        *,
        speculation: bool = True,
        cache: int = CACHE_BYTES,
        adapters: tuple[tuple[str, float], ...] = (),
    ) -> None:
        self.kv_cache = make_kv_cache_manager(runner.capabilities, "m", cache)
        self.sent: list[str] = []
        self.received: dict[int, Received] = {}
        self.core = EngineCore(
            runner,
            Numbers(),
            self.kv_cache,
            EngineCallbacks(self._events, self._failure, self.sent.append),
            speculation=speculation,
        )
        context = runner.capabilities.context_tokens
        self.input_processor = InputProcessor(
            _Model(adapters),  # type: ignore[arg-type]
            context,
            {},
            self.sent.append,
        )
        self._ids = itertools.count(1)

    def _events(self, items: list[tuple[int, Event]]) -> None:
        for id_, event in items:
            self.received[id_].events.append(event)

    def _failure(self, id_: int, error: LocalchatError) -> None:
        self.received[id_].error = error

    def ask(self, request: GenerateRequest) -> int:
        id_ = next(self._ids)
        request_state, accepted = self.input_processor.accept(id_, request)
        self.received[id_] = Received([accepted])
        self.core.submit(request_state)
        return id_

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.core.process_commands()
            self.core.step()

    def run_until_idle(self) -> None:
        """Step until all is done; nothing may be left over."""
        for _ in range(MOST_STEPS):
            if self.core.idle:
                break
            self.step()
        else:
            raise AssertionError("the engine core does not become idle")
        self.step()
        check(self.kv_cache)
        assert self.kv_cache.usage().live == 0

    def say(self, request: GenerateRequest) -> Received:
        id_ = self.ask(request)
        self.run_until_idle()
        received = self.received[id_]
        assert received.error is None, received.error
        return received


def request(prompt: Iterable[int], **changes: Any) -> GenerateRequest:
    """Token ids in, greedy unless a temperature is given; its tokens come as log probabilities."""
    fields = set(Sampling.__struct_fields__)
    sampling = {name: changes.pop(name) for name in list(changes) if name in fields}
    sampling.setdefault("temperature", NEARLY_GREEDY)
    chosen = {"max_tokens": 40, "logprobs": 0, **changes}
    return GenerateRequest(
        TokenIds(tuple(prompt)), loop_guard=False, sampling=Sampling(**sampling), **chosen
    )
