"""A byte source in memory."""


class BytesSource:
    """Bytes in memory."""

    def __init__(self, data: bytes, name: str = "bytes") -> None:
        self.name = name
        self.size = len(data)
        self._data = data

    def read(self, offset: int, count: int) -> bytes:
        """See ByteSource."""
        return self._data[offset : offset + count]
