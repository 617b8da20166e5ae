"""Documents behind a model: MODEL@NAME answers from the documents that the server was started with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from localchat.documents.library import DocumentLibrary
from localchat.engine.request import Messages
from localchat.server.config import ServerConfig
from tests.support.http_server import NAME, Stage, ask, serving


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    (tmp_path / "a.md").write_text("The lease ends in May.\n")
    library = DocumentLibrary(tmp_path / "documents")
    for name in ("home", "secret"):
        with library.open(name, create=True) as collection:
            collection.learn([str(tmp_path / "a.md")])
    config = ServerConfig(documents=("home",), documents_folder=library.folder)
    with serving(config) as running:
        yield running


def prompted(stage: Stage, path: str, model: str, *texts: str) -> list[str]:
    """The contents that reached the engine for these turns."""
    turns = [
        {"role": "assistant" if at % 2 else "user", "content": text}
        for at, text in enumerate(texts)
    ]
    body = {"model": model, "messages": turns, "max_tokens": 9, "stream": False}
    assert ask(stage, path, body).status == 200
    prompt = stage.engine.requests[-1].prompt
    assert isinstance(prompt, Messages)
    return [message.content for message in prompt.messages]


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/v1/chat/completions", f"{NAME}@home"),
        ("/v1/chat/completions", "@home"),
        ("/v1/messages", f"{NAME}@home"),
        ("/api/chat", f"{NAME}@home:latest"),
    ],
)
def test_every_protocol_asks_the_documents(stage: Stage, path: str, model: str) -> None:
    (text,) = prompted(stage, path, model, "When does it end?")
    assert text.startswith("Documents: home. ")
    assert text.endswith("[a.md:1]\nThe lease ends in May.\n\n\nWhen does it end?")


def test_all_turns_of_a_conversation_begin_with_the_same_text(stage: Stage) -> None:
    (first,) = prompted(stage, "/v1/chat/completions", "@home", "When?")
    later = prompted(stage, "/v1/chat/completions", "@home", "When?", "In May.", "Sure?")
    assert later == [first, "In May.", "Sure?"]


def test_what_was_taken_is_told_in_a_header(stage: Stage) -> None:
    body = {"model": "@home", "messages": [{"role": "user", "content": "When?"}]}
    reply = ask(stage, "/v1/chat/completions", body)
    assert reply.headers["x-localchat-documents"].startswith("@home: 1 file, ")


def test_other_documents_are_not_offered(stage: Stage) -> None:
    assert prompted(stage, "/v1/chat/completions", f"{NAME}@secret", "Hi") == ["Hi"]
    names = [model["id"] for model in ask(stage, "/v1/models").json["data"]]
    assert names == [NAME, f"{NAME}@home"]
    assert ask(stage, f"/v1/models/{NAME}@home").status == 200


def test_a_text_to_continue_has_no_place_for_documents(stage: Stage) -> None:
    reply = ask(stage, "/v1/completions", {"model": "@home", "prompt": "Once"})
    assert (reply.status, reply.error["param"]) == (400, "model")
