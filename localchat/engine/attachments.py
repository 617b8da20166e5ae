"""Makes and checks the pictures and recordings of messages."""

from collections.abc import Iterable

from localchat.engine.request import Attachment, Message
from localchat.errors import UsageError
from localchat.media.decode import media_info
from localchat.media.limits import MAX_ATTACHMENTS, MAX_TOTAL_BYTES
from localchat.units import counted, size


def make_attachment(data: bytes, name: str = "", position: int = 0) -> Attachment:
    """Return the attachment of a picture or a recording. Its content decides which, not its name.

    Raises UsageError if the file is neither, is damaged in its header, or exceeds a limit of
    `media/limits.py`.
    """
    return Attachment(media_info(data, name).format.kind, data, position, name)


def check_attachments(messages: Iterable[Message]) -> None:
    """Check the count, the total size and the positions. Raises UsageError."""
    count = total_bytes = 0
    for message in messages:
        for attachment in message.attachments:
            count += 1
            total_bytes += len(attachment.data)
            if not 0 <= attachment.position <= len(message.content):
                raise UsageError(
                    f"{attachment.name or 'an attachment'} has position {attachment.position}"
                    f" in a message of {len(message.content)} characters"
                )
    if count > MAX_ATTACHMENTS:
        raise UsageError(
            f"the conversation has {counted(count, 'picture')} or recordings",
            hint=f"up to {MAX_ATTACHMENTS} can be sent",
        )
    if total_bytes > MAX_TOTAL_BYTES:
        raise UsageError(
            f"the pictures and recordings have {size(total_bytes)} together",
            hint=f"up to {size(MAX_TOTAL_BYTES)} can be sent",
        )
