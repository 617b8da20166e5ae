"""What ARCHITECTURE.md says in "Where to add" is all that an addition needs."""

import dataclasses
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import msgspec
import pytest

from localchat import verbs
from localchat.backend_api.step import SamplingParams
from localchat.cli.main import root, run
from localchat.config import parameters
from localchat.config.parameters import SAMPLERS, SamplingNumber
from localchat.config.sampling import SamplingNumbers, SamplingValues
from localchat.config.settings import Settings
from localchat.core import input_processor
from localchat.engine.remote import request_body as remote_body
from localchat.engine.request import GenerateRequest, Sampling, TextPrompt
from localchat.errors import UsageError
from localchat.server.anthropic.protocol import MessagesBody
from localchat.server.chat import options
from localchat.server.chat.options import GenerationFields
from localchat.server.chat.structure import SamplingFields
from localchat.server.config import ServerLimits
from localchat.server.errors import ApiError
from localchat.server.ollama.protocol import OllamaOptions
from localchat.server.openai_responses.protocol import ResponsesBody
from localchat.session.commands import instead
from scripts.tools import cli_reference


@pytest.fixture
def echo_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a verb: its module, and its line in the table."""

    @click.command("echo")
    @click.argument("words", nargs=-1)
    def command(words: tuple[str, ...]) -> None:
        """Print words."""
        click.echo(" ".join(words))

    module = ModuleType("localchat.cli.chat.echo")
    module.__dict__["command"] = command
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(verbs.VERBS, "echo", verbs.Verb("echo", "chat", "Print words."))


@pytest.mark.usefixtures("echo_verb")
def test_a_verb_needs_a_module_and_a_line_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["echo", "a", "b"]) == 0
    assert capsys.readouterr().out == "a b\n"
    assert run(["help", "echo"]) == 0
    assert "Usage: localchat echo" in capsys.readouterr().out
    run(["--help"])
    chat_section = capsys.readouterr().out.partition("\nChat:\n")[2].partition("\n\n")[0]
    assert re.search(r"^  echo +Print words\.$", chat_section, re.MULTILINE)


@pytest.mark.usefixtures("echo_verb")
def test_a_verb_is_completed_documented_and_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    with root.make_context("localchat", [], resilient_parsing=True) as context:
        assert "echo" in [item.value for item in root.shell_complete(context, "ec")]
    assert ("echo",) in cli_reference.commands()
    assert run(["ecoh"]) == 2
    assert "did you mean echo?" in capsys.readouterr().err
    assert instead("echo") == "in the shell there is `localchat echo`"


NUMBERS_OF_A_REQUEST = (
    *(Settings, Sampling, GenerationFields, ResponsesBody, MessagesBody, OllamaOptions),
)


@pytest.mark.parametrize("wire_type", NUMBERS_OF_A_REQUEST)
def test_a_sampling_parameter_reaches_settings_engine_and_protocols_by_inheritance(
    wire_type: type,
) -> None:
    assert issubclass(wire_type, SamplingNumbers)
    own = set(wire_type.__annotations__)
    assert not own & set(SAMPLERS)


def test_a_sampling_parameter_is_a_row_and_a_field_of_both_classes() -> None:
    values = {field.name: field.type for field in dataclasses.fields(SamplingValues)}
    numbers = {field.name: field.type for field in msgspec.structs.fields(SamplingNumbers)}
    assert set(SAMPLERS) == set(values) == set(numbers)
    assert numbers == {name: kind | None for name, kind in values.items()}  # type: ignore[operator]
    assert issubclass(SamplingParams, SamplingValues)
    aliases = {sampler.alias for sampler in SAMPLERS.values() if sampler.alias}
    other_fields = set(SamplingFields.__struct_fields__) - set(SAMPLERS)
    assert aliases == other_fields - {"dry_sequence_breakers"}


@pytest.mark.parametrize("name", ["xtc_threshold", "dynatemp_range", "dry_base"])
def test_a_sampling_parameter_is_named_in_four_modules(name: str) -> None:
    root_dir = Path(parameters.__file__).parents[2]
    modules = [*(root_dir / "localchat").rglob("*.py"), *(root_dir / "backends").rglob("*.py")]
    # The table, the fields, the reference and the kernels.
    assert sum(name in module.read_text() for module in modules) == 4


def test_a_new_sampling_parameter_needs_no_other_module(monkeypatch: pytest.MonkeyPatch) -> None:
    # The fields that both classes would have inherited.
    numbers = msgspec.defstruct(
        "Numbers", [("skew", float | None, None)], bases=(Sampling,), frozen=True
    )
    body = msgspec.defstruct(
        "Body", [("skew", float | None, None)], bases=(GenerationFields,), frozen=True
    )
    row = SamplingNumber((0.0, 1.0), off=0.0)
    for module in (parameters, options, remote_body, input_processor):
        monkeypatch.setattr(module, "SAMPLERS", {**SAMPLERS, "skew": row})
    monkeypatch.setattr(options, "Sampling", numbers)

    fields = msgspec.json.decode(b'{"skew": 0.5, "top_k": 3}', type=body)
    sampling = options._sampling(fields, ServerLimits())  # type: ignore[arg-type]
    assert getattr(sampling, "skew", None) == 0.5
    assert sampling.top_k == 3
    too_large: Any = msgspec.json.decode(b'{"skew": 2.0}', type=body)
    with pytest.raises(ApiError, match=r"'skew' must be from 0 to 1; got 2"):
        options._sampling(too_large, ServerLimits())
    request = GenerateRequest(TextPrompt("a"), sampling)
    assert remote_body.request_body(request, "m")["skew"] == 0.5
    skewed: Any = numbers(skew=7.0)
    with pytest.raises(UsageError, match="skew is 7"):
        input_processor._check(GenerateRequest(TextPrompt("a"), skewed))
