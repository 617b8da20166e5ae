"""Draws the pictures of a transcript: decodes each on a thread, and keeps its rows."""

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from localchat.engine.request import Attachment
from localchat.errors import UsageError
from localchat.sanitize import sanitize_line
from localchat.tui.pictures.protocol import CellSize, PictureProtocol

if TYPE_CHECKING:
    import PIL.Image

    from localchat.tui.pictures.cells import PictureRow
    from localchat.tui.pictures.rows import PictureSize

MAX_PIXELS: Final = (960, 720)
"""Largest side lengths of a decoded picture in memory. No screen shows more of it."""
_MAX_DECODED: Final = 64


class DecodedMedia(NamedTuple):
    """A picture or a recording, ready to be shown."""

    label: str
    """Size, such as `640x480`, or why it cannot be shown."""
    picture: "PIL.Image.Image | None" = None


class DrawnMedia(NamedTuple):
    """Rows and description of an attachment."""

    caption: str
    rows: "tuple[PictureRow, ...]" = ()


def decode(attachment: Attachment) -> DecodedMedia:
    """Decode an attachment for the screen. Takes up to a second, so call it on a thread."""
    import PIL.Image

    from localchat.media.decode import decode_image, media_info

    try:
        label = media_info(attachment.data, attachment.name).label
        if attachment.kind != "image":
            return DecodedMedia(label)
        image = decode_image(attachment.data, attachment.name)
    except UsageError as problem:
        return DecodedMedia(problem.message)
    picture = PIL.Image.frombytes("RGB", (image.width, image.height), image.rgb)
    picture.thumbnail(MAX_PIXELS)
    return DecodedMedia(label, picture)


def attachment_title(attachment: Attachment) -> str:
    """Return a sign for the kind, and the name: `▣ chart.png`."""
    sign = {"image": "▣", "audio": "♪"}[attachment.kind]
    return f"{sign} {sanitize_line(attachment.name) or attachment.kind}"


class PicturePainter:
    """Draws attachments, and asks for those to decode."""

    def __init__(
        self,
        protocol: PictureProtocol = "off",
        cell: CellSize = CellSize(10, 20),  # noqa: B008 - immutable
        write: Callable[[str], None] = lambda sequence: None,
    ) -> None:
        """`write` sends a sequence to the terminal."""
        self.protocol: PictureProtocol = protocol
        self._cell = cell
        self._write = write
        self._decoded: OrderedDict[bytes, DecodedMedia] = OrderedDict()
        self._numbers: dict[tuple[bytes, PictureSize], int] = {}
        self.wanted: list[Attachment] = []
        """Attachments to decode, in the order in which they were drawn first."""

    def put(self, attachment: Attachment, decoded: DecodedMedia) -> None:
        """Add a decoded attachment."""
        self._decoded[attachment.data] = decoded
        if len(self._decoded) > _MAX_DECODED:
            self._decoded.popitem(last=False)

    def draw(self, attachment: Attachment, max_columns: int) -> DrawnMedia:
        """Return the rows of an attachment, only its caption while it is not decoded."""
        title = attachment_title(attachment)
        decoded = self._decoded.get(attachment.data)
        if decoded is None:
            if attachment not in self.wanted:
                self.wanted.append(attachment)
            return DrawnMedia(title)
        caption = f"{title}  {decoded.label}"
        if decoded.picture is None or self.protocol == "off":
            return DrawnMedia(caption)
        return DrawnMedia(caption, self._rows(attachment.data, decoded.picture, max_columns))

    def _rows(
        self, data: bytes, picture: "PIL.Image.Image", max_columns: int
    ) -> "tuple[PictureRow, ...]":
        from localchat.tui.pictures.rows import (
            block_rows,
            kitty_rows,
            kitty_transmission,
            picture_size,
            sixel_rows,
        )

        size = picture_size(picture.width, picture.height, max_columns, self._cell)
        match self.protocol:
            case "sixel":
                return sixel_rows(picture, size, self._cell)
            case "kitty":
                number = self._numbers.get((data, size))
                if number is None:
                    number = self._numbers[data, size] = random.randrange(1, 1 << 24)
                    self._write(kitty_transmission(picture, number, size, self._cell))
                return kitty_rows(number, size)
        return block_rows(picture, size)

    def close(self) -> None:
        """Free the pictures that the terminal holds."""
        if self._numbers:
            from localchat.tui.pictures.rows import kitty_deletion

            self._write("".join(map(kitty_deletion, self._numbers.values())))
            self._numbers.clear()
