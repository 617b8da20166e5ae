"""The word that ends a running step, as C hears it."""

import ctypes

from localchat_llamacpp.runner import StopFlag

_KIND = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)


def test_the_callback_tells_whether_the_flag_is_set() -> None:
    flag = StopFlag()
    ask, data = flag.callback(_KIND)
    heard = [ask(data)]
    flag.set()
    flag.set()
    heard.append(ask(data))
    flag.clear()
    heard.append(ask(data))
    assert heard == [False, True, False]


def test_two_flags_do_not_hear_each_other() -> None:
    one, other = StopFlag(), StopFlag()
    (ask, data), (ask_other, data_other) = one.callback(_KIND), other.callback(_KIND)
    one.set()
    assert (ask(data), ask_other(data_other)) == (True, False)
