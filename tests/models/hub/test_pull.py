"""Pulling against a hub that misbehaves: a finished file is byte-equal, or there is none."""

import json
import threading
from pathlib import Path
from random import Random

import pytest

from localchat.errors import NetworkError
from localchat.model_files.projector import projector_files
from localchat.models.hub.events import (
    Note,
    Progress,
    ProgressMeter,
    PullEvent,
    PullFinished,
    PullStarted,
)
from localchat.models.hub.manifest import MANIFEST, installed
from tests.support.fake_hub import FakeHub, Fault, sha256
from tests.support.pullers import Puller

NAME = "maker/Small-GGUF"
FILE = "small-q4_k_m.gguf"
WORD = f"hf.co/{NAME}:Q4_K_M"
BODY = b"GGUF" + Random(1).randbytes(3_000)


@pytest.fixture(autouse=True)
def _repository(hub: FakeHub) -> None:
    hub.add(NAME, {FILE: BODY, "small-q8_0.gguf": b"GGUF8", "README.md": b"words"})


def file_of(pull: Puller, name: str = FILE) -> Path:
    return pull.models_dir / NAME / name


def left_over(pull: Puller) -> list[str]:
    return sorted(path.name for path in pull.models_dir.rglob("*.part*"))


# ---------------------------------------------------------------------------- the plain way


def test_file_and_manifest_stand_in_the_repositorys_folder(pull: Puller) -> None:
    found = pull(WORD)
    assert found.path == file_of(pull)
    assert found.path.read_bytes() == BODY
    manifest = json.loads((found.folder / MANIFEST).read_text())["models"][0]
    assert manifest["name"] == WORD
    assert manifest["repository"] == NAME
    assert manifest["quantization"] == "Q4_K_M"
    assert manifest["files"] == [{"path": FILE, "size": len(BODY), "sha256": sha256(BODY)}]
    assert [one.manifest.name for one in installed(pull.models_dir)] == [WORD]
    assert left_over(pull) == []


def test_second_pull_sends_no_content(pull: Puller, hub: FakeHub) -> None:
    pull(WORD)
    sent = hub.sent
    pull(WORD)
    assert hub.sent == sent
    assert pull.told(PullFinished)[-1] == PullFinished(WORD, str(file_of(pull)), len(BODY), 0)


def test_two_quantizations_of_a_repository_stand_side_by_side(pull: Puller) -> None:
    pull(WORD)
    pull(f"hf.co/{NAME}:q8_0")
    names = [one.manifest.name for one in installed(pull.models_dir)]
    assert names == [WORD, f"hf.co/{NAME}:Q8_0"]


def test_right_file_that_lies_there_is_adopted_and_a_wrong_one_replaced(
    pull: Puller, hub: FakeHub
) -> None:
    file_of(pull).parent.mkdir(parents=True)
    file_of(pull).write_bytes(BODY)
    pull(WORD)
    assert hub.sent == 0
    (pull.models_dir / NAME / MANIFEST).unlink()
    file_of(pull).write_bytes(bytes(len(BODY)))
    pull(WORD)
    assert file_of(pull).read_bytes() == BODY


def test_new_version_on_the_hub_replaces_the_old(pull: Puller, hub: FakeHub) -> None:
    pull(WORD)
    hub.add(NAME, {FILE: BODY[::-1]})
    pull(WORD)
    assert file_of(pull).read_bytes() == BODY[::-1]


def test_split_model_is_one_total_and_opens_at_its_first_part(pull: Puller, hub: FakeHub) -> None:
    parts = {f"big-q4_0-{n:05}-of-00003.gguf": bytes([n]) * 1_000 * n for n in (1, 2, 3)}
    hub.add(NAME, parts)
    found = pull(f"{NAME}:q4_0")
    assert [path.read_bytes() for path in found.files] == list(parts.values())
    assert found.path.name == "big-q4_0-00001-of-00003.gguf"
    told = pull.told(PullStarted)[0]
    assert isinstance(told, PullStarted) and told.total_bytes == 6_000 and len(told.files) == 3
    last = pull.told(Progress)[-1]
    assert isinstance(last, Progress) and last.done_bytes == last.total_bytes == 6_000


def test_safetensors_come_with_settings_and_tokenizer_and_nothing_else(
    pull: Puller, hub: FakeHub
) -> None:
    wanted = {
        "config.json": b"{}",
        "tokenizer.json": b"[]",
        "model-00001-of-00001.safetensors": b"w" * 50,
        "model.safetensors.index.json": b"{} ",
    }
    extra = {
        "consolidated.safetensors": b"c",
        "run.py": b"import os",
        "onnx/model.safetensors": b"x",
    }
    hub.add("maker/Small-AWQ", wanted | extra)
    found = pull("maker/Small-AWQ")
    assert {path.name: path.read_bytes() for path in found.files} == wanted
    assert found.path == found.folder
    assert found.manifest.quantization == "AWQ"
    assert {path.name for path in found.folder.iterdir()} == {*wanted, MANIFEST}


def test_name_of_the_catalogue_finds_the_file_however_it_is_called(
    pull: Puller, hub: FakeHub, tmp_path: Path
) -> None:
    hub.add(
        "maker/Renamed-GGUF", {"sub/Anything.Q4_K_M.gguf": BODY, "sub/Anything.Q8_0.gguf": b"8"}
    )
    own = tmp_path / "models.toml"
    own.write_text(
        '[models."tiny:1b"]\nparameters = 1_000_000_000\ncontext_tokens = 512\nlicense = "MIT"\n'
        'about = "x"\nuses = ["chat"]\n[[models."tiny:1b".sources]]\nformat = "gguf"\n'
        'repository = "maker/Renamed-GGUF"\nquantizations = ["Q4_K_M"]\n'
    )
    found = pull("tiny:1b", own)
    assert found.manifest.name == "tiny:1b-q4_k_m"
    assert found.path.read_bytes() == BODY


# ---------------------------------------------------------------------------- faults


@pytest.mark.parametrize("cut", [0, 1, 2, 1_499, len(BODY) - 1])
def test_cut_after_any_byte_is_gone_on_from_there(pull: Puller, hub: FakeHub, cut: int) -> None:
    hub.faults.append(Fault(cut_after=cut))
    assert pull(WORD).path.read_bytes() == BODY
    assert hub.sent == len(BODY)
    if cut:
        again = hub.requests("store")[-1].headers
        assert (again["Range"], again["If-Range"]) == (f"bytes={cut}-", f'"{sha256(BODY)}"')


def test_connection_that_is_cut_every_few_bytes_still_arrives(pull: Puller, hub: FakeHub) -> None:
    hub.faults.extend(Fault(cut_after=100) for _ in range(len(BODY) // 100))
    assert pull(WORD).path.read_bytes() == BODY
    assert hub.sent == len(BODY)


@pytest.mark.parametrize("at", ["api", "resolve", "store"])
@pytest.mark.parametrize("status", [429, 503])
def test_server_that_asks_to_wait_is_obeyed(
    pull: Puller, hub: FakeHub, at: str, status: int
) -> None:
    hub.faults.append(Fault(at=at, status=status, headers={"Retry-After": "7"}))
    assert pull(WORD).path.read_bytes() == BODY
    assert pull.waits == [7.0]


def test_waits_double_and_end(pull: Puller, hub: FakeHub) -> None:
    hub.faults.extend(Fault(status=503) for _ in range(20))
    with pytest.raises(NetworkError, match="503"):
        pull(WORD)
    assert pull.waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_wait_of_an_hour_is_not_waited_for(pull: Puller, hub: FakeHub) -> None:
    hub.faults.append(Fault(status=429, headers={"Retry-After": "3600"}))
    with pytest.raises(NetworkError, match="wait 60 minutes"):
        pull(WORD)
    assert pull.waits == []


def test_wrong_bytes_are_fetched_once_more(pull: Puller, hub: FakeHub) -> None:
    hub.faults.append(Fault(flip=1_000))
    assert pull(WORD).path.read_bytes() == BODY
    assert any("wrong hash" in note.text for note in pull.told(Note) if isinstance(note, Note))


def test_wrong_bytes_twice_end_with_both_hashes_and_no_file(pull: Puller, hub: FakeHub) -> None:
    wrong = BODY[:1_000] + bytes([BODY[1_000] ^ 1]) + BODY[1_001:]
    hub.faults.extend([Fault(flip=1_000), Fault(flip=1_000)])
    with pytest.raises(NetworkError) as caught:
        pull(WORD)
    assert sha256(BODY) in caught.value.message
    assert sha256(wrong) in caught.value.message
    assert caught.value.exit_code == 5
    assert not file_of(pull).exists()
    assert installed(pull.models_dir) == []


def test_small_file_without_sha256_is_checked_by_its_git_name(pull: Puller, hub: FakeHub) -> None:
    files = {"config.json": b'{"a": 1}', "model.safetensors": b"w"}
    hub.add("maker/Plain", files)
    hub.faults.extend([Fault(at="resolve"), Fault(at="resolve", flip=3)])
    hub.faults.reverse()
    assert pull("maker/Plain").files[0].read_bytes() == files["config.json"]
    assert any("wrong hash" in note.text for note in pull.told(Note) if isinstance(note, Note))


def test_slow_drip_arrives(pull: Puller, hub: FakeHub) -> None:
    hub.faults.append(Fault(pause_s=0.002, pause_every=100))
    assert pull(WORD).path.read_bytes() == BODY


def test_server_that_falls_silent_is_asked_again(pull: Puller, hub: FakeHub) -> None:
    pull.silence_s = 0.5
    over = threading.Event()
    silent = Fault(pause_s=3600.0, pause_every=500, until=over)
    hub.faults.extend(
        [silent, silent]
    )  # twice: a busy machine may not see what comes before the first
    assert pull(WORD).path.read_bytes() == BODY
    over.set()
    asked = [one.headers.get("Range") for one in hub.requests("store")]
    assert "bytes=500-" in asked or "bytes=1000-" in asked


def test_file_that_changes_between_tries_is_never_mixed(pull: Puller, hub: FakeHub) -> None:
    hub.faults.append(Fault(cut_after=1_000, body=bytes(len(BODY)), etag='"old"'))
    assert pull(WORD).path.read_bytes() == BODY


def test_server_that_ignores_if_range_is_noticed(pull: Puller, hub: FakeHub) -> None:
    hub.faults.append(Fault(cut_after=1_000, etag='"same"', body=bytes(len(BODY))))
    hub.faults.append(Fault(etag='"same"', headers={"ETag": '"new"'}))
    assert pull(WORD).path.read_bytes() == BODY


def test_server_without_ranges_is_started_again_a_few_times_only(
    pull: Puller, hub: FakeHub
) -> None:
    hub.faults.extend([Fault(cut_after=1_000), Fault(no_range=True)])
    assert pull(WORD).path.read_bytes() == BODY
    file_of(pull).unlink()
    (pull.models_dir / NAME / MANIFEST).unlink()
    hub.faults.extend(Fault(cut_after=2_000, no_range=True) for _ in range(30))
    with pytest.raises(NetworkError, match="start over"):
        pull(WORD)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(content_range="bytes 5-9/10"),
        Fault(content_range=f"bytes 1000-{len(BODY) - 1}/{10**18}"),
        Fault(content_range="nonsense"),
        Fault(status=416),
    ],
)
def test_answer_with_another_range_is_not_written(pull: Puller, hub: FakeHub, fault: Fault) -> None:
    hub.faults.extend([Fault(cut_after=1_000), fault])
    assert pull(WORD).path.read_bytes() == BODY


def test_absurd_length_of_an_answer_is_refused(pull: Puller, hub: FakeHub) -> None:
    hub.faults.extend(Fault(body=BODY + bytes(9)) for _ in range(20))
    with pytest.raises(NetworkError, match=f"{len(BODY) + 9} bytes on the server"):
        pull(WORD)
    assert not file_of(pull).exists()


def test_bar_never_goes_back(pull: Puller, hub: FakeHub) -> None:
    hub.faults.extend([Fault(cut_after=2_000), Fault(no_range=True, cut_after=100), Fault(flip=50)])
    pull(WORD)
    done = [event.done_bytes for event in pull.told(Progress) if isinstance(event, Progress)]
    assert done == sorted(done)
    assert done[-1] == len(BODY)


def test_bytes_that_are_thrown_away_stop_the_bar_and_never_move_it_back() -> None:
    told: list[PullEvent] = []
    now = iter(range(100))
    meter = ProgressMeter(1_000, 100, told.append, clock=lambda: float(next(now)))
    meter.add("f", 500)
    meter.discard(600)
    meter.add("f", 200)
    meter.add("f", 800)
    shown = [event.done_bytes for event in told if isinstance(event, Progress)]
    assert shown == [600, 600, 1_000]
    assert meter.fetched_bytes == 1_500


def test_interrupted_pull_goes_on_and_says_what_is_here(pull: Puller, hub: FakeHub) -> None:
    hub.faults.extend([Fault(cut_after=2_000), *(Fault(status=500) for _ in range(20))])
    with pytest.raises(NetworkError):
        pull(WORD)
    hub.faults.clear()
    assert left_over(pull) == [f"{FILE}.part", f"{FILE}.part.json"]
    sent = hub.sent
    pull(WORD)
    assert hub.sent == sent + len(BODY) - 2_000
    told = pull.told(PullStarted)[-1]
    assert isinstance(told, PullStarted) and told.done_bytes == 2_000
    assert left_over(pull) == []


def test_part_of_another_version_is_not_used(pull: Puller, hub: FakeHub) -> None:
    hub.faults.extend([Fault(cut_after=2_000), *(Fault(status=500) for _ in range(20))])
    with pytest.raises(NetworkError):
        pull(WORD)
    hub.faults.clear()
    hub.add(NAME, {FILE: BODY[::-1]})
    assert pull(WORD).path.read_bytes() == BODY[::-1]
    told = pull.told(PullStarted)[-1]
    assert isinstance(told, PullStarted) and told.done_bytes == 0


def test_damaged_part_is_found_out_by_the_hash(pull: Puller, hub: FakeHub) -> None:
    hub.faults.extend([Fault(cut_after=2_000), *(Fault(status=500) for _ in range(20))])
    with pytest.raises(NetworkError):
        pull(WORD)
    hub.faults.clear()
    file_of(pull, f"{FILE}.part").write_bytes(bytes(2_000))
    assert pull(WORD).path.read_bytes() == BODY


def test_two_pulls_at_once_fetch_the_model_once(pull: Puller, hub: FakeHub) -> None:
    hub.faults.append(Fault(pause_s=0.02, pause_every=300))
    other = Puller(hub, pull.models_dir, pull.waits)
    threads = [threading.Thread(target=one, args=(WORD,)) for one in (pull, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file_of(pull).read_bytes() == BODY
    assert hub.sent == len(BODY)


def test_encoder_of_a_model_that_sees_is_pulled_with_it(pull: Puller, hub: FakeHub) -> None:
    encoder = b"GGUF" + Random(2).randbytes(500)
    hub.add(
        "maker/Vision-GGUF",
        {
            "vision-q4_k_m.gguf": BODY,
            "vision-q8_0.gguf": BODY,
            "mmproj-vision-BF16.gguf": b"GGUFb",
            "mmproj-vision-F16.gguf": encoder,
        },
    )
    found = pull("hf.co/maker/Vision-GGUF:Q4_K_M")
    assert [path.name for path in found.files] == ["vision-q4_k_m.gguf", "mmproj-vision-F16.gguf"]
    assert found.path == found.files[0]
    assert found.files[1].read_bytes() == encoder
    assert projector_files(found.path) == [found.files[1]]
