"""Asks an engine for JSON of generated schemas and validates the answers."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jsonschema

from localchat.engine.events import Done, Finished, Text
from localchat.engine.interface import Engine
from localchat.engine.request import GenerateRequest, Grammar, Message, Messages, Sampling
from scripts.tools.schemas.generator import Schema, schema

MOST_TOKENS = 400
_PROMPT = "Give me an example, as JSON."


@dataclass(frozen=True, slots=True)
class AssessedAnswer:
    """One answer. `fault`: why it is not JSON of its schema; empty if it is, or if it did not end."""

    number: int
    schema: Schema
    text: str
    finished: bool
    tokens: int
    fault: str


def assess_answers(
    engine: Engine, numbers: Iterable[int], temperature: float = 1.0
) -> Iterator[AssessedAnswer]:
    """Answers to the schemas of these numbers, drawn from the whole vocabulary. Several run at once."""
    asked = [(number, schema(number)) for number in numbers]
    streams = [
        engine.generate(
            GenerateRequest(
                Messages((Message("user", _PROMPT),)),
                sampling=Sampling(temperature=temperature, top_p=1.0, min_p=0.0, seed=number),
                max_tokens=MOST_TOKENS,
                grammar=Grammar("json_schema", json.dumps(wanted)),
            )
        )
        for number, wanted in asked
    ]
    for (number, wanted), stream in zip(asked, streams, strict=True):
        text, finished, tokens = "", False, 0
        for event in stream:
            match event:
                case Text(text=piece):
                    text += piece
                case Finished(reason=reason):
                    finished = reason == "stop"
                case Done(usage=usage):
                    tokens = usage.completion_tokens
        yield AssessedAnswer(number, wanted, text, finished, tokens, _fault(wanted, text, finished))


def _fault(wanted: Schema, text: str, finished: bool) -> str:
    if not finished:
        return ""
    try:
        jsonschema.validate(
            json.loads(text), wanted, jsonschema.Draft202012Validator, format_checker=_CHECKER
        )
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return ""


_CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
