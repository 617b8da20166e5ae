"""Pauses Python's garbage collector while the program starts.

Importing makes some hundred thousand objects that stay. The collector would traverse them again and again: 30
to 80 ms of the 370 that the first frame of the screen takes, and a pass of 30 ms now and then later, in the
middle of an answer. So it is off until a command has loaded what it needs, and then ignores those objects.
"""

import gc


def pause_gc() -> None:
    """Turn collections off until `resume_gc`."""
    gc.disable()


def resume_gc() -> None:
    """Turn collections on for objects made from now on. Idempotent; without `pause_gc` it does nothing."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
