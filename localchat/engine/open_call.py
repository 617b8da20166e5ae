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
        """Set the connection of the request, and close it if the request is already cancelled."""
        with self._lock:
            self._socket = connection
        if self.cancelled.is_set():
            self.cancel()

    def cancel(self) -> None:
        """Close the connection, even while the request waits. Idempotent."""
        self.cancelled.set()
        with self._lock:
            # Closing the socket would not wake a thread that reads from it.
            if self._socket is not None:
                # It may already be closed.
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Forget the connection after the end of the request."""
        with self._lock:
            self._socket = None
