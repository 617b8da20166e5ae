"""What ARCHITECTURE.md says in "Where to add" is all that an addition needs."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import click
import pytest

from localchat import verbs
from localchat.cli.main import root, run
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


def test_a_plain_cuda_family_needs_a_module_and_its_name_in_the_list(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Imported here, because torch and transformers take seconds.
    import torch

    from localchat_cuda.architectures import ARCHITECTURES, llama
    from tests.support import tiny_models

    tiny_models.save(tiny_models.reference("llama"), tmp_path)
    tokens = tiny_models.tokens_of(3, 12)
    logits_of_llama = tiny_models.Tiny(tmp_path, torch.float32).prompt(tokens, 12)

    module = ModuleType("localchat_cuda.architectures.plain")
    family = replace(llama.FAMILY, name="plain", classes=("PlainForCausalLM",), gguf=None)
    module.__dict__.update(FAMILY=family, forward=llama.forward)
    monkeypatch.setitem(ARCHITECTURES, "plain", module)
    config = tmp_path / "config.json"
    raw = json.loads(config.read_text()) | {"architectures": ["PlainForCausalLM"]}
    config.write_text(json.dumps(raw))
    plain = tiny_models.Tiny(tmp_path, torch.float32)
    assert plain.config.architecture == "plain"
    assert torch.equal(plain.prompt(tokens, 12), logits_of_llama)
