"""More tries at one answer over the endpoint: one choice comes back, with what the tries brought and cost."""

import json
from typing import Any

import pytest

from localchat.engine.events import Event, Finished, Text, TokenLogprob
from localchat.tries import judge
from tests.support.http_server import Stage, Wire, chat, serving, settled
from tests.support.scripted_engine import ScriptedAnswer

FAULTS = (
    "Check your answer: is it right, does it answer what was asked, is anything missing? Reply with JSON: "
    '{"faults": [...]}, one short sentence for each fault, and an empty list if there is none.'
)


def tries(*texts: str, logprobs: tuple[float, ...] = ()) -> tuple[Event, ...]:
    """The texts as choices that end one after the other."""
    events: list[Event] = []
    for choice, text in enumerate(texts):
        logprob = logprobs[choice] if logprobs else -1.0
        token = TokenLogprob(1, text.encode(), logprob, ())
        events += [Text(choice, text, (token,)), Finished(choice, "stop")]
    return tuple(events)


def _pick(*answers: str) -> str:
    """The question which of these answers is the best."""
    return judge.pick_messages((), answers)[-1].content


def extension(chunk: Any) -> Any:
    return chunk["x_localchat"]["tries"]


def test_a_vote_sends_the_answer_that_most_agree_on(stage: Stage) -> None:
    word = stage.plays("sum", *tries("It is 7.", "It is 8.", "So 8.", "8"))
    reply = chat(stage, word, x_localchat={"vote": 4})
    assert stage.last.n == 4
    (choice,) = reply.json["choices"]
    assert (choice["index"], choice["message"]["content"]) == (0, "It is 8.")
    report = extension(reply.json)
    assert (report["method"], report["answer"], report["chosen"]) == ("vote", "8", 1)
    assert report["votes"] == {"8": 3, "7": 1}


def test_a_decided_vote_cancels_the_rest_and_counts_what_was_written(stage: Stage) -> None:
    events = (*tries("8", "8", "8"), *(Text(3, "x ") for _ in range(2000)))
    word = stage.plays("early", *events, gap_s=0.01)
    cancelled = stage.engine.cancelled
    reply = chat(stage, word, x_localchat={"vote": 4})
    assert extension(reply.json)["ended"] == 3
    assert stage.engine.cancelled == cancelled + 1
    used = reply.json["usage"]["completion_tokens"]
    assert 3 <= used < 2000
    assert extension(reply.json)["completion_tokens"] == used


def test_best_of_sends_the_likeliest(stage: Stage) -> None:
    word = stage.plays("poem", *tries("dull", "fine", "odd", logprobs=(-2.0, -0.5, -3.0)))
    reply = chat(stage, word, best_of=3)
    assert stage.last.logprobs == 0, "the engine tells the log probability of each token"
    assert reply.json["choices"][0]["message"]["content"] == "fine"
    assert reply.json["choices"][0]["logprobs"] is None
    assert extension(reply.json)["mean_logprob"] == -0.5
    assert reply.json["usage"]["completion_tokens"] == 3, "all tries count"


def test_a_stream_has_the_chosen_answer_alone_and_the_report_last(stage: Stage) -> None:
    word = stage.plays("streamed", *tries("7", "9", "9"))
    options = {"include_usage": True}
    reply = chat(stage, word, stream=True, stream_options=options, x_localchat={"vote": 3})
    assert reply.events[-1] == "[DONE]"
    *chunks, last = reply.chunks_json
    deltas = [one["choices"][0] for one in chunks]
    assert {one["index"] for one in deltas} == {0}
    assert "".join(one["delta"].get("content", "") for one in deltas) == "9"
    assert deltas[-1]["finish_reason"] == "stop"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert extension(last)["answer"] == "9"


def test_the_model_itself_picks(stage: Stage) -> None:
    word = stage.plays("judged", *tries("first", "second"))
    asked = (
        "Here are 2 answers to my last message.\n\nAnswer 1:\nfirst\n\nAnswer 2:\nsecond\n\n"
        'Which one is the best? Reply with JSON: {"best": NUMBER}.'
    )
    stage.plays(asked, *tries('{"best": 2}'))
    reply = chat(stage, word, best_of=2, x_localchat={"judge": True})
    assert reply.json["choices"][0]["message"]["content"] == "second"
    assert extension(reply.json)["judged"]
    assert stage.last.grammar is not None, "the verdict is held to JSON"
    assert reply.json["usage"]["completion_tokens"] == 3


def test_a_critique_mends_the_answer_and_counts_all_three(stage: Stage) -> None:
    word = stage.plays("essay", *tries("a bad one"))
    stage.plays(FAULTS, *tries('{"faults": ["it is too short"]}'))
    mend = (
        "Your answer has these faults:\n- it is too short\nWrite the whole answer again without them. "
        "Write the answer alone, with no word about the faults."
    )
    stage.plays(mend, *tries("a better one"))
    for answers, best in ((("a bad one", "a better one"), 2), (("a better one", "a bad one"), 1)):
        stage.plays(_pick(*answers), *tries(json.dumps({"best": best})))
    reply = chat(stage, word, x_localchat={"critique": True})
    assert reply.json["choices"][0]["message"]["content"] == "a better one"
    report = extension(reply.json)
    assert (report["faults"], report["mended"]) == (["it is too short"], True)
    assert (report["first"], report["second"]) == ("a bad one", "a better one")
    assert reply.json["usage"]["completion_tokens"] == 5
    assert report["first_tokens"] == 1


def test_a_correction_that_loses_the_comparison_is_reported_only(stage: Stage) -> None:
    word = stage.plays("sum", *tries("right"))
    stage.plays(FAULTS, *tries('{"faults": ["it is too short"]}'))
    stage.plays(judge.correction_messages((), "", ["it is too short"])[-1].content, *tries("wrong"))
    # The same place twice: the model prefers the place, not the answer.
    for answers in (("right", "wrong"), ("wrong", "right")):
        stage.plays(_pick(*answers), *tries('{"best": 2}'))
    reply = chat(stage, word, x_localchat={"critique": True})
    assert reply.json["choices"][0]["message"]["content"] == "right"
    report = extension(reply.json)
    assert (report["mended"], report["second"]) == (False, "wrong")


def test_the_guide_does_not_judge(stage: Stage) -> None:
    refused = chat(stage, "x", model="guide", x_localchat={"critique": True})
    assert refused.status == 400
    assert "cannot judge answers" in refused.json["error"]["message"]


def test_an_answer_without_faults_stays(stage: Stage) -> None:
    word = stage.plays("good", *tries("fine"))
    stage.plays(FAULTS, *tries('{"faults": []}'))
    reply = chat(stage, word, x_localchat={"critique": True})
    assert reply.json["choices"][0]["message"]["content"] == "fine"
    assert extension(reply.json)["mended"] is False


def test_a_schema_field_is_counted(stage: Stage) -> None:
    texts = [json.dumps({"why": str(n), "sum": n // 2}) for n in (2, 4, 5)]
    word = stage.plays("json", *tries(*texts))
    reply = chat(stage, word, x_localchat={"vote": 3, "vote_by": "field:sum"})
    assert extension(reply.json)["votes"] == {"2": 2, "1": 1}


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 3, "n": 2}, "n"),
        ({"best_of": 3, "x_localchat": {"vote": 3}}, "x_localchat.vote"),
        ({"best_of": 17}, "best_of"),
        ({"x_localchat": {"vote": 1}}, "x_localchat.vote"),
        ({"x_localchat": {"vote": 3}, "temperature": 0}, "temperature"),
        ({"x_localchat": {"vote": 3, "vote_by": "feeling"}}, "x_localchat.vote_by"),
        ({"x_localchat": {"vote_by": "number"}}, "x_localchat.vote_by"),
        ({"x_localchat": {"judge": True}}, "x_localchat.judge"),
        ({"x_localchat": {"critique": True}, "tools": [TOOL]}, "x_localchat.critique"),
    ],
)
def test_what_does_not_go_together_is_refused_by_its_field(
    stage: Stage, fields: dict[str, Any], param: str
) -> None:
    asked = len(stage.engine.requests)
    reply = chat(stage, "hi", **fields)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert len(stage.engine.requests) == asked


def test_one_try_is_an_ordinary_answer(stage: Stage) -> None:
    reply = chat(stage, "plain", best_of=1)
    assert "x_localchat" not in reply.json


def test_a_failure_among_the_tries_is_an_error(stage: Stage) -> None:
    from localchat.errors import EngineDied

    stage.scripts["dead"] = ScriptedAnswer((), error=EngineDied("gone"), events=tries("1")[:1])
    assert chat(stage, "dead", x_localchat={"vote": 2}).status == 503


def test_a_server_that_stops_ends_the_questions_to_the_judge_with_its_own_error() -> None:
    with serving() as stage:
        word = stage.plays("essay", *tries("a bad one"))
        stage.scripts[FAULTS] = ScriptedAnswer(("word ",) * 1000, gap_s=0.1)
        wire = Wire(stage.port)
        messages = [{"role": "user", "content": word}]
        wire.ask("/v1/chat/completions", {"messages": messages, "x_localchat": {"critique": True}})
        assert settled(lambda: len(stage.engine.requests) == 2)
    with wire:
        assert wire.reply().error["code"] == "server_stopping"
