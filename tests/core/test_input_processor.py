"""The input processor: sampling defaults of a model file, token ids out of range, and warnings."""

from dataclasses import replace

import pytest

from localchat.core.input_processor import InputProcessor
from localchat.engine.request import GenerateRequest, Message, Messages, Sampling, TokenIds
from localchat.errors import UsageError
from tests.support.engine_core_bench import _Model
from tests.support.scripted_backend import ScriptedTokenizer


def test_sampling_defaults_out_of_range_are_ignored_with_a_notice() -> None:
    model = _Model(ScriptedTokenizer())
    nan = float("nan")
    advised = (("temperature", nan), ("top_k", -1.0), ("top_p", 0.5), ("min_p", 7.0))
    model.info = replace(model.info, sampling=advised)
    said: list[str] = []
    input_processor = InputProcessor(model, 400, {}, said.append)
    request_state, _ = input_processor.accept(1, GenerateRequest(TokenIds((1, 2))))
    drawn = request_state.sampling
    assert (drawn.temperature, drawn.top_k, drawn.top_p, drawn.min_p) == (0.7, 0, 0.5, 0.05)
    told = {"temperature": 0.7, "top_k": 0, "top_p": 0.5, "min_p": 0.05}
    assert input_processor.sampling == told
    assert ["temperature nan" in said[0], "min_p 7" in said[1], len(said)] == [True, True, 2]
    asked, _ = input_processor.accept(
        2, GenerateRequest(TokenIds((1, 2)), Sampling(temperature=0.0))
    )
    assert asked.sampling.temperature == 0.0


@pytest.mark.parametrize("beyond", [-1, 0, 1 << 20])
def test_ids_that_are_no_tokens_of_the_model_are_refused_by_id_and_field(beyond: int) -> None:
    vocabulary = ScriptedTokenizer()
    size = vocabulary.vocab_size
    input_processor = InputProcessor(_Model(vocabulary), 400, {}, print)
    bad = beyond if beyond < 0 else size + beyond
    biased = GenerateRequest(TokenIds((1, 2)), Sampling(logit_bias={size - 1: 1.0, bad: 1.0}))
    with pytest.raises(UsageError, match=f"id {bad} of logit_bias .* of {size} ") as refusal:
        input_processor.accept(1, biased)
    assert refusal.value.details["field"] == "logit_bias"
    with pytest.raises(UsageError, match=f"id {bad} of prompt ") as refusal:
        input_processor.accept(2, GenerateRequest(TokenIds((size - 1, bad))))
    assert refusal.value.details["field"] == "prompt"
    kept = GenerateRequest(TokenIds((1, 2)), Sampling(logit_bias={size - 1: 1.0, 0: 2.0}))
    assert input_processor.accept(3, kept)[0].sampling.logit_bias == ((0, 2.0), (size - 1, 1.0))


@pytest.mark.parametrize(
    ("asked", "field", "both"),
    [
        (
            GenerateRequest(TokenIds((1,)), stop=("x" * 16_000, "y" * 400)),
            "stop",
            "16,384 .* 16,400",
        ),
        (
            GenerateRequest(TokenIds((1,)), Sampling(logit_bias=dict.fromkeys(range(1025), 1.0))),
            "logit_bias",
            "1,024 .* 1,025",
        ),
    ],
)
def test_a_request_with_more_than_a_step_carries_is_refused_with_both_numbers(
    asked: GenerateRequest, field: str, both: str
) -> None:
    input_processor = InputProcessor(_Model(ScriptedTokenizer()), 400, {}, print)
    with pytest.raises(UsageError, match=both) as refusal:
        input_processor.accept(1, asked)
    assert refusal.value.details["field"] == field


def test_a_bias_of_a_text_holds_for_all_its_tokens() -> None:
    input_processor = InputProcessor(_Model(ScriptedTokenizer()), 400, {}, print)
    biased = Sampling(logit_bias={5: 1.0}, text_bias={"ab": -2.0, "</think>": 3.0})
    request_state, _ = input_processor.accept(1, GenerateRequest(TokenIds((1, 2)), biased))
    assert request_state.sampling.logit_bias == ((5, 1.0), (97, -2.0), (98, -2.0), (259, 3.0))


def test_a_warning_about_one_request_is_not_told_to_the_next_client() -> None:
    said: list[str] = []
    model = _Model(ScriptedTokenizer())
    model.info = replace(model.info, chat_template="{{ messages[0].content }}")
    input_processor = InputProcessor(model, 400, {}, said.append)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    asked = Messages((Message("user", "hi"),), tools=(tool,))
    input_processor.accept(1, GenerateRequest(asked))
    assert "does not support tools" in said[0]
    assert input_processor.warning == ""
    plain = InputProcessor(_Model(ScriptedTokenizer()), 400, {}, said.append)
    assert "no chat template" in plain.warning


def _bound(properties: object, tool_choice: str) -> Messages:
    tools = []
    for name, schema in (("look", {}), ("odd", properties)):
        parameters = {"type": "object", "properties": schema}
        tools.append({"type": "function", "function": {"name": name, "parameters": parameters}})
    return Messages(
        (Message("user", "look"),), tools=tuple(tools), tool_choice=tool_choice, bind_arguments=True
    )


def _nested(levels: int) -> dict[str, object]:
    schema: dict[str, object] = {}
    for _ in range(levels):
        schema = {"a": schema}
    return schema


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
@pytest.mark.parametrize(
    "properties",
    [{}, {"a": {"type": "string", "pattern": "(["}}, _nested(70), {"a": {"$ref": "#/none"}}, 5],
    ids=["valid", "pattern", "depth", "reference", "number"],
)
def test_arguments_of_tools_are_bound_whatever_the_schema_of_one(
    properties: object, tool_choice: str
) -> None:
    """A server of others may offer a tool with any schema. The other tools still work."""
    said: list[str] = []
    input_processor = InputProcessor(_Model(ScriptedTokenizer()), 300, {}, said.append)
    state, _ = input_processor.accept(1, GenerateRequest(_bound(properties, tool_choice)))
    assert state.sequences[0].grammar_matcher is not None
    assert [sentence for sentence in said if "not bound" in sentence] == []
