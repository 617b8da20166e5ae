"""The slash commands of a conversation by lines."""

from pathlib import Path
from typing import Final

from localchat.atomic import write_text
from localchat.chat.compaction import without_summary
from localchat.chat.export import as_json_text, as_markdown
from localchat.chat.overflow import send_everything
from localchat.cli.dialogue import Dialogue
from localchat.engine.stats_line import stats_line
from localchat.errors import LocalchatError

_HELP: Final = """\
/help           this list
/clear          begin a new conversation, keep the instructions
/system TEXT    instructions that come before the conversation; without TEXT, show them
/send           ask the question that could not be sent
/undo           go back before the last question
/regen          answer the last question once more
/compact        have the model sum up the older part, and send the summary in its place
/everything     send all messages again that were left out or summed up
/export FILE    write the conversation to FILE: Markdown, or JSON where it ends in .json
/stats          the figures of the last answer
/quit           leave (also Ctrl+D)
\"\"\"             begins and ends a text of several lines
Ctrl+C          stops the answer and keeps what was said"""


def run_command(dialogue: Dialogue, line: str) -> None:
    """A line that begins with a slash. What goes wrong is said."""
    try:
        _run(dialogue, line)
    except LocalchatError as problem:
        dialogue.terminal.insist(f"localchat: {problem}")


def _run(dialogue: Dialogue, line: str) -> None:
    name, _, rest = line.partition(" ")
    say = dialogue.terminal.insist
    match name:
        case "/help" | "/?":
            say(_HELP)
        case "/clear" | "/new":
            dialogue.clear()
            say("the conversation is empty")
        case "/system" if rest.strip():
            dialogue.conversation.system = rest.strip()
            dialogue.changed()
            say("the instructions are set")
        case "/system":
            say(dialogue.conversation.system or "there are no instructions")
        case "/stats":
            done = dialogue.last.done if dialogue.last else None
            say(stats_line(done) if done else "there are no figures yet")
            say(dialogue.why())
        case "/undo":
            dialogue.undo()
            left = len(dialogue.conversation.path())
            say(f"back before the last question; {left} messages are left")
        case "/send":
            dialogue.send()
        case "/regen":
            dialogue.again()
        case "/compact":
            dialogue.compact()
        case "/everything":
            send_everything(dialogue.conversation)
            dialogue.changed(*without_summary(dialogue.conversation))
            say("all messages are sent again")
        case "/export":
            _export(dialogue, rest.strip())
        case _:
            say(f"there is no command {name}; /help lists them")


def _export(dialogue: Dialogue, name: str) -> None:
    say = dialogue.terminal.insist
    if not name:
        say("/export takes the name of a file")
        return
    path = Path(name).expanduser()
    if path.exists():
        say(f"{path} is there already; nothing was written")
        return
    conversation = dialogue.conversation
    text = as_json_text(conversation) if path.suffix == ".json" else as_markdown(conversation)
    try:
        write_text(path, text)
    except OSError as problem:
        say(f"{path} cannot be written: {problem.strerror}")
        return
    say(f"written: {path}")
