"""Files of a batch line."""

from pathlib import Path

from localchat.batch.input_file import BatchInput
from tests.support.media import png


def test_files_become_parts_before_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "chart.png").write_bytes(png())
    lines = (
        '{"prompt": "What?", "files": ["chart.png"]}\n'
        '{"prompt": "What?", "files": ["missing.png"]}\n'
        '{"prompt": "What?", "files": "chart.png"}\n'
    )
    file = tmp_path / "in.jsonl"
    file.write_text(lines)
    batch = BatchInput(file)
    good, missing, wrong = (batch.parse(line) for line in batch.lines())
    image, text = good.body["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert text == {"type": "text", "text": "What?"}
    assert "there is no file" in missing.problem
    assert wrong.problem == '"files" is not a list of paths'
