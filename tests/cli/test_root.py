"""Verbs, prompts that look like verbs, help, and how usage errors end."""

from importlib import import_module

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localchat import __version__
from localchat.cli import flag_groups
from localchat.cli.verb_words import similar_verb
from localchat.config.settings import DEFAULT_SAMPLING, Settings
from localchat.session.commands import QUESTIONS
from localchat.verbs import ALIASES, HEADINGS, VERBS
from scripts.tools import cli_reference
from tests.support.cli_program import SCENARIOS, ScriptedApp
from tests.support.cli_questions import asked
from tests.support.terminal_screen import Call

NOTHING = SCENARIOS["hello"]


def test_version_is_the_packages(call: Call) -> None:
    assert call(NOTHING, "--version") == (0, f"localchat {__version__}\n", "")


def test_help_names_every_verb(call: Call) -> None:
    code, out, err = call(NOTHING, "--help")
    assert (code, err) == (0, "")
    assert all(f"\n  {verb} " in out for verb in VERBS)


def test_help_groups_the_verbs_by_task(call: Call) -> None:
    lines = call(NOTHING, "--help").out.splitlines()
    for folder, heading in HEADINGS.items():
        start = lines.index(f"{heading}:") + 1
        section = lines[start : lines.index("", start)]
        names = [verb.name for verb in VERBS.values() if verb.folder == folder]
        assert [line.split()[0] for line in section] == names
    assert not any(line.split()[:1] == [alias] for line in lines for alias in ALIASES)


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_its_verb_without_a_notice(call: Call, alias: str) -> None:
    by_alias = call(NOTHING, alias, "--help")
    assert by_alias == call(NOTHING, *ALIASES[alias], "--help")
    assert by_alias == call(NOTHING, "help", alias)
    assert (by_alias.code, by_alias.err) == (0, "")


def test_short_help_has_the_flags_of_a_day_and_names_the_long_one(call: Call) -> None:
    out = call(NOTHING, "--help").out
    assert len(out.splitlines()) < 80
    assert "--max-tokens" in out and "--experts-on-cpu" not in out
    assert "localchat --help all" in out
    assert call(NOTHING, "help", "all") == call(NOTHING, "--help", "all")


def test_long_help_lists_every_flag_under_a_heading(call: Call) -> None:
    out = call(NOTHING, "--help", "all").out
    command = import_module(VERBS["run"].module).prompt_command
    flags = [param for param in command.params if isinstance(param, click.Option)]
    assert all(flag.opts[-1] in out for flag in flags)
    named = {name for names in flag_groups._GROUPS.values() for name in names}
    assert {flag.name for flag in flags} <= named | {"help"}


@pytest.mark.parametrize("key", [*DEFAULT_SAMPLING, "n", "threads", "cache_disk_gb"])
def test_help_states_the_default_of_a_setting(call: Call, key: str) -> None:
    command = import_module(VERBS["run"].module).prompt_command
    flag = next(param for param in command.params if param.name == key)
    value = DEFAULT_SAMPLING.get(key, getattr(Settings(), key))
    assert f"Default: {value:g}" in flag.help or f"value, or {value:g}" in flag.help


def test_the_command_line_reference_is_what_the_program_prints() -> None:
    assert cli_reference.TARGET.read_text(encoding="utf-8") == cli_reference.reference()


@pytest.mark.parametrize("verb", VERBS)
def test_overview_says_of_a_verb_what_its_own_help_says(verb: str) -> None:
    command = import_module(VERBS[verb].module).command
    assert command.name == verb
    assert command.help.splitlines()[0] == VERBS[verb].about


@pytest.mark.parametrize("word", ["rnu", "doctr", "dcotor", "confgi"])
def test_lone_word_near_a_verb_is_refused_with_the_verb(call: Call, word: str) -> None:
    code, out, err = call(NOTHING, word)
    assert (code, out) == (2, "")
    assert "did you mean" in err
    assert f"localchat -- {word}" in err


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("hi --maxtokens 5", "there is no flag --maxtokens; did you mean --max-tokens?"),
        ("fit tiny --kvtype q8_0", "there is no flag --kvtype; did you mean --kv-type?"),
        ("hi --zzz", "there is no flag --zzz\n"),
        ("serve -m tiny", "no flag -m; name the model without one: localchat serve MODEL\n"),
        ("rm --model tiny", "no flag --model; name the model without one: localchat rm MODEL\n"),
        ("ps -m tiny", "there is no flag -m\n"),
        ("hi --vote 3", "there is no flag --vote\n"),
        ("hi --num-ctx 4096", "there is no flag --num-ctx; did you mean --ctx?"),
        ("serve --context 4096", "there is no flag --context; did you mean --ctx?"),
        ("hi -ngl 99", "there is no flag -ngl; did you mean --gpu-layers?"),
        ("hi -n 20", "there is no flag -n; did you mean --max-tokens?"),
        ("hi --repeat-penalty 1.1", "did you mean -o repetition_penalty?"),
        ("run tiny --format json", "there is no flag --format; did you mean --schema?"),
        ("list --format json", "there is no flag --format\n"),
        ("config rm tiny", "localchat rm: Remove models, aliases and imported links."),
        ("config remove x", "localchat config unset: Remove a setting from the file."),
        ("config gte model", "localchat config get: Print one setting in effect."),
        ("history delete 1", "localchat history rm: Remove conversations."),
    ],
)
def test_an_unknown_flag_or_subcommand_names_the_nearest_one(
    call: Call, line: str, advice: str
) -> None:
    code, _, err = call(NOTHING, *line.split())
    assert code == 2
    assert advice in err and "--backend" not in err


@pytest.mark.parametrize(
    ("line", "verb"),
    [
        ("pul X", "pull"),
        ("hlep", "help"),
        ("verison", "version"),
        ("runn tiny", "run"),
        ("lsit", "list"),
        ("help pul", "help pull"),
        ("shwo me", "show"),
    ],
)
def test_a_slip_of_a_verb_is_refused_with_the_verb(call: Call, line: str, verb: str) -> None:
    app = ScriptedApp(NOTHING)
    code, out, err = call(app, *line.split())
    assert (code, out, app.engines) == (2, "", [])
    assert f"{verb}?" in err
    assert "localchat -- " in err


@pytest.mark.parametrize(
    ("line", "whole"),
    [
        ("history export 12ab out.md", "history export 12ab -o out.md"),
        ("history export --json 12ab out.md", "history export --json 12ab -o out.md"),
        ("batch in.jsonl out.jsonl --quiet", "batch in.jsonl -o out.jsonl --quiet"),
    ],
)
def test_a_file_to_write_without_its_flag_gets_the_whole_command(
    call: Call, line: str, whole: str
) -> None:
    code, out, err = call(NOTHING, *line.split())
    assert (code, out) == (2, "")
    assert f"-o names the file to write: localchat {whole}\n" in err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("list the planets", "localchat list takes no arguments"),
        ("show me how to list models", "localchat show takes only MODEL\n"),
        ("history of Rome", "localchat history has no command of"),
        ("run away with me", "no model 'away'"),
        ("learn to cook rice", "there is no file"),
        ("quality of life tips", "no model 'of'"),
        ("stop that noise please", "localchat stop takes only MODEL\n"),
        ("-m guide show me how to list models", "needs -- before it"),
        ("-m guide list the planets", "put flags after the verb"),
    ],
)
def test_a_sentence_that_begins_with_a_verb_gets_the_whole_command(
    call: Call, line: str, told: str
) -> None:
    outcome = call(NOTHING, *line.split(), named=False)
    assert outcome.code in (2, 3)
    assert told in outcome.err
    flags, words = (
        ("-m guide ", line.removeprefix("-m guide ")) if line.startswith("-m") else ("", line)
    )
    assert f"To ask the model: localchat {flags}-- {words}\n" in outcome.err


@pytest.mark.parametrize(
    "args",
    [
        ("- item: what is GGUF?",),
        ("-5 + 3",),
        ("-5",),
        ("--verbose flag, what does it do?",),
        ("-h is what?",),
        ("-x squared is 4",),
        ("-q", "- a list item"),
        ("- a", "- b", "-q"),
        ("--temp", "0.5", "-1 apples?"),
    ],
)
def test_a_word_that_no_flag_could_be_is_a_prompt(call: Call, args: tuple[str, ...]) -> None:
    app = ScriptedApp(NOTHING)
    outcome = call(app, *args)
    assert outcome.code == 0, outcome.err
    assert asked(app) == " ".join(arg for arg in args if arg not in ("-q", "--temp", "0.5"))


def test_values_of_flags_may_have_spaces_and_dashes(call: Call) -> None:
    app = ScriptedApp(NOTHING)
    flags = ("-s", "- be brief", "-o", "typical_p", "0.9", "--system=- be very brief")
    assert call(app, *flags, "-sYou are brief", "hi").code == 0
    assert asked(app) == "hi"


def test_an_unknown_flag_shows_the_command_with_dashes(call: Call) -> None:
    outcome = call(NOTHING, "--no-stats", "-z", "what", "is", "this")
    assert outcome.code == 2
    assert "localchat --no-stats -- -z what is this" in outcome.err


@pytest.mark.parametrize("line", ["plant trees", "tone", "mode"])
def test_a_flag_of_prompts_makes_a_near_verb_a_prompt(call: Call, line: str) -> None:
    app = ScriptedApp(NOTHING)
    assert call(app, "--max-tokens", "9", *line.split()).code == 0
    assert asked(app) == line


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("search foo", "localchat history search"),
        ("download qwen", "localchat pull NAME"),
        ("export x", "localchat history export ID"),
        ("remove x", "localchat rm NAME"),
        ("logs", "localchat history"),
    ],
)
def test_a_verb_of_another_program_is_refused_with_ours(call: Call, line: str, told: str) -> None:
    code, out, err = call(NOTHING, *line.split())
    assert (code, out) == (2, "")
    assert told in err


def test_help_and_version_are_understood_without_dashes(call: Call) -> None:
    assert call(NOTHING, "help") == call(NOTHING, "--help")
    assert call(NOTHING, "help", "pull") == call(NOTHING, "pull", "--help")
    assert call(NOTHING, "help", "history", "list") == call(NOTHING, "history", "list", "--help")
    assert call(NOTHING, "-V") == call(NOTHING, "--version")
    assert call(NOTHING, "version") == call(NOTHING, "--version")


def test_a_model_that_is_missing_is_said_before_the_lack_of_a_prompt(call: Call) -> None:
    code, _, err = call(NOTHING, "run", "nobody:7b")
    assert code == 3
    assert "no model 'nobody:7b'" in err
    assert "Your models: guide" in err


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("chat qwen", "localchat run MODEL"),
        ("ask", 'localchat "PROMPT"'),
        ("models", "localchat list"),
    ],
)
def test_a_word_of_another_program_names_the_verb(call: Call, words: str, advice: str) -> None:
    code, _, err = call(NOTHING, *words.split())
    assert (code, advice in err) == (2, True)


@pytest.mark.parametrize(
    "text",
    [
        "help me",
        "help me write a mail",
        "help plan my trip",
        "models are big",
        "model stories",
        "ask him what to do",
        "chat with me about cats",
        "version two is better",
        "search for good food",
        "shows how it ends",
    ],
)
def test_words_that_only_begin_like_a_verb_are_a_prompt(call: Call, text: str) -> None:
    app = ScriptedApp(NOTHING)
    assert call(app, *text.split()).code == 0
    assert asked(app) == text


@pytest.mark.parametrize("word", ["help", "models", "chat", "search"])
def test_any_word_after_the_dashes_is_a_prompt(call: Call, word: str) -> None:
    app = ScriptedApp(NOTHING)
    assert call(app, "--", word).code == 0
    assert asked(app) == word


@pytest.mark.parametrize(
    "args", [["hi"], ["hello"], ["why"], ["--", "rnu"], ["--", "run"], ["a run"]]
)
def test_other_words_are_a_prompt(call: Call, args: list[str]) -> None:
    app = ScriptedApp(NOTHING)
    assert call(app, *args).code == 0
    assert asked(app) == args[-1]


def test_words_without_quotes_are_one_prompt(call: Call) -> None:
    app = ScriptedApp(NOTHING)
    assert call(app, "what", "is", "this").code == 0
    assert asked(app) == "what is this"


def test_verb_behind_flags_is_a_usage_error(call: Call) -> None:
    code, out, err = call(NOTHING, "-q", "run", "x.gguf")
    assert (code, out) == (2, "")
    assert "put flags after the verb" in err


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--remote", "box", "serve"], "localchat serve FLAGS"),
        (["--json", "ls"], "localchat ls FLAGS"),
        (["serve", "--remote", "box"], "there is no flag --remote"),
    ],
)
def test_flags_before_a_verb_are_refused_with_the_command_that_was_meant(
    call: Call, args: list[str], told: str
) -> None:
    code, _, err = call(NOTHING, *args)
    assert code == 2
    assert told in err


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--frobnicate", "hi"], "--frobnicate"),
        (["-nope"], "To send it as a prompt: localchat -- -nope"),
        (["run"], "MODEL"),
        (["config", "shwo"], "shwo"),
        (["completion", "tcsh"], "tcsh"),
        (["-m"], "-m"),
        (["import", "x" * 300], "too long for a file"),
        (["learn", "x" * 300], "too long for a file"),
        ([], "nothing to ask"),
    ],
)
def test_wrong_usage_ends_with_2_and_one_clear_message(
    call: Call, args: list[str], told: str
) -> None:
    code, out, err = call(NOTHING, *args)
    assert (code, out) == (2, "")
    assert err.startswith("localchat: ")
    assert told in err
    assert "Traceback" not in err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_of_the_shell(call: Call, shell: str) -> None:
    code, out, err = call(NOTHING, "config", "completion", shell)
    assert (code, err) == (0, "")
    assert "_LOCALCHAT_COMPLETE" in out
    # Start-up files of shells contain the word of earlier versions.
    assert call(NOTHING, "completion", shell) == (code, out, err)


@given(st.text(max_size=12))
def test_a_meant_verb_is_a_verb_and_verbs_mean_themselves(word: str) -> None:
    assert similar_verb(word) in (None, "help", "version", *VERBS)
    assert all(similar_verb(verb) == verb for verb in VERBS)


def test_a_lone_history_or_config_shows_what_there_is(call: Call) -> None:
    assert call(SCENARIOS["hello"], "is it kept?").code == 0
    assert "is it kept?" in call(SCENARIOS["hello"], "history").out
    assert call(SCENARIOS["hello"], "config").out.startswith("model ")


def test_a_missing_choice_is_one_sentence(call: Call) -> None:
    result = call(SCENARIOS["hello"], "completion")
    assert result.code == 2
    assert "needs bash or zsh or fish" in result.err


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("list --nope", "see localchat list --help"),
        ("history list --nope", "see localchat history list --help"),
        ("run tiny --nope", "To send it as a prompt: localchat run tiny -- --nope"),
        ("--nope", "localchat --help lists the flags"),
    ],
)
def test_an_unknown_flag_names_the_help_of_its_verb(call: Call, line: str, hint: str) -> None:
    code, out, err = call((), *line.split())
    assert (code, out) == (2, "")
    assert hint in err


def test_a_verb_with_verbs_takes_the_flags_of_its_first_one(call: Call) -> None:
    call(SCENARIOS["hello"], "is it kept?")
    assert call((), "history", "--json").out == call((), "history", "list", "--json").out
    assert call((), "config", "--origin").out == call((), "config", "show", "--origin").out
    assert "search" in call((), "history", "--help").out
    unknown = call((), "history", "--nope")
    assert unknown.code == 2
    assert "history list --help" in unknown.err


def test_questions_lead_to_commands_that_exist() -> None:
    for question in QUESTIONS:
        assert question.commands
        assert {command.split()[0] for command in question.commands} <= VERBS.keys()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize("words", ["localchat history s"])
def test_every_shell_completes_below_a_verb(
    call: Call, monkeypatch: pytest.MonkeyPatch, shell: str, words: str
) -> None:
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", "s" if shell == "fish" else str(words.count(" ")))
    monkeypatch.setenv("_LOCALCHAT_COMPLETE", f"{shell}_complete")
    assert "search" in call(NOTHING).out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("fit", "localchat fit needs MODEL"),
        ("quantize tiny.gguf", "localchat quantize needs --type"),
        ("launch emacs", "PROGRAM: 'emacs' is not one of 'claude'"),
        ("serve --port x", "--port: 'x' is not a whole number"),
        ("serve --port 99999", "--port: 99999 is not in the range 0 to 65535"),
        ("bench tiny.gguf --prompts no.jsonl", "--prompts: file 'no.jsonl' does not exist"),
        ("bench tiny.gguf --rate", "--rate needs a value"),
    ],
)
def test_a_missing_or_wrong_value_is_said_in_our_words(call: Call, line: str, message: str) -> None:
    outcome = call(NOTHING, *line.split(), named=False)
    assert outcome.code == 2
    assert outcome.err.startswith(f"localchat: {message}")
    assert ("To ask the model" in outcome.err) == line.startswith("launch")


@pytest.mark.parametrize("line", ["quantize nosuch model -t q4_0", "fit --memory 8GB nosuch model"])
def test_a_line_with_a_flag_of_the_verb_is_not_offered_as_a_prompt(call: Call, line: str) -> None:
    outcome = call(NOTHING, *line.split(), named=False)
    assert outcome.code != 0
    assert "To ask the model" not in outcome.err
    without = [word for word in line.split() if not word.startswith("-")]
    assert "To ask the model" in call(NOTHING, "fit", *without[1:], named=False).err
