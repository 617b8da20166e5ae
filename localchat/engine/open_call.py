"""The connection of a request to another process, which any thread may close."""

import socket
import threading
from contextlib import suppress


class OpenCall:
    """A request that another thread may cancel. The server sees the connection close immediately."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        """Set by `cancel`."""
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def begin(self, connection: socket.socket) -> None:
        """Use this connection from now on. A cancel may have come before it."""
        with self._lock:
            self._socket = connection
        if self.cancelled.is_set():
            self.cancel()

    def cancel(self) -> None:
        """Close the connection, even while the request waits. Idempotent."""
        self.cancelled.set()
        with self._lock:
            # Closing the socket would not wake a reading thread. It may have been closed just now.
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Forget the connection after the end of the request."""
        with self._lock:
            self._socket = None
