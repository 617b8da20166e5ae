"""What a rank does with the messages of rank 0, and when rank 0 ends."""

import threading
from multiprocessing import Pipe

from localchat_cuda.ranks import messages
from localchat_cuda.ranks.worker import Inbox


def test_messages_come_in_order_and_a_wait_can_end_without_one() -> None:
    ours, theirs = Pipe()
    ended = threading.Event()
    inbox = Inbox(theirs, ended.set)
    assert inbox.get(0.0) is None
    ours.send(messages.Loaded(True))
    ours.send(messages.Stop())
    assert inbox.get() == messages.Loaded(host_blocks=True)
    assert inbox.get() == messages.Stop()
    ours.close()
    assert not ended.is_set()
    theirs.close()


def test_the_end_of_rank_0_is_noticed_while_no_message_is_expected() -> None:
    ours, theirs = Pipe()
    ended = threading.Event()
    Inbox(theirs, ended.set)
    ours.close()
    assert ended.wait(60)
    theirs.close()
