"""Names of pictures and recordings in a text."""

from pathlib import Path

import pytest

from localchat.engine.request import Attachment
from localchat.errors import UsageError
from localchat.session.named_media import with_named_media
from tests.support.media import HOSTILE, png


def test_a_mentioned_picture_is_attached_and_a_mentioned_text_stays(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "b.txt").write_text("words")
    question = with_named_media(f"see @{tmp_path}/a.png and @{tmp_path}/b.txt and @nobody")
    assert question.text == f"see  and @{tmp_path}/b.txt and @nobody"
    assert question.attachments == (Attachment("image", png(), 4, "a.png"),)


@pytest.mark.parametrize("case", ["heic", "avif", "jpeg xl", "icon", "m4a", "aiff", "video"])
def test_a_mentioned_file_in_another_format_is_refused(tmp_path: Path, case: str) -> None:
    data, sentence = HOSTILE[case]
    (tmp_path / "photo").write_bytes(data)
    with pytest.raises(UsageError, match=f"photo {sentence}"):
        with_named_media(f"What is on @{tmp_path}/photo ?")
    # Without the sign, it may be about the file's name.
    text = f"How do I rename {tmp_path}/photo ?"
    assert with_named_media(text).text == text
