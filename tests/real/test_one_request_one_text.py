"""One request gives one text: cold, warm, after a restart, from KV on disk, without drafts, beside others."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from localchat.engine.local.engine import LocalEngine
from localchat.engine.request import GenerateRequest, Message, Messages, Sampling
from tests.real.conftest import OpenEngine
from tests.support.answers import Answer, ask

RULES = " ".join(f"Rule {number}: call item {number} by its name." for number in range(40))
SUBJECTS = ("fox", "king", "ship")
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.9, seed=11),
    Sampling(temperature=0.9, seed=4),
)


def requests(**changes: Any) -> list[GenerateRequest]:
    """Return requests at temperature 0 and with seeds, one of them with a long system prompt."""
    fields: dict[str, Any] = {"max_tokens": 12, "logprobs": 0, "owner": "chat", **changes}
    built: list[GenerateRequest] = []
    for number, subject in enumerate(SUBJECTS):
        messages = [Message("user", f"Tell a short tale about a {subject}.")]
        if number == 0:
            messages.insert(0, Message("system", RULES))
        chosen = {"sampling": SAMPLINGS[number % len(SAMPLINGS)], **fields}
        built.append(GenerateRequest(Messages(tuple(messages)), **chosen))
    return built


def answers(engine: LocalEngine, **changes: Any) -> list[Answer]:
    return [ask(engine, request) for request in requests(**changes)]


def next_turn(request: GenerateRequest, text: str) -> GenerateRequest:
    assert isinstance(request.prompt, Messages)
    following = (Message("assistant", text), Message("user", "Say it again, but shorter."))
    messages = Messages((*request.prompt.messages, *following))
    return GenerateRequest(
        messages, sampling=request.sampling, max_tokens=12, logprobs=0, owner="chat"
    )


def assert_same(first: list[Answer], other: list[Answer]) -> None:
    """Compare log probabilities, in which a difference shows before the text changes."""
    for one, two in zip(first, other, strict=True):
        assert two.logprobs == one.logprobs


@pytest.fixture(params=["", "xllamacpp"], ids=["default", "xllamacpp"])
def load(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a test with each library of llama.cpp: as a chat loads it, and as a server with flash attention."""
    if request.param:
        if importlib.util.find_spec(request.param) is None:
            pytest.skip(f"{request.param} is not installed")
        monkeypatch.setenv("LOCALCHAT_LLAMACPP_LIBRARY", request.param)
        return {"room_for_slots": True, "threads": 2}
    return {}


def test_a_text_is_the_same_cold_warm_restarted_and_without_drafts(
    smollm2: Path, open_engine: OpenEngine, tmp_path: Path, load: dict[str, Any]
) -> None:
    disk = {"kv_folder": tmp_path, "kv_folder_bytes": 1 << 30, **load}
    engine = open_engine(smollm2, **disk)
    cold = answers(engine)
    assert_same(cold, answers(engine))
    assert_same(cold, answers(engine, speculation=False))
    following = next_turn(requests()[0], cold[0].text)
    second = ask(engine, following)
    engine.close()
    restarted = open_engine(smollm2, **disk)
    assert_same([second], [ask(restarted, following)])
    assert_same(cold, answers(restarted))


def test_a_text_does_not_depend_on_kv_of_requests_without_a_seed(
    smollm2: Path, open_engine: OpenEngine
) -> None:
    cold = answers(open_engine(smollm2))
    engine = open_engine(smollm2)
    answers(engine, sampling=Sampling(temperature=0.9))
    assert_same(cold, answers(engine))


def test_a_seed_gives_the_same_text_beside_other_requests(
    smollm2: Path, open_engine: OpenEngine
) -> None:
    engine = open_engine(smollm2, max_slots=4)
    greedy, first, *seeded = requests()
    others = [greedy, *seeded, greedy]
    alone = ask(engine, first)
    with ThreadPoolExecutor(4) as pool:
        busy = [pool.submit(ask, engine, one) for one in others]
        beside = ask(engine, first)
        assert all(one.result().text for one in busy)
    assert_same([alone], [beside])
