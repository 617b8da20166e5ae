"""llama.cpp's own routes: what llama.vim and llama.vscode send, and the bytes that they look for."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from localchat.engine.events import Finished, Limit, Text, TokenLogprob
from localchat.engine.request import Infill, Sampling, TokenIds
from localchat.engine.request import TextPrompt as Prompt
from localchat.errors import ContextExceeded, UsageError
from localchat.server.config import ServerLimits
from localchat.server.leases import AsyncLease
from localchat.server.llamacpp.endpoints import projected
from tests.support.http_server import Reply, Stage, Wire, ask, settled
from tests.support.llamavim import VIM, VIM_CHECK, VIM_FIELDS, VIM_WARM
from tests.support.scripted_engine import ScriptedAnswer

VSCODE_WARM: dict[str, Any] = {
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": VIM["input_extra"],
    "prompt": "",
    "n_predict": 0,
    "samplers": [],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1,
}


@pytest.fixture(autouse=True)
def _answers(stage: Stage) -> Iterator[None]:
    """Every gap is answered alike, until a test says otherwise."""
    stage.scripts[""] = ScriptedAnswer(("argv", "):\n", "    return 0"))
    yield
    stage.engine.refusals.clear()


def infill(stage: Stage, **fields: Any) -> Reply:
    return ask(stage, "/infill", {**VIM, **fields})


def gap(stage: Stage) -> Infill:
    prompt = stage.last.prompt
    assert isinstance(prompt, Infill)
    return prompt


# ---------------------------------------------------------------------------- the request


def test_what_llama_vim_sends_reaches_the_engine(stage: Stage) -> None:
    assert infill(stage).status == 200
    assert gap(stage) == Infill(
        "import os\n\ndef main(", "\n\nprint(main())\n", (("x.py", "X = 1\n"), ("tmp", "Y = 2\n"))
    )
    assert stage.last.max_tokens == 128
    assert stage.last.priority > 0
    sampling = stage.last.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 40, 0.90)
    assert (sampling.min_p, sampling.typical_p, sampling.repetition_penalty) == (0.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"samplers": []}, Sampling(top_k=40, top_p=0.9)),
        (
            {"samplers": "edkypmxt", "temperature": 0.8},
            Sampling(temperature=0.8, top_k=40, top_p=0.9),
        ),
        (
            {"samplers": ["top_k", "min_p", "infill"], "temperature": 0.3, "top_k": None},
            Sampling(
                temperature=0.3,
                top_p=0.9,
                typical_p=1.0,
                repetition_penalty=1.0,
                dry_multiplier=0.0,
                top_n_sigma=0.0,
                xtc_probability=0.0,
            ),
        ),
        ({"samplers": None, "seed": -1}, Sampling(top_k=40, top_p=0.9)),
        ({"samplers": None, "seed": 7}, Sampling(top_k=40, top_p=0.9, seed=7)),
    ],
)
def test_samplers_that_a_list_does_not_name_are_off(
    stage: Stage, fields: dict[str, Any], expected: Sampling
) -> None:
    assert infill(stage, **fields).status == 200
    assert stage.last.sampling == expected


@pytest.mark.parametrize(
    ("asked", "expected"), [(0, 0), (5, 5), (-1, 32_768), (None, 32_768), (1 << 30, 32_768)]
)
def test_the_longest_answer_is_bounded_and_may_be_nothing(
    stage: Stage, asked: int | None, expected: int
) -> None:
    assert infill(stage, n_predict=asked).status == 200
    assert stage.last.max_tokens == expected


@pytest.mark.parametrize("body", [VIM_WARM, VSCODE_WARM])
def test_a_warm_up_computes_the_prompt_alone(stage: Stage, body: dict[str, Any]) -> None:
    stage.plays("", Finished(0, "length"))
    reply = ask(stage, "/infill", body)
    assert reply.status == 200
    assert stage.last.max_tokens == 0
    assert gap(stage).extra == (("x.py", "X = 1\n"), ("tmp", "Y = 2\n"))
    if body is VIM_WARM:
        assert reply.body == b"{}"
    else:
        assert reply.json["content"] == ""


def test_an_empty_request_is_an_empty_gap(stage: Stage) -> None:
    assert ask(stage, "/infill", {}).status == 200
    assert gap(stage) == Infill("", "")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_prefix": 7}, "input_prefix"),
        ({"input_extra": [{"text": 1}]}, "input_extra[0].text"),
        ({"input_extra": [{"text": None}]}, "input_extra[0].text"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ({"input_extra": [{"text": "a", "filename": 1}]}, "input_extra[0].filename"),
        ({"input_extra": ["a"]}, "input_extra[0]"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"n": 2}, "n"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"n_predict": "many"}, "n_predict"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_name(
    stage: Stage, fields: dict[str, Any], param: str
) -> None:
    reply = infill(stage, **fields)
    assert reply.status == 400
    assert reply.error["param"] == param


def test_a_model_without_the_tokens_for_it_is_a_refusal(stage: Stage) -> None:
    stage.engine.refusals[""] = [UsageError("this model has no fill-in-the-middle tokens")]
    reply = infill(stage)
    assert reply.status == 400
    assert "fill-in-the-middle" in reply.error["message"]


# ---------------------------------------------------------------------------- the answer


def test_llama_vim_finds_its_bytes_and_the_fields_it_named_and_no_others(stage: Stage) -> None:
    reply = infill(stage)
    assert reply.body.startswith(b'{"content":"argv):\\n    return 0","timings/prompt_n":')
    assert VIM_CHECK.search(reply.body)
    assert b"\n" not in reply.body
    assert reply.headers["content-length"] == str(len(reply.body))
    assert list(reply.json) == VIM_FIELDS
    assert reply.json["truncated"] is False
    assert reply.json["timings/predicted_n"] == 3
    for name in VIM_FIELDS[1:9]:
        assert isinstance(reply.json[name], int | float) and reply.json[name] >= 0, name


def test_content_of_an_empty_answer_is_a_string(stage: Stage) -> None:
    stage.plays("", Finished(0, "stop"))
    reply = infill(stage)
    assert reply.body.startswith(b'{"content":"",')
    assert VIM_CHECK.search(reply.body)


def test_answer_has_every_field_by_default(stage: Stage) -> None:
    stage.plays("", Text(0, "a\n"), Finished(0, "stop", ";"))
    whole = infill(stage, response_fields=None).json
    assert (whole["content"], whole["stop"], whole["stop_type"]) == ("a\n", True, "word")
    assert (whole["stopping_word"], whole["has_new_line"]) == (";", True)
    assert whole["tokens_cached"] == whole["tokens_evaluated"] + whole["tokens_predicted"]
    assert whole["timings"]["prompt_n"] + whole["timings"]["cache_n"] == whole["tokens_evaluated"]
    assert "error" not in whole


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ((Finished(0, "stop"),), "eos"),
        ((Finished(0, "length"),), "limit"),
        ((Finished(0, "stop", "\n"),), "word"),
    ],
)
def test_answer_has_its_stop_type(stage: Stage, events: Any, kind: str) -> None:
    stage.plays("", *events)
    assert infill(stage, response_fields=["stop_type"]).json == {"stop_type": kind}


@pytest.mark.parametrize(
    ("limit", "truncated"), [("context", True), ("max_tokens", False), ("", False)]
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_end_stops_at_the_context_and_reports_it(
    stage: Stage, limit: Limit, truncated: bool, stream: bool
) -> None:
    stage.plays("Once", Text(0, " upon"), Finished(0, "length", limit=limit))
    body = {"prompt": "Once", "n_predict": -1, "ignore_eos": True, "stream": stream}
    reply = ask(stage, "/completion", body)
    assert (stage.last.max_tokens, stage.last.ignore_eos) == (ServerLimits().answer_tokens, True)
    last = json.loads(reply.body.strip().splitlines()[-1].removeprefix(b"data: "))
    assert (last["stop_type"], last["truncated"]) == ("limit", truncated)


def test_paths_become_keys_and_what_is_not_there_is_left_out() -> None:
    whole = {"content": "x", "timings": {"prompt_n": 1, "deep": {"er": 2}}, "a/b": 3}
    assert projected(whole, [""]) == {}
    assert projected(whole, ["timings/prompt_n", "none", "content/x", "timings/deep/er"]) == {
        "timings/prompt_n": 1,
        "timings/deep/er": 2,
    }
    assert projected(whole, ["timings"]) == {"timings": whole["timings"]}


def test_stream_is_pieces_and_a_last_object_and_nothing_after_it(stage: Stage) -> None:
    reply = infill(stage, stream=True, response_fields=None)
    *pieces, last = reply.chunks_json
    assert [piece["content"] for piece in pieces] == ["argv", "):\n", "    return 0"]
    assert not any(piece["stop"] for piece in pieces)
    assert last["stop"] is True and last["content"] == ""
    assert last["timings"]["predicted_n"] == 3
    assert b"[DONE]" not in reply.body
    assert reply.body.startswith(b'data: {"index":0,"content":"argv"')


# ---------------------------------------------------------------------------- where it ends


def test_an_answer_that_leaves_its_block_is_cut_and_the_engine_stops(stage: Stage) -> None:
    before = stage.engine.cancelled
    stage.scripts[""] = ScriptedAnswer(
        ("x\n", "        y\n", "z", *["more\n"] * 20_000), gap_s=0.002
    )
    reply = infill(stage, n_indent=4, response_fields=["content", "stop_type", "timings"])
    assert reply.json["content"] == "x\n        y"
    assert reply.json["stop_type"] == "limit"
    assert reply.json["timings"]["predicted_n"] >= 3
    assert settled(lambda: stage.engine.cancelled == before + 1)


def test_an_answer_whose_time_is_up_ends_with_its_line(stage: Stage) -> None:
    before = stage.engine.cancelled
    stage.scripts[""] = ScriptedAnswer(tuple(f"line {at}\n" for at in range(20_000)), gap_s=0.003)
    content = infill(stage, t_max_predict_ms=50).json["content"]
    lines = content.splitlines(keepends=True)
    assert 1 <= len(lines) < 10_000
    assert lines == [f"line {at}\n" for at in range(len(lines))]
    assert settled(lambda: stage.engine.cancelled == before + 1)


def test_a_client_that_hangs_up_stops_the_engine(stage: Stage) -> None:
    before = stage.engine.cancelled
    stage.scripts[""] = ScriptedAnswer(("x",) * 50_000, gap_s=0.005)
    asked = len(stage.engine.requests)
    with Wire(stage.port) as wire:
        wire.ask("/infill", VIM)
        assert settled(lambda: len(stage.engine.requests) > asked)
    assert settled(lambda: stage.engine.cancelled == before + 1)


# ---------------------------------------------------------------------------- what does not fit


def too_long() -> ContextExceeded:
    return ContextExceeded("too long", context_tokens=4096, prompt_tokens=9000)


def test_context_is_shortened_from_afar_and_the_answer_reports_it(stage: Stage) -> None:
    extra = [{"filename": f"{at}.py", "text": f"{at}\n"} for at in range(4)]
    stage.engine.refusals[""] = [too_long(), too_long()]
    reply = infill(stage, input_extra=extra)
    assert reply.status == 200
    assert reply.json["truncated"] is True
    assert gap(stage).extra == (("3.py", "3\n"),)
    assert gap(stage).prefix == "import os\n\ndef main("


def test_lines_next_to_the_cursor_stay_longest(stage: Stage) -> None:
    before = "".join(f"before {at}\n" for at in range(64))
    after = "".join(f"after {at}\n" for at in range(64))
    stage.engine.refusals[""] = [too_long() for _ in range(5)]
    body = {"input_extra": [], "input_prefix": before, "input_suffix": after, "prompt": "he"}
    assert infill(stage, **body).json["truncated"] is True
    found = gap(stage)
    assert before.endswith(found.prefix.removesuffix("he")) and found.prefix.endswith("\nhe")
    assert after.startswith(found.suffix) and found.suffix.endswith("\n")
    assert 0 < len(found.prefix) < len(before) / 16
    assert 0 < len(found.suffix) < len(after) / 16


def test_gap_that_never_fits_is_refused_with_the_known_message(stage: Stage) -> None:
    stage.engine.refusals[""] = [too_long() for _ in range(40)]
    reply = infill(stage)
    assert reply.status == 400
    assert reply.error["code"] == "context_length_exceeded"


# ---------------------------------------------------------------------------- /completion


def test_completion_goes_on_from_a_text_or_from_tokens(stage: Stage) -> None:
    word = stage.plays("Once", Text(0, " upon"), Finished(0, "stop"))
    reply = ask(stage, "/completion", {"prompt": word, "n_predict": 8, "stop": ["\n"]})
    assert reply.json["content"] == " upon"
    assert (stage.last.prompt, stage.last.max_tokens) == (Prompt("Once", special=True), 8)
    assert (stage.last.stop, stage.last.priority) == (("\n",), 0)
    assert ask(stage, "/completion", {"prompt": [1, 2]}).status == 200
    assert stage.last.prompt == TokenIds((1, 2))


def test_completion_streams_its_content(stage: Stage) -> None:
    word = stage.plays("Go", Text(0, "a"), Text(0, "b"), Finished(0, "stop"))
    reply = ask(stage, "/completion", {"prompt": word, "stream": True})
    assert "".join(chunk["content"] for chunk in reply.chunks_json) == "ab"


def test_completion_takes_a_schema_and_needs_a_prompt(stage: Stage) -> None:
    schema = {"type": "object"}
    ask(stage, "/completion", {"prompt": "x", "json_schema": schema})
    assert stage.last.grammar is not None
    assert json.loads(stage.last.grammar.source) == schema
    assert ask(stage, "/completion", {}).error["param"] == "prompt"


TWO = (TokenLogprob(7, b"\xc3\xa9", -0.5, ((7, b"\xc3\xa9", -0.5), (9, b"\xff", -1.5))),)
THREE = (TokenLogprob(8, b"!", -0.25, ((8, b"!", -0.25),)),)


def candidate(token: int, text: str, raw: list[int], logprob: float) -> dict[str, Any]:
    return {"id": token, "token": text, "bytes": raw, "logprob": logprob}


E_ACUTE = candidate(7, "é", [195, 169], -0.5)
TOLD = [
    {**E_ACUTE, "top_logprobs": [E_ACUTE, candidate(9, "\ufffd", [255], -1.5)]},
    {
        **candidate(8, "!", [33], -0.25),
        "top_logprobs": [candidate(8, "!", [33], -0.25)],
    },
]


@pytest.mark.parametrize("path", ["/completion", "/infill"])
def test_candidates_and_token_ids_are_reported_on_request(stage: Stage, path: str) -> None:
    stage.plays("", Text(0, "é", TWO), Text(0, "!", THREE), Finished(0, "stop"))
    body = {"prompt": "", "n_predict": 8}
    for fields, logprobs, tokens, sent in (
        ({"n_probs": 2}, 2, [], TOLD),
        ({"return_tokens": True}, 0, [7, 8], None),
        ({"n_probs": 2, "return_tokens": True}, 2, [7, 8], TOLD),
        ({"n_probs": 0, "return_tokens": False}, None, [], None),
    ):
        whole = ask(stage, path, {**body, **fields}).json
        assert stage.last.logprobs == logprobs
        assert (whole["tokens"], whole.get("completion_probabilities")) == (tokens, sent)
        *pieces, last = ask(stage, path, {**body, **fields, "stream": True}).chunks_json
        assert [token for piece in pieces for token in piece["tokens"]] == tokens
        assert last["tokens"] == []
        if sent is not None:
            assert [piece["completion_probabilities"] for piece in pieces] == [
                [one] for one in sent
            ]


@pytest.mark.parametrize(
    ("field", "nothing", "something"),
    [
        *(("n", 1, 2), ("n_cmpl", 1, 2), ("n_probs", 0, 21), ("n_probs", None, -1)),
        *(("image_data", [], [{"data": "", "id": 1}]), ("mirostat", 0, 2)),
        ("post_sampling_probs", False, True),
    ],
)
def test_what_there_is_not_is_refused_and_a_value_of_nothing_passes(
    stage: Stage, field: str, nothing: Any, something: Any
) -> None:
    assert ask(stage, "/completion", {"prompt": "x", field: nothing}).status == 200
    reply = ask(stage, "/completion", {"prompt": "x", field: something})
    assert (reply.status, reply.error["param"]) == (400, field)
    assert field in reply.error["message"]


# ---------------------------------------------------------------------------- editors' chats


def test_a_chat_of_no_tokens_is_a_warm_up(stage: Stage) -> None:
    """llama.vim sends such a request while an instruction is typed."""
    word = stage.plays("be quick", Finished(0, "length"))
    body = {
        "id_slot": 1,
        "messages": [{"role": "user", "content": word}],
        "samplers": [],
        "n_predict": 0,
        "cache_prompt": True,
        "response_fields": [""],
    }
    assert ask(stage, "/v1/chat/completions", body).status == 200
    assert stage.last.max_tokens == 0


# ---------------------------------------------------------------------------- between two suggestions


def test_a_model_that_fills_gaps_is_kept_and_one_that_does_not_is_not(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[str] = []
    monkeypatch.setattr(AsyncLease, "fill_gap", lambda lease: kept.append(lease.name))
    ask(stage, "/completion", {"prompt": "a"})
    ask(stage, "/v1/completions", {"prompt": "a"})
    assert kept == []
    infill(stage)
    ask(stage, "/v1/completions", {"prompt": "a", "suffix": "b"})
    assert len(kept) == 2
