"""facts.json is current, consistent, and agrees with the program."""

import ast
import importlib
import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import facts as table
import pytest
from asking import Topics, references
from grammar import parse
from product import refusal
from sums import Sums

from localchat.errors import ExitCode

FACTS = table.build()
PATHS = ("/infill", "/metrics", "/health", "/props", "/tokenize", "/detokenize", "/apply", "/data")
OF_OTHERS = (
    "--extra-index-url",
    "--init",
    "--no-index",
    "--find-links",
    "--tensor-parallel-size",
    "--install",
    "--target",
    "--gpus",
    "--device",
    "--user",
    "--now",
    "--reinstall",
    "--force-reinstall",
    "--no-deps",
    "--from",
    "--version",
    "--max-model-len",
    "--max-num-seqs",
)  # pip, uv, vLLM, xcode-select, docker, podman, systemctl
OF_CLICK = ("there is no flag", "Got unexpected extra argument", "Missing argument")
ROOT = Path(__file__).resolve().parents[2]
TOPICS: list[dict[str, Any]] = FACTS["topics"]


def answers() -> list[tuple[str, str]]:
    found = [(t["id"], t["answer"]) for t in TOPICS]
    found += [(t["id"], a) for t in TOPICS for _, a in t.get("follow", ()) if not a.startswith("@")]
    found += [(t["id"], f"`{t['example']}`") for t in TOPICS if "example" in t]
    found += [(g, a) for g, ps in FACTS["leaning"]["groups"].items() for _, a in ps if a[0] != "@"]
    found += [("any", a) for _, a in FACTS["leaning"]["any"] if a[0] not in "@="]
    found += [(n, t["answer"] if isinstance(t, dict) else t) for n, t in FACTS["foreign"].items()]
    found += [("pastes", FACTS["pastes"]["answer"])]
    found += [(name, r["answer"]) for name, r in FACTS["refusals"].items()]
    return [*found, *(("memory", a) for kind in ("memory", "coding") for a in FACTS[kind].values())]


def test_the_committed_table_is_the_one_that_the_sources_make() -> None:
    committed = json.loads((ROOT / "scripts/tools/guide/facts.json").read_text("utf-8"))
    assert committed == json.loads(json.dumps(FACTS)), "run python scripts/tools/guide/facts.py"


def test_every_topic_has_an_answer_a_source_and_ways_to_ask() -> None:
    assert len({t["id"] for t in TOPICS}) == len(TOPICS)
    for topic in TOPICS:
        assert topic["answer"], topic["id"]
        assert topic["source"], topic["id"]
        assert any(topic.get(k) for k in ("do", "ask", "what")), topic["id"]


def test_messages_quoted_from_localchat_are_in_its_source() -> None:
    files = [*ROOT.glob("localchat/**/*.py"), *ROOT.glob("backends/**/*.py")]
    texts = {
        node.value.strip()
        for file in files
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    texts = {text for text in texts if len(text) >= 12}
    lines = [line for topic in TOPICS for line in topic.get("says", [])]
    quoted = [one for one in lines if one.startswith("localchat: ") or '"message"' in one]
    for line in quoted:
        if not any(text in line for text in (*OF_CLICK, "TTFT ")):
            assert any(text in line for text in texts), line
    assert len(quoted) > 30


def test_sources_of_topics_exist() -> None:
    for topic in TOPICS:
        for path in re.findall(r"[\w./-]+/[\w./-]+|[\w-]+[.](?:md|py|toml)", topic["source"]):
            assert (ROOT / path).exists(), (topic["id"], path)


def test_every_pattern_parses_and_names_only_what_exists() -> None:
    topics = Topics(FACTS)
    for where, pattern in topics.every_pattern():
        parse(pattern)
        assert set(references(pattern)) <= set(topics.lexicon), (where, pattern)
    for topic in TOPICS:
        leaning = FACTS["leaning"]["groups"].get(topic["group"], [])
        for _, answer in topic.get("follow", []) + leaning:
            assert not answer.startswith("@") or answer[1:] in topics.by_id, topic["id"]


def test_questions_in_other_languages_lead_to_topics() -> None:
    known = {topic["id"] for topic in TOPICS}
    for name, tongue in FACTS["foreign"].items():
        if not isinstance(tongue, dict):
            continue
        for pattern, topic in tongue["asks"]:
            parse(pattern)
            assert topic in known, (name, topic)
        for pattern in tongue["other"]:
            assert not references(pattern), (name, pattern)


def test_every_command_in_an_answer_has_known_verbs_and_flags() -> None:
    seen = 0
    for where, answer in answers():
        value = "bash" if "completion" in answer else "8080"
        for command in table.commands_in(answer.replace("{v}", value)):
            seen += 1
            assert not refusal(command), (where, command)
    assert seen > 100


def test_no_answer_names_the_distribution_that_belongs_to_a_stranger() -> None:
    for where, answer in answers():
        assert not re.search(r"pip install ['\"]?localchat", answer), where


def test_flags_and_slash_commands_in_answers_are_in_the_table() -> None:
    for where, answer in answers():
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", answer):
            assert flag in FACTS["flags"] or flag in OF_OTHERS, (where, flag)
        for command in re.findall(r"`(/[a-z]+)\b[^`/]*`", answer):
            known = {*FACTS["slash"], *PATHS}
            assert command in known or "server" in where, (where, command)


def test_exit_codes_are_those_of_the_program() -> None:
    assert {int(c): name for c, (name, _) in FACTS["exit_codes"].items()} == {
        e.value: e.name for e in ExitCode
    }


def test_the_arithmetic_is_right() -> None:
    assert FACTS["weights"]["7/4"] == "3.5 GB"
    assert FACTS["weights"]["70/16"] == "140 GB"
    llama = FACTS["kv"]["Llama 3.1 8B"]
    assert llama["per_token"] == "131,072 bytes (128 KiB)"
    assert llama["totals"]["f16"]["8192"] == "1.07 GB"
    assert FACTS["speeds"]["4.7/100"] == "21"
    assert FACTS["downloads"]["4.7/100"].startswith("6.3 minutes")


def test_verbs_and_flags_are_those_of_the_command_line() -> None:
    from localchat.verbs import ALIASES, VERBS

    missing = set(FACTS["verbs"]) - {*VERBS, *ALIASES}
    if missing & {"serve", "history"}:
        pytest.skip(f"planned: {', '.join(sorted(missing))}")
    assert not missing, "facts name verbs that the program lacks"


def test_flags_are_those_of_the_command_line() -> None:
    import click

    from localchat.cli.main import root
    from localchat.verbs import VERBS

    def flags(command: click.Command) -> set[str]:
        own = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        if not isinstance(command, click.Group):
            return own
        context = click.Context(command)
        names = command.list_commands(context)
        inner = [command.get_command(context, name) for name in names]
        return own.union(*(flags(one) for one in inner if one is not None))

    with click.Context(root) as context:
        verbs = [root.get_command(context, name) for name in VERBS]
    known = flags(root).union({"--help", "-m", "--model"}, *(flags(verb) for verb in verbs if verb))
    assert not set(FACTS["flags"]) - known


def test_slash_commands_are_those_of_the_screen() -> None:
    from localchat.session.commands import COMMANDS

    assert set(FACTS["slash"]) == {f"/{command.name}" for command in COMMANDS}


def test_keys_in_answers_are_bound_on_the_screen() -> None:
    from localchat.tui.keymap import KEYS, key_names

    bound = {key for one in KEYS for key in key_names(one.id, {}).lower().split(", ")}
    for where, answer in answers():
        if where.startswith(("key.", "slash.", "ui.")):
            for key in re.findall(r"`((?:Ctrl|Alt|Shift)\+\w+|F\d+|Esc|Tab|Enter|Delete)`", answer):
                assert key.lower() in bound, (where, key)


@pytest.mark.skipif(sys.platform != "linux", reason="the answers name the places of Linux")
def test_places_in_answers_are_those_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    from localchat.cli.chat.conversation_options import HISTORY_FILE
    from localchat.config.paths import find_paths

    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    found = find_paths({})
    known = {str(p) for p in (found.settings_file, found.data_dir, found.state_dir)}
    known |= {
        str(found.models_dir),
        str(found.data_dir / HISTORY_FILE),
        str(found.settings_file.parent),
    }
    named = {p for _, a in answers() for p in re.findall(r"`~(/[.][\w/.]+localchat[\w/.]*)`", a)}
    assert len(named) >= 5
    assert not {f"/home/me{p}" for p in named} - known


def test_defaults_in_answers_are_those_of_the_sampler() -> None:
    from localchat.config.settings import DEFAULT_SAMPLING

    sampling = next(t["answer"] for t in TOPICS if t["id"] == "what.sampling")
    for name, value in DEFAULT_SAMPLING.items():
        assert f"{name.replace('_', '-')} {value}" in sampling


def test_models_that_are_asked_for_by_name_are_in_the_catalogue() -> None:
    known = tomllib.loads((ROOT / "models.toml").read_text("utf-8"))["models"]
    named = {said: name for name, said in Sums(FACTS).models}
    assert set(named.values()) <= set(known)
    assert named["llama 3 70b"] == named["llama 70b"] == "llama3.3:70b"
    assert named["qwen 32b"] == "qwen2.5:32b"


def test_models_named_in_answers_are_in_the_catalogue() -> None:
    known = tomllib.loads((ROOT / "models.toml").read_text("utf-8"))["models"]
    families = {name.split(":")[0] for name in known}
    seen = 0
    for where, answer in answers():
        for family, size in re.findall(r"\b([a-z][\w.-]+):(\d[\w.]*b(?:-a\d+b)?)", answer):
            seen += 1
            assert f"{family}:{size}" in known, (where, family, size)
        for family in re.findall(r"localchat pull ([a-z][\w-]*)[` ]", answer):
            assert family in families, (where, family)
    assert seen > 50


def test_metrics_are_those_of_the_program() -> None:
    if importlib.util.find_spec("localchat.metrics") is None:
        pytest.skip("planned: localchat.metrics")
    source = (
        Path(importlib.import_module("localchat.metrics").__file__ or "").read_text("utf-8").lower()
    )
    for word in ("ttft", "tpot", "fingerprint"):
        assert word in source, word
