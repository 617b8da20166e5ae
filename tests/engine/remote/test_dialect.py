"""Fields that servers reject, and continued answers on servers of each kind."""

from typing import Any

import pytest

from localchat.engine.request import GenerateRequest, Message, Messages, Sampling
from localchat.errors import UsageError
from tests.support.remote_server import ASK, Exchange, Open, events, piece, text_of

BEGUN = Messages((Message("user", "x"), Message("assistant", "It is")), continue_last=True)
FIELDS = ("continue_final_message", "add_generation_prompt")


def continued(exchange: Exchange) -> bool:
    return exchange.seen[-1][1].get("continue_final_message") is True


def vllm(exchange: Exchange) -> None:
    if continued(exchange) and exchange.seen[-1][1].get("add_generation_prompt", True):
        exchange.send(400, {"object": "error", "message": "Cannot set both fields to true."})
    else:
        exchange.stream(piece("stop", content=" so"))


def openai(exchange: Exchange) -> None:
    for name in FIELDS:
        if name in exchange.seen[-1][1]:
            message = f"Unrecognized request argument supplied: {name}"
            exchange.send(400, {"error": {"message": message}})
            return
    exchange.stream(piece("stop", content=" so"))


def older_localchat(exchange: Exchange) -> None:
    if exchange.seen[-1][1].get("add_generation_prompt") is False:
        message = (
            "The field 'add_generation_prompt' would change the answer, and this server does not implement it; "
            "send true or leave it out."
        )
        exchange.send(400, {"error": {"message": message}})
    else:
        exchange.stream(piece("stop", content=" so"))


@pytest.mark.parametrize(
    ("answer", "left", "is_told"),
    [(vllm, 2, False), (older_localchat, 1, False), (openai, 0, True)],
)
def test_an_answer_is_continued_as_far_as_the_server_can(
    opened: Open, said: list[str], answer: Any, left: int, is_told: bool
) -> None:
    engine, server = opened(answer)
    for _ in range(2):
        assert text_of(events(engine, GenerateRequest(BEGUN))) == " so"
    assert len([name for name in FIELDS if name in server.seen[-1][1]]) == left
    assert len(server.seen) == 2 + (2 - left), "what was learned is not tried again"
    assert ("may begin a new one" in "".join(said)) is is_told


def test_an_error_about_a_continued_answer_is_not_taken_for_an_unknown_field(opened: Open) -> None:
    message = "continue_final_message is set but the chat template changed the final message"
    engine, server = opened(lambda exchange: exchange.send(400, {"message": message}))
    with pytest.raises(UsageError, match="changed the final message"):
        events(engine, GenerateRequest(BEGUN))
    assert len(server.seen) == 1


def test_reasoning_is_left_out_where_it_is_rejected(opened: Open) -> None:
    def mistral(exchange: Exchange) -> None:
        if any("reasoning_content" in message for message in exchange.seen[-1][1]["messages"]):
            place = ["body", "messages", 1, "assistant", "reasoning_content"]
            exchange.send(422, {"detail": [{"type": "extra_forbidden", "loc": place}]})
        else:
            exchange.stream(piece("stop", content="ok"))

    engine, server = opened(mistral)
    messages = (
        Message("user", "a"),
        Message("assistant", "b", reasoning="c"),
        Message("user", "d"),
    )
    assert text_of(events(engine, GenerateRequest(Messages(messages)))) == "ok"
    assert [message["content"] for message in server.seen[-1][1]["messages"]] == ["a", "b", "d"]


def test_a_field_that_the_user_set_is_never_left_out(opened: Open) -> None:
    message = "Unrecognized request argument supplied: top_k"
    engine, server = opened(lambda exchange: exchange.send(400, {"error": {"message": message}}))
    with pytest.raises(UsageError, match="top_k"):
        events(engine, GenerateRequest(ASK.prompt, Sampling(top_k=4)))
    assert len(server.seen) == 1


def test_names_and_ranges_are_those_of_the_server(opened: Open) -> None:
    def llamacpp(exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            exchange.send(200, {"data": [{"id": "m", "owned_by": "llamacpp"}]})
        else:
            exchange.stream(piece("stop"))

    engine, server = opened(llamacpp, model="")
    sampling = Sampling(repetition_penalty=1.2, logit_bias={5: -1e9})
    events(engine, GenerateRequest(ASK.prompt, sampling))
    body = server.seen[-1][1]
    assert (body["repeat_penalty"], body["logit_bias"]) == (1.2, {"5": -100})
    assert "repetition_penalty" not in body
