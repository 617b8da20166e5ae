"""A program that streams an answer into the history until it is killed: `python -m
tests.support.autosave_process
FILE`. It says on stdout how much text it has handed over, with a moment of the system's clock."""

import sys
import time
from contextlib import closing
from pathlib import Path

from msgspec.structs import replace

from localchat.chat.conversation import Conversation
from localchat.engine.request import Message
from localchat.history.autosave import Autosave
from localchat.history.store import History


def main(path: Path) -> None:
    conversation = Conversation()
    with History.open(path) as history, closing(Autosave(history, conversation)) as save:
        question = conversation.add(Message("user", "tell me"), parent=None)
        save.changed(question)
        node = conversation.add(Message("assistant"), parent=question.id, state="open")
        count = 0
        while True:
            count += 1
            text = node.message.content + f"word{count} "
            node = replace(node, message=Message("assistant", text))
            conversation.put(node)
            save.changed(node)
            save.draft(f"draft{count}")
            print(conversation.id, time.monotonic(), count, flush=True)
            time.sleep(0.003)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
