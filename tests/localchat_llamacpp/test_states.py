"""Models with a running state: prefix hits, drafts that are taken back, and the same text in every way."""

from pathlib import Path

import numpy as np
import pytest

from localchat.core.spec_decode.sequence_drafts import SequenceDrafts
from tests.support.llamacpp_core import Core, request
from tests.support.llamacpp_driver import Start
from tests.support.llamacpp_hybrids import WRITERS
from tests.support.llamacpp_models import VOCAB

RANDOM = np.random.default_rng(8)
PROMPT = [int(token) for token in RANDOM.integers(0, VOCAB - 3, 90)]
COPY = [int(token) for token in RANDOM.integers(0, VOCAB - 3, 30)] * 3
KINDS = list(WRITERS)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hybrids")
    return {name: write(folder / f"{name}.gguf") for name, write in WRITERS.items()}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def _plain(start: Start, kind: str, prompt: list[int], tokens: int = 40) -> list[int]:
    asked = request(prompt, max_tokens=tokens, speculation=False)
    return Core(start(kind).runner).say(asked).tokens


def test_an_identical_prompt_and_a_continued_one_hit(start: Start, kind: str) -> None:
    core = Core(start(kind).runner)
    first = core.say(request(PROMPT))
    again = core.say(request(PROMPT))
    assert again.done.usage.cached_tokens == len(PROMPT) - 4
    assert again.tokens == first.tokens
    longer = [*PROMPT, *first.tokens, 5, 6, 7]
    continued = core.say(request(longer))
    assert continued.done.usage.cached_tokens == len(PROMPT) + len(first.tokens) - 1
    assert continued.tokens == _plain(start, kind, longer)


class _Oracle:
    """Proposes tokens of a known text, each third proposal wrong at its third place."""

    def __init__(self, text: list[int], at: int) -> None:
        self.text, self.at, self.calls = text, at, 0
        self.draft: list[int] = []

    def chances(self, limit: int) -> list[float]:
        self.calls += 1
        self.draft = self.text[self.at : self.at + min(limit, 2 + self.calls % 4)]
        if self.calls % 3 == 0 and len(self.draft) > 2:
            self.draft[2] = (self.draft[2] + 1) % VOCAB
        return [1.0] * len(self.draft)

    def take(self, count: int) -> tuple[int, ...]:
        return tuple(self.draft[:count])

    def withdraw(self) -> None:
        """Nothing is kept."""

    def advance(self, tokens: list[int], drafted: int = 0) -> None:
        self.at += len(tokens)

    def append(self, tokens: list[int]) -> None:
        self.at += len(tokens)

    def index(self) -> bool:
        return True


def _drafting(core: Core, id_: int, text: list[int]) -> SequenceDrafts:
    core.core.process_commands()
    # A step costs the same, however wide it is, so that drafts always pay.
    core.core.output_processor.step_costs.seconds = lambda rows: 1.0  # type: ignore[method-assign]
    drafts = core.core.output_processor.requests[id_].sequences[0].drafts
    assert drafts is not None
    drafts.ngrams = _Oracle(text, 0)  # type: ignore[assignment]
    return drafts


def test_rejected_drafts_take_the_state_back(start: Start, kind: str) -> None:
    text = _plain(start, kind, PROMPT, 60)
    core = Core(start(kind).runner)
    id_ = core.ask(request(PROMPT, max_tokens=60))
    drafts = _drafting(core, id_, text)
    core.run_until_idle()
    assert core.received[id_].tokens == text
    assert 0 < drafts.accepted < drafts.drafted


def test_drafts_among_neighbours_and_preempted_give_the_same_text(start: Start, kind: str) -> None:
    prompts = [PROMPT, COPY, PROMPT[::-1]]
    texts = [_plain(start, kind, prompt) for prompt in prompts]
    core = Core(start(kind, slots=2).runner)
    ids = []
    for priority, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        ids.append(core.ask(request(prompt, priority=priority)))
        _drafting(core, ids[-1], text)
        core.step(6)
    core.run_until_idle()
    assert [core.received[id_].tokens for id_ in ids] == texts
    assert core.core.stats().preemptions


@pytest.mark.parametrize("step", [16, 64, 256])
def test_chunks_give_the_same_text(start: Start, kind: str, step: int) -> None:
    text = _plain(start, kind, PROMPT)
    assert Core(start(kind, step=step).runner).say(request(PROMPT)).tokens == text


def test_n_gram_drafts_change_no_text(start: Start, kind: str) -> None:
    text = _plain(start, kind, COPY, 80)
    assert Core(start(kind).runner).say(request(COPY, max_tokens=80)).tokens == text


def test_choices_share_the_state_of_their_prompt(start: Start, kind: str) -> None:
    core = Core(start(kind).runner)
    received = core.say(request(PROMPT, n=2, max_tokens=10))
    assert received.tokens[:5] == _plain(start, kind, PROMPT, 5)
