"""Pulls that are refused: a full disk, paths that lead elsewhere, listings that cannot be true."""

import os
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from localchat.errors import LocalchatError, ModelInvalid, ModelMissing, NetworkError, UsageError
from localchat.models.hub.events import PullFinished
from localchat.models.hub.manifest import MANIFEST, installed
from tests.support.fake_hub import FakeHub, Fault, listing_of
from tests.support.pullers import Puller

NAME = "maker/Small-GGUF"
FILE = "small-q4_k_m.gguf"
WORD = f"hf.co/{NAME}:Q4_K_M"
BODY = b"GGUF" + Random(1).randbytes(3_000)


@pytest.fixture(autouse=True)
def _repository(hub: FakeHub) -> None:
    hub.add(NAME, {FILE: BODY, "small-q8_0.gguf": b"GGUF8"})


def file_of(pull: Puller, name: str = FILE) -> Path:
    return pull.models_dir / NAME / name


# ---------------------------------------------------------------------------- disk


def test_disk_without_room_is_noticed_before_any_byte(
    pull: Puller, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1_000))
    with pytest.raises(
        LocalchatError, match=r"needs 3\.0 kB more on the disk, and 1\.0 kB are free"
    ):
        pull(WORD)
    assert hub.sent == 0


def test_disk_that_fills_up_keeps_what_came(
    pull: Puller, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, room = os.write, [2_000]

    def write(handle: int, data: bytes) -> int:
        if bytes(data[:4]) != b"GGUF" and room[0] == 2_000:
            return real(handle, data)  # not the file
        if not room[0]:
            raise OSError(28, "No space left on device")
        count = real(handle, data[: room[0]])
        room[0] -= count
        return count

    with monkeypatch.context() as full:
        full.setattr("os.write", write)
        with pytest.raises(LocalchatError, match="the disk is full") as caught:
            pull(WORD)
    assert "2.0 kB of it are kept" in caught.value.message
    sent = hub.sent
    assert pull(WORD).path.read_bytes() == BODY
    assert hub.sent == sent + len(BODY) - 2_000


# ---------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "path",
    [
        "../evil-q4_k_m.gguf",
        "/etc/evil-q4_k_m.gguf",
        "a/../../evil-q4_k_m.gguf",
        "..\\evil-q4_k_m.gguf",
        "a//evil-q4_k_m.gguf",
        "C:evil-q4_k_m.gguf",
        "evil\n-q4_k_m.gguf",
        ".hidden/evil-q4_k_m.gguf",
        "x" * 300 + "-q4_k_m.gguf",
        "a/b/c/d/e/f/g/evil-q4_k_m.gguf",
    ],
)
def test_path_that_leads_elsewhere_is_refused(pull: Puller, hub: FakeHub, path: str) -> None:
    hub.add(NAME, {path: BODY})
    with pytest.raises(ModelInvalid, match="refused"):
        pull(WORD)
    assert hub.sent == 0
    assert not list(pull.models_dir.parent.rglob("*evil*"))


def test_link_out_of_the_models_folder_is_refused(
    pull: Puller, hub: FakeHub, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (pull.models_dir / "maker").mkdir(parents=True)
    (pull.models_dir / NAME).symlink_to(outside)
    with pytest.raises(ModelInvalid, match="link out of the models folder"):
        pull(WORD)
    assert list(outside.iterdir()) == []


def test_part_that_is_a_link_is_not_written_through(
    pull: Puller, hub: FakeHub, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    file_of(pull).parent.mkdir(parents=True)
    file_of(pull, f"{FILE}.part").symlink_to(victim)
    with pytest.raises(LocalchatError):
        pull(WORD)
    assert victim.read_bytes() == b"mine"


@pytest.mark.parametrize("size", [-1, 1 << 60, None, "12", 1.5])
def test_absurd_size_in_a_listing_is_refused(pull: Puller, hub: FakeHub, size: object) -> None:
    repository = hub.repositories[NAME]
    repository.listing = listing_of(NAME, repository)
    repository.listing["siblings"][0]["size"] = size
    with pytest.raises(NetworkError, match="not with a listing"):
        pull(WORD)


def test_missing_part_of_a_split_model_is_said(pull: Puller, hub: FakeHub) -> None:
    hub.add(NAME, {"a-q4_k_m-00001-of-00003.gguf": b"1", "a-q4_k_m-00003-of-00003.gguf": b"3"})
    with pytest.raises(ModelInvalid, match="part 2 is missing"):
        pull(WORD)


def test_missing_part_spoils_no_other_quantization(pull: Puller, hub: FakeHub) -> None:
    hub.add(NAME, {"a-q4_k_m-00001-of-00002.gguf": b"1", "a-q8_0.gguf": b"8", "b-q2_k.gguf": b"2"})
    assert pull(f"hf.co/{NAME}:Q8_0").path.read_bytes() == b"8"
    with pytest.raises(ModelInvalid, match="part 2 is missing") as caught:
        pull(WORD)
    assert "(Q8_0, Q2_K)" in caught.value.hint
    hub.add(NAME, {"a-q4_k_m-00001-of-00002.gguf": b"1", "b-q4_k_m.gguf": b"4"})
    assert pull(WORD).path.read_bytes() == b"4"


def test_older_name_of_half_precision_is_understood(pull: Puller, hub: FakeHub) -> None:
    hub.add(NAME, {"a-fp16.gguf": b"16", "a-q8_0.gguf": b"8"})
    assert pull(f"hf.co/{NAME}:F16").path.read_bytes() == b"16"


def test_file_named_in_other_letters_is_the_same_model(pull: Puller, hub: FakeHub) -> None:
    hub.add(NAME, {"x-Q4_0.gguf": b"1", "y-Q4_0.gguf": b"2"})
    names = {
        pull(f"hf.co/{NAME}:{word}").manifest.name for word in ("x-Q4_0", "X-q4_0", "x-q4_0.gguf")
    }
    assert names == {f"hf.co/{NAME}:x-Q4_0"}


def test_unknown_quantization_names_those_that_are_there(pull: Puller) -> None:
    with pytest.raises(ModelMissing) as caught:
        pull(f"hf.co/{NAME}:Q2_K")
    assert "Q4_K_M, Q8_0" in caught.value.hint


def test_ambiguous_quantization_is_a_usage_error(pull: Puller, hub: FakeHub) -> None:
    hub.add(NAME, {"a-q5_k_m.gguf": b"5", "a-q8_0.gguf": b"8"})
    with pytest.raises(UsageError) as caught:
        pull(NAME)
    assert "Q5_K_M, Q8_0" in caught.value.hint


def test_the_catalogue_may_know_what_the_name_of_the_only_file_does_not_tell(
    pull: Puller, hub: FakeHub, tmp_path: Path
) -> None:
    own = tmp_path / "models.toml"
    own.write_text(
        """[models."mine:1b"]
parameters = 1_000_000_000
context_tokens = 4096
license = "MIT"
about = "Mine."
uses = ["chat"]
sources = [{ repository = "REPOSITORY", format = "gguf", quantizations = ["Q6_K"] }]
""".replace("REPOSITORY", NAME)
    )
    hub.add(NAME, {"ggml-model.gguf": b"6"})
    found = pull("mine:1b", own)
    assert (found.manifest.name, found.manifest.quantization) == ("mine:1b-q6_k", "Q6_K")
    hub.add(NAME, {"ggml-model.gguf": b"6", "other.gguf": b"7"})
    with pytest.raises(ModelMissing, match="has no Q6_K"):
        pull("mine:1b", own)


# ---------------------------------------------------------------------------- what is left and what is said


def test_a_failed_pull_leaves_no_empty_part(pull: Puller, hub: FakeHub) -> None:
    hub.faults.append(Fault(at="store", status=404))
    with pytest.raises(NetworkError):
        pull(WORD)
    assert not (pull.models_dir / "maker").exists()


def test_letter_case_makes_no_second_model_of_a_repository(pull: Puller, hub: FakeHub) -> None:
    first = pull(WORD)
    shouted = NAME.upper()
    hub.add(shouted, dict(hub.repositories[NAME].files))
    again = pull(f"hf.co/{shouted}:Q4_K_M")
    assert (again.manifest.name, again.path) == (first.manifest.name, first.path)
    assert len(installed(pull.models_dir)) == 1


def test_a_manifest_that_is_a_link_is_replaced_and_not_written_through(
    pull: Puller, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    file_of(pull).parent.mkdir(parents=True)
    file_of(pull, MANIFEST).symlink_to(victim)
    pull(WORD)
    assert victim.read_text() == "mine"
    assert len(installed(pull.models_dir)) == 1


def test_the_end_of_a_pull_says_what_was_checked(pull: Puller, hub: FakeHub) -> None:
    pull(WORD)
    hub.add("maker/Page-GGUF", {"page-q4_k_m.gguf": b"<html>log in</html>"}, large=frozenset())
    repository = hub.repositories["maker/Page-GGUF"]
    repository.listing = listing_of("maker/Page-GGUF", repository)
    repository.listing["siblings"][0].pop("blobId")
    pull("maker/Page-GGUF")
    right, page = (event for event in pull.events if isinstance(event, PullFinished))
    assert (right.hashed, right.trouble) == (True, "")
    assert (page.hashed, page.trouble) == (False, "page-q4_k_m.gguf is not a GGUF file")
