"""Entry point of the engine process: `python -m localchat.core`.

Starts the render process before the engine's other imports (200 ms), so that no prompt waits for it.
"""

import signal

from localchat import gc_control
from localchat.chat_format.render_process import RenderProcess


def main() -> None:
    """Run the engine process; does not return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The parent starts us with SIGINT blocked, so that none arrives before the line above.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    gc_control.pause_gc()
    render_process = RenderProcess()
    render_process.start()
    from localchat.core import process

    process.main(render_process)


if __name__ == "__main__":
    main()
