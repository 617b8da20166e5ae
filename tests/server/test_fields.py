"""Fields that are not implemented: rejected if they change the answer, else named or known to be harmless."""

import json
from typing import Any

import pytest

from localchat.engine.request import Grammar
from localchat.server.anthropic.protocol import MessagesBody
from localchat.server.fields import check_unknown_fields, header_value
from localchat.server.openai.protocol import ChatBody
from tests.support.http_server import Reply, Stage, ask, chat

IGNORED = "x-localchat-ignored"
MESSAGES = [{"role": "user", "content": "hi"}]
FUNCTION = {"type": "function", "name": "f", "parameters": {}}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
    "/completion": {"prompt": "hi"},
    "/api/chat": {"model": "m", "messages": MESSAGES, "stream": False},
    "/api/generate": {"model": "m", "prompt": "hi", "stream": False},
}


def post(stage: Stage, route: str, **fields: Any) -> Reply:
    return ask(stage, route, {**ROUTES[route], **fields})


@pytest.mark.parametrize("route", ROUTES)
def test_unknown_field_is_named_in_a_header(stage: Stage, route: str) -> None:
    reply = post(stage, route, surprising=1, user="me", absent=None, empty=[])
    assert reply.status == 200
    assert reply.headers[IGNORED] == "surprising"


def test_stream_names_unknown_fields_too(stage: Stage) -> None:
    assert chat(stage, stream=True, surprising=1).headers[IGNORED] == "surprising"
    reply = post(stage, "/api/chat", stream=True, surprising=1)
    assert reply.headers[IGNORED] == "surprising"


@pytest.mark.parametrize("route", ROUTES)
def test_request_without_unknown_fields_has_no_header(stage: Stage, route: str) -> None:
    assert IGNORED not in post(stage, route).headers


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("smoothing_factor", 0.8),
        ("mirostat", 2),
        ("modalities", ["text", "audio"]),
        ("logits_processors", ["x"]),
        ("allowed_token_ids", [1]),
    ],
)
def test_field_that_would_change_the_answer_is_rejected(
    stage: Stage, route: str, name: str, value: Any
) -> None:
    reply = post(stage, route, **{name: value})
    assert reply.status == 400
    assert name in reply.body.decode()


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        # Codex sends the first, OpenAI's libraries the second.
        (
            {"tools": [{"type": "image_generation", "output_format": "png"}, FUNCTION]},
            "tools.output_format, tools.image_generation",
        ),
        ({"reasoning": {"effort": "low", "context": "all_turns"}}, "reasoning.context"),
    ],
)
def test_another_field_of_the_same_name_elsewhere_passes(
    stage: Stage, fields: dict[str, Any], ignored: str
) -> None:
    reply = post(stage, "/v1/responses", **fields)
    assert (reply.status, reply.headers.get(IGNORED)) == (200, ignored)


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("/api/chat", {"options": {"mirostat": 2}}),
        ("/v1/chat/completions", {"messages": [{**MESSAGES[0], "images": ["eA=="]}]}),
        ("/v1/responses", {"input": [{**MESSAGES[0], "images": ["eA=="]}]}),
    ],
)
def test_field_of_options_and_messages_that_would_change_the_answer_is_rejected(
    stage: Stage, route: str, fields: dict[str, Any]
) -> None:
    reply = post(stage, route, **fields)
    assert (reply.status, "would change the answer" in reply.body.decode()) == (400, True)


@pytest.mark.parametrize("route", ROUTES)
def test_neutral_values_of_such_fields_pass(stage: Stage, route: str) -> None:
    neutral = {
        "smoothing_factor": 0,
        "mirostat": 0,
        "modalities": ["text"],
        "tfs_z": 1.0,
        "logits_processors": [],
        "guidance_scale": None,
    }
    reply = post(stage, route, **neutral)
    assert (reply.status, reply.headers.get(IGNORED)) == (200, None)


RARE = {
    "dry_multiplier": 0.8,
    "dry_base": 1.5,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 512,
    "top_n_sigma": 1.5,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "dynatemp_range": 0.3,
    "dynatemp_exponent": 2.0,
}


def post_sampling(stage: Stage, route: str, fields: dict[str, Any]) -> Reply:
    """Send sampling where the protocol has it."""
    if route.startswith("/api/"):
        return post(stage, route, options=fields)
    return post(stage, route, **fields)


@pytest.mark.parametrize("route", ROUTES)
def test_every_protocol_has_dry_xtc_top_n_sigma_and_dynamic_temperature(
    stage: Stage, route: str
) -> None:
    reply = post_sampling(stage, route, {**RARE, "dry_sequence_breakers": ["\n", "##"]})
    assert (reply.status, reply.headers.get(IGNORED)) == (200, None)
    sampling = stage.last.sampling
    assert {name: getattr(sampling, name) for name in RARE} == RARE
    assert sampling.dry_sequence_breakers == ("\n", "##")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("dry_multiplier", -1), ("dry_base", 0.5), ("dry_allowed_length", -1)),
        *(("dry_penalty_last_n", -2), ("xtc_probability", 1.5), ("xtc_threshold", -0.1)),
        *(("top_n_sigma", -2), ("dynatemp_range", -1), ("dry_sequence_breakers", "no JSON")),
    ],
)
def test_values_of_rare_samplers_out_of_range_are_rejected(
    stage: Stage, route: str, name: str, value: Any
) -> None:
    reply = post_sampling(stage, route, {name: value})
    assert reply.status == 400
    assert name in reply.body.decode()


def test_other_spellings_of_rare_samplers_are_accepted(stage: Stage) -> None:
    chat(stage, nsigma=-1, dry_sequence_breakers='["\\n"]')
    assert (stage.last.sampling.top_n_sigma, stage.last.sampling.dry_sequence_breakers) == (
        0.0,
        ("\n",),
    )
    chat(stage, dry_sequence_breakers=[])
    assert stage.last.sampling.dry_sequence_breakers == ("none",)


@pytest.mark.parametrize("route", ["/api/chat", "/api/generate"])
def test_structure_in_a_field_of_another_protocol_is_rejected(stage: Stage, route: str) -> None:
    assert post(stage, route, response_format={"type": "json_object"}).status == 400
    assert post(stage, route, grammar="start: /a/").status == 400


def test_ollama_options_are_checked_too(stage: Stage) -> None:
    reply = post(stage, "/api/chat", options={"num_gpu": 9, "repeat_last_n": 64, "mirostat": 0})
    assert reply.headers[IGNORED] == "options.repeat_last_n"
    assert post(stage, "/api/chat", options={"mirostat": 1}).status == 400


def test_fields_of_messages_and_options_are_named_by_their_path(stage: Stage) -> None:
    message = {"role": "user", "content": "hi", "annotations": [1], "mood": "good"}
    reply = chat(stage, messages=[message], stream_options={"continuous_usage_stats": True})
    assert reply.headers[IGNORED] == "messages.mood, stream_options.continuous_usage_stats"


def test_tools_that_run_elsewhere_are_named(stage: Stage) -> None:
    tools = [{"type": "web_search"}, FUNCTION]
    reply = post(stage, "/v1/responses", tools=tools)
    assert (reply.status, reply.headers[IGNORED]) == (200, "tools.web_search")


def test_names_cannot_inject_headers() -> None:
    names = check_unknown_fields(
        {"messages": [], "a\r\nb: c": 1, "ü": 2, "": 4, "x" * 500: 3}, ChatBody
    )
    value = header_value(names)
    assert value.startswith(b"a??b??c, ?, ?, xxx")
    assert len(value) < 120


def test_the_number_of_names_is_limited() -> None:
    body = {"messages": [], "max_tokens": 1, **{f"f{number}": 1 for number in range(500)}}
    assert len(check_unknown_fields(body, MessagesBody)) == 32


# ---------------------------------------------------------------------------- fields that are implemented


@pytest.mark.parametrize("route", ROUTES)
def test_ends_of_answers_reach_the_engine(stage: Stage, route: str) -> None:
    fields: dict[str, Any] = {
        "min_tokens": 30,
        "stop_token_ids": [7, 8],
        "include_stop_str_in_output": True,
        "bad_words": ["no", ""],
        "ignore_eos": True,
        "logit_bias": {"5": -1},
        "repeat_penalty": 1.3,
        "typ_p": 0.9,
    }
    if route.startswith("/api"):
        fields = {"options": fields}
    elif route in {"/v1/messages", "/v1/completions"}:
        fields["max_tokens"] = 40
    reply = post(stage, route, **fields)
    assert (reply.status, reply.headers.get(IGNORED)) == (200, None)
    last = stage.last
    assert (last.min_tokens, last.stop_tokens, last.keep_stop) == (30, (7, 8), True)
    assert (last.bad_words, last.ignore_eos) == (("no",), True)
    assert last.sampling.logit_bias == {5: -1}
    assert last.sampling.repetition_penalty == 1.3
    assert last.sampling.typical_p == 0.9


def test_min_tokens_above_the_limit_is_rejected(stage: Stage) -> None:
    assert chat(stage, max_tokens=10, min_tokens=11).error["param"] == "min_tokens"
    assert chat(stage, min_tokens=-1).error["param"] == "min_tokens"


def test_last_answer_is_not_continued_if_the_client_declines(stage: Stage) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Well"}]
    assert chat(stage, messages=messages).status == 200
    assert stage.prompt.continue_last
    assert chat(stage, messages=messages, continue_final_message=False).status == 200
    assert not stage.prompt.continue_last


# ---------------------------------------------------------------------------- response_format

SCHEMA = {"type": "object", "properties": {"k": {"type": "integer"}}, "required": ["k"]}


@pytest.mark.parametrize(
    "given",
    [
        {"type": "json_object", "value": SCHEMA},
        {"type": "json", "value": SCHEMA},
        {"type": "json", "value": json.dumps(SCHEMA)},
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    ],
)
def test_schema_is_found_in_every_place(stage: Stage, given: dict[str, Any]) -> None:
    assert chat(stage, response_format=given).status == 200
    grammar = stage.last.grammar
    assert grammar is not None and grammar.kind == "json_schema"
    assert json.loads(grammar.source) == SCHEMA


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "regex", "value": "[0-9]+"}, Grammar("regex", "[0-9]+", "response_format")),
        ({"type": "json_object"}, Grammar("json_object", field="response_format")),
    ],
)
def test_other_structures(stage: Stage, given: dict[str, Any], expected: Grammar) -> None:
    assert chat(stage, response_format=given).status == 200
    assert stage.last.grammar == expected


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"type": "json_object", "values": SCHEMA}, "response_format.values"),
        ({"type": "json_schema", "json_schema": SCHEMA}, "response_format.json_schema.type"),
        ({"type": "structural_tag"}, "response_format.type"),
        ({"type": "regex"}, "response_format.value"),
        ({"type": "json_schema"}, "response_format.json_schema.schema"),
    ],
)
def test_unknown_structure_is_rejected(stage: Stage, given: dict[str, Any], param: str) -> None:
    reply = chat(stage, response_format=given)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_strict_is_passed_on(stage: Stage) -> None:
    wrapped = {"name": "x", "schema": SCHEMA, "strict": True}
    assert (
        chat(stage, response_format={"type": "json_schema", "json_schema": wrapped}).status == 200
    )
    assert stage.last.grammar is not None and stage.last.grammar.strict
    text = {"format": {"type": "json_schema", **wrapped}}
    assert post(stage, "/v1/responses", text=text).status == 200
    assert stage.last.grammar is not None and stage.last.grammar.strict


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "value": SCHEMA}}}),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "value": SCHEMA}}}),
    ],
)
def test_unknown_key_of_a_format_is_rejected_in_every_protocol(
    stage: Stage, route: str, fields: dict[str, Any]
) -> None:
    reply = post(stage, route, **fields)
    assert reply.status == 400
    assert "format.value" in reply.body.decode()


# ---------------------------------------------------------------------------- timings


def test_end_of_a_stream_has_the_timings(stage: Stage) -> None:
    chunks = chat(stage, stream=True).chunks_json
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert {"cache_n", "prompt_n", "predicted_n", "predicted_per_second"} <= set(
        chunks[-1]["timings"]
    )
    assert [chunk for chunk in chunks if "timings" in chunk] == chunks[-1:]


def test_usage_chunk_has_the_timings(stage: Stage) -> None:
    chunks = chat(stage, stream=True, stream_options={"include_usage": True}).chunks_json
    assert chunks[-1]["choices"] == [] and "prompt_n" in chunks[-1]["timings"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"


def test_all_ends_but_the_last_are_written_at_once(stage: Stage) -> None:
    chunks = chat(stage, stream=True, n=2).chunks_json
    ends = [chunk for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert len(ends) == 2 and "timings" not in ends[0] and "timings" in ends[1]


# ---------------------------------------------------------------------------- small faults


def test_repeated_v1_is_an_alias(stage: Stage) -> None:
    assert ask(stage, "/v1/v1/models").status == 200
    assert ask(stage, "/v1/v1/chat/completions", ROUTES["/v1/chat/completions"]).status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "same-site"}, 415),
        ({"user-agent": "Mozilla/5.0"}, 415),
    ],
)
def test_plain_text_body_is_taken_from_programs_alone(
    stage: Stage, headers: dict[str, str], status: int
) -> None:
    body = json.dumps(ROUTES["/v1/chat/completions"]).encode()
    reply = ask(
        stage, "/v1/chat/completions", body, headers={"content-type": "text/plain", **headers}
    )
    assert reply.status == status
