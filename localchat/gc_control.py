"""Python's garbage collector while the program starts.

Importing makes some hundred thousand objects that stay. The collector walks over them again and again while
they come: 30 to 80 ms of the 370 that the first frame of the screen takes, and a pass of 30 ms now and then
later, in the middle of an answer. So it rests until a command has what it needs, and leaves alone what is
there by then.
"""

import gc


def pause_gc() -> None:
    """No collections until `wake`."""
    gc.disable()


def resume_gc() -> None:
    """Collect from now on, apart from all that is there already. Idempotent; without a `rest` before it does
    nothing."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
