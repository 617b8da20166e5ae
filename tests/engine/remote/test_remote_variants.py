"""Remotes that are right in their own way: rooms that they name, calls without numbers, lists of figures."""

from typing import Any

import msgspec
import pytest

from localchat.engine.events import Finished, Text, TokenLogprob, ToolCall
from localchat.engine.request import GenerateRequest, Grammar, Message, Messages
from localchat.engine.request import TextPrompt as Prompt
from localchat.errors import NetworkError, TemplateError, UsageError
from tests.support.remote_server import ASK, Exchange, Open, events, piece, text_of

_OPENAI = "This model's maximum context length is 4096 tokens. However, "


# ---------------------------------------------------------------------------- room for the answer


@pytest.mark.parametrize(
    ("message", "room"),
    [
        (f"{_OPENAI}you requested 9010 tokens (10 in the messages, 9000 in the completion).", 4086),
        (
            "'max_tokens' or 'max_completion_tokens' is too large: 9000. This model's maximum context length "
            "is 4096 tokens and your request has 10 input tokens (9000 > 4096 - 10).",
            4086,
        ),
        (
            "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a "
            "total of 9010 tokens: 10 tokens from the input messages and 9000 tokens for the completion.",
            4086,
        ),
        (
            "max_tokens is too large: 9000. This model supports at most 2048 completion tokens, whereas you "
            "provided 9000.",
            2048,
        ),
    ],
)
def test_an_answer_that_finds_no_room_is_asked_for_as_long_as_there_is(
    opened: Open, message: str, room: int
) -> None:
    def answer(exchange: Exchange) -> None:
        if exchange.seen[-1][1]["max_tokens"] > room:
            exchange.send(400, {"error": {"message": message}})
        else:
            exchange.stream(piece(content="all"), piece("stop"))

    engine, server = opened(answer)
    assert text_of(events(engine, GenerateRequest(ASK.prompt, max_tokens=9000))) == "all"
    assert [body["max_tokens"] for _, body, _ in server.seen] == [9000, room]


def test_a_server_that_never_finds_room_is_believed_after_the_second_time(opened: Open) -> None:
    def answer(exchange: Exchange) -> None:
        wanted = exchange.seen[-1][1]["max_tokens"]
        message = f"This model supports at most {wanted - 1} completion tokens"
        exchange.send(400, {"error": {"message": message}})

    engine, server = opened(answer)
    with pytest.raises(UsageError):
        events(engine, GenerateRequest(ASK.prompt, max_tokens=9000))
    assert len(server.seen) == 2


# ---------------------------------------------------------------------------- calls and log probabilities


def _tool(index: int | None, id_: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    call = {"id": id_, "type": "function", "function": function}
    return piece(tool_calls=[call if index is None else {"index": index, **call}])


@pytest.mark.parametrize("index", [0, None])
def test_calls_that_share_an_index_are_told_apart_by_their_ids(
    opened: Open, index: int | None
) -> None:
    pieces = [_tool(index, "a", "f", '{"x": 1}'), _tool(index, "b", "g", '{"y"')]
    pieces.append(_tool(index, "", "", ": 2}"))
    engine, _ = opened(lambda one: one.stream(*pieces, piece("tool_calls")))
    found = [event for event in events(engine) if isinstance(event, ToolCall)]
    assert found == [
        ToolCall(0, 0, "a", "f", '{"x": 1}'),
        ToolCall(0, 1, "b", "g", '{"y"'),
        ToolCall(0, 1, "", "", ": 2}"),
    ]


@pytest.mark.parametrize("again", [("a", "f"), ("z", ""), ("", "f")])
def test_a_call_whose_head_is_repeated_is_one_call(opened: Open, again: tuple[str, str]) -> None:
    pieces = [_tool(0, "a", "f", '{"x"'), _tool(0, *again, ": 1}"), _tool(1, "b", "f", "{}")]
    engine, _ = opened(lambda one: one.stream(*pieces, piece("tool_calls")))
    found = [event for event in events(engine) if isinstance(event, ToolCall)]
    assert [event.call for event in found] == [0, 0, 1]


def test_log_probabilities_of_a_completion_are_taken_over(opened: Open) -> None:
    reported = {
        "tokens": [" a", "é"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"é": -0.5, "b": -1}],
        "text_offset": [0, 2],
    }
    choice = {"index": 0, "text": " aé", "logprobs": reported, "finish_reason": "stop"}
    engine, _ = opened(lambda one: one.stream({"choices": [choice]}))
    asked = GenerateRequest(Prompt("x"), logprobs=2)
    (text,) = [event for event in events(engine, asked) if isinstance(event, Text)]
    assert text.logprobs == (
        TokenLogprob(-1, b" a", 0.0, ()),
        TokenLogprob(-1, "é".encode(), -0.5, ((-1, "é".encode(), -0.5), (-1, b"b", -1.0))),
    )


def test_lists_of_log_probabilities_that_do_not_fit_are_an_error(opened: Open) -> None:
    reported = {"tokens": ["a", "b"], "token_logprobs": [-1.0]}
    choice = {"index": 0, "text": "ab", "logprobs": reported, "finish_reason": "stop"}
    engine, _ = opened(lambda one: one.stream({"choices": [choice]}))
    with pytest.raises(NetworkError, match="malformed"):
        events(engine, GenerateRequest(Prompt("x"), logprobs=0))


# ---------------------------------------------------------------------------- what only ours take


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
BOUND = Messages((Message("user", "look"),), tools=(TOOL,), bind_arguments=True)


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        (GenerateRequest(ASK.prompt, grammar=Grammar("regex", "a+")), {"regex": "a+"}),
        (GenerateRequest(ASK.prompt, grammar=Grammar("lark", "start: A")), {"grammar": "start: A"}),
        (GenerateRequest(ASK.prompt, max_tokens=0), {"n_predict": 0}),
        (GenerateRequest(BOUND), {"tools": [TOOL], "bind_arguments": True}),
    ],
)
def test_another_localchat_is_asked_for_what_the_protocol_has_not(
    opened: Open, asked: GenerateRequest, sent: dict[str, Any]
) -> None:
    owner = "localchat"

    def answer(exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            exchange.send(200, {"data": [{"id": "m", "owned_by": owner}]})
        else:
            exchange.stream(piece("stop"))

    engine, server = opened(answer, model="")
    events(engine, asked)
    assert sent.items() <= server.seen[-1][1].items()
    assert "max_tokens" not in server.seen[-1][1]
    owner = "vllm"
    other, strange = opened(answer, model="")
    if asked.grammar is not None:
        with pytest.raises(UsageError, match="cannot be sent to a remote"):
            events(other, asked)
    else:
        events(other, asked)
        assert not {"n_predict", "bind_arguments"} & strange.seen[-1][1].keys()


def test_the_longest_answer_is_asked_for_by_the_name_that_a_server_wants(opened: Open) -> None:
    refusal = (
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
        "'max_completion_tokens' instead."
    )

    def answer(exchange: Exchange) -> None:
        if "max_tokens" in exchange.seen[-1][1]:
            exchange.send(400, {"error": {"message": refusal, "code": "unsupported_parameter"}})
        else:
            exchange.stream(piece(content="a"), piece("stop"))

    engine, server = opened(answer)
    for _ in range(2):
        assert text_of(events(engine, GenerateRequest(ASK.prompt, max_tokens=7))) == "a"
    limits = [
        {name: value for name, value in body.items() if name.startswith("max_")}
        for _, body, _ in server.seen
    ]
    assert limits == [{"max_tokens": 7}, *[{"max_completion_tokens": 7}] * 2]


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("Conversation roles must alternate user/assistant/user/assistant/...", None),
        ("System role not supported", None),
        ("System message must be at the beginning", None),
        ("After a user comes an assistant.", "chat_template_error"),
    ],
)
def test_a_conversation_that_the_template_there_refuses_is_asked_about_once(
    opened: Open, status: int, message: str, code: str | None
) -> None:
    error = {"message": message, "code": code}
    engine, server = opened(lambda one: one.send(status, {"error": error}))
    with pytest.raises(TemplateError):
        events(engine)
    assert len(server.seen) == 1


# ---------------------------------------------------------------------------- answers that repeat themselves


def test_a_loop_of_a_server_without_a_guard_is_ended(opened: Open) -> None:
    pieces = [piece(content="It is a loyal animal. ")] * 400

    def answer(exchange: Exchange) -> None:
        exchange.stream(*pieces, piece("length"))

    engine, _ = opened(answer)
    received = events(engine, ASK)
    (end,) = [event for event in received if isinstance(event, Finished)]
    assert end.reason == "repetition"
    assert end.repetition is not None
    assert len(text_of(received)) < 800
    free = events(engine, msgspec.structs.replace(ASK, loop_guard=False))
    assert len(text_of(free)) == 400 * 22


def test_a_loop_that_the_server_ended_is_one(opened: Open) -> None:
    last = piece("length")
    last["choices"][0]["stop_reason"] = "repetition"
    engine, _ = opened(lambda exchange: exchange.stream(piece(content="so"), last))
    (end,) = [event for event in events(engine, ASK) if isinstance(event, Finished)]
    assert end.reason == "repetition"
