"""Files and batches by OpenAI's own client."""

import errno
import io
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any, Literal

import msgspec
import openai
import pytest
from openai import OpenAI
from openai.types import Batch

from localchat.engine.request import GenerateRequest
from localchat.server import multipart
from localchat.server.config import ServerConfig, ServerLimits
from localchat.server.openai_batches import completion, runner
from localchat.server.openai_batches import runner as batch_runner
from localchat.server.openai_batches.runner import BatchRunner
from localchat.server.openai_batches.store import BatchRecord, BatchStore, FileRecord
from tests.support.http_server import UNHURRIED, Stage, ask, said, serving, settled
from tests.support.scripted_engine import ScriptedAnswer

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
KEYS = ("the-first-key", "the-second-key")


def client_of(stage: Stage, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{stage.base}/v1", api_key=key, max_retries=0)


def lines(words: Sequence[str], url: str = CHAT, **fields: Any) -> bytes:
    made = [
        {
            "custom_id": f"id-{word}",
            "method": "POST",
            "url": url,
            "body": {"model": "m", "messages": [{"role": "user", "content": word}], **fields},
        }
        for word in words
    ]
    return "".join(json.dumps(line) + "\n" for line in made).encode()


def begun(client: OpenAI, content: bytes, **fields: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", **fields
    )


def ended(client: OpenAI, batch: Batch) -> Batch:
    final = ("completed", "failed", "expired", "cancelled")
    assert settled(lambda: client.batches.retrieve(batch.id).status in final)
    return client.batches.retrieve(batch.id)


def answers(client: OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    found = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    named = {line["custom_id"]: line for line in found}
    assert len(named) == len(found), "a line was answered twice"
    return named


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with serving(batches=tmp_path) as made:
        yield made


def test_file_is_kept_listed_and_deleted(stage: Stage) -> None:
    content = bytes(range(256)) * 3000 + b"\r\n--no boundary"
    with client_of(stage) as client:
        file = client.files.create(file=("a b.jsonl", content), purpose="batch")
        assert (file.filename, file.bytes, file.purpose) == ("a b.jsonl", len(content), "batch")
        assert client.files.content(file.id).read() == content
        assert client.files.retrieve(file.id) == file
        other = client.files.create(file=io.BytesIO(b"x\n"), purpose="batch")
        assert {one.id for one in client.files.list(limit=1)} == {file.id, other.id}
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(file.id)
        assert [one.id for one in client.files.list()] == [other.id]


def test_files_are_readable_by_their_owner_only(stage: Stage, tmp_path: Path) -> None:
    with client_of(stage) as client:
        client.files.create(file=("a", b"text"), purpose="batch")
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert kept and all(path.stat().st_mode & 0o077 == 0 for path in kept)


@pytest.mark.parametrize(
    ("name", "content", "purpose"), [("a", b"", "batch"), ("a", b"x", "fine-tune")]
)
def test_file_that_is_no_input_of_a_batch_is_refused(
    stage: Stage, name: str, content: bytes, purpose: Any
) -> None:
    with client_of(stage) as client, pytest.raises(openai.BadRequestError):
        client.files.create(file=(name, content), purpose=purpose)


def test_form_that_is_broken_is_refused(stage: Stage) -> None:
    how = {"content-type": "multipart/form-data; boundary=b"}
    for body in (b"no form", b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\nabc'):
        reply = ask(stage, "/v1/files", body, headers=how)
        assert (reply.status, reply.error["code"]) == (400, "invalid_form")
    assert ask(stage, "/v1/files", {"a": 1}).status == 415


def test_upload_beyond_the_limit_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    limits = replace(UNHURRIED.limits, upload_bytes=1000)
    with (
        serving(replace(UNHURRIED, limits=limits), batches=tmp_path) as stage,
        client_of(stage) as client,
    ):
        with pytest.raises(openai.APIStatusError) as refusal:
            client.files.create(file=("a", b"x" * 1001), purpose="batch")
        assert refusal.value.status_code == 413
        assert not list(tmp_path.rglob("*.data")) and not list(tmp_path.rglob(".upload*"))
        assert client.files.create(file=("a", b"x" * 1000), purpose="batch").bytes == 1000


def test_batch_is_answered(stage: Stage) -> None:
    with client_of(stage) as client:
        batch = begun(client, lines(["a", "b", "c"]) + b"\n", metadata={"why": "test"})
        assert (batch.status, batch.endpoint) == ("validating", CHAT)
        done = ended(client, batch)
        assert (done.status, done.error_file_id, done.metadata) == (
            "completed",
            None,
            {"why": "test"},
        )
        counts = done.request_counts
        assert counts and (counts.total, counts.completed, counts.failed) == (3, 3, 0)
        found = answers(client, done.output_file_id)
        assert set(found) == {"id-a", "id-b", "id-c"}
        body = found["id-a"]["response"]["body"]
        assert body["choices"][0]["message"]["content"] == "Hello."
        assert [one.id for one in client.batches.list()] == [batch.id]
    assert {request.priority for request in stage.engine.requests} == {-1}


def test_refused_line_is_in_the_error_file(stage: Stage) -> None:
    with client_of(stage) as client:
        content = lines(["good"]) + lines(["bad"], temperature=-1)
        done = ended(client, begun(client, content))
        counts = done.request_counts
        assert counts and (counts.total, counts.completed, counts.failed) == (2, 1, 1)
        assert set(answers(client, done.output_file_id)) == {"id-good"}
        (line,) = answers(client, done.error_file_id).values()
        assert line["response"]["status_code"] == 400
        assert line["response"]["body"]["error"]["param"] == "temperature"


def test_input_that_is_not_valid_fails_with_its_lines(stage: Stage) -> None:
    with client_of(stage) as client:
        content = lines(["a"]) + b"{no json\n" + lines(["b"], url="/v1/completions")
        failed = ended(client, begun(client, content))
        assert failed.status == "failed" and failed.errors and failed.errors.data
        assert [(one.code, one.line) for one in failed.errors.data] == [
            ("invalid_json_line", 2),
            ("mismatched_url", 3),
        ]
        twice = ended(client, begun(client, lines(["a", "a"])))
        assert twice.errors and twice.errors.data
        message = twice.errors.data[0].message or ""
        assert "same custom_id" in message and "/" not in message
    assert not stage.engine.requests


def test_cancelled_batch_keeps_what_was_answered(stage: Stage) -> None:
    stage.scripts["slow"] = ScriptedAnswer(("word ",) * 100_000, gap_s=0.01)
    with client_of(stage) as client:
        batch = begun(client, lines(["quick", "slow"]))
        assert settled(lambda: _completed(client, batch) == 1)
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        done = ended(client, batch)
        assert done.status == "cancelled"
        assert set(answers(client, done.output_file_id)) == {"id-quick"}
        assert settled(lambda: stage.engine.cancelled == 1)
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(ended(client, begun(client, lines(["a"]))).id)


def _completed(client: OpenAI, batch: Batch) -> int:
    counts = client.batches.retrieve(batch.id).request_counts
    return counts.completed if counts else 0


def test_batch_that_is_late_expires_with_an_error_for_each_line_left(tmp_path: Path) -> None:
    limits = replace(UNHURRIED.limits, batch_s=1)
    with (
        serving(replace(UNHURRIED, limits=limits), batches=tmp_path) as stage,
        client_of(stage) as client,
    ):
        stage.scripts["slow"] = ScriptedAnswer(("word ",) * 100_000, gap_s=0.01)
        done = ended(client, begun(client, lines(["slow"])))
        assert done.status == "expired" and done.output_file_id is None
        (line,) = answers(client, done.error_file_id).values()
        assert (line["custom_id"], line["error"]["code"]) == ("id-slow", "batch_expired")


def test_batch_goes_on_after_a_restart_and_asks_no_answered_line_again(tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(40)]
    with serving(batches=tmp_path) as stage, client_of(stage) as client:
        for word in words[20:]:
            stage.scripts[word] = ScriptedAnswer(("word ",) * 100_000, gap_s=0.01)
        batch = begun(client, lines(words))
        assert settled(lambda: _completed(client, batch) == 20)
    with serving(batches=tmp_path) as stage, client_of(stage) as client:
        done = ended(client, batch)
        assert done.status == "completed"
        assert set(answers(client, done.output_file_id)) == {f"id-{word}" for word in words}
        assert {said(request) for request in stage.engine.requests} == set(words[20:])


def test_server_that_stops_while_the_last_answer_comes_ends(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stopped_as_it_ends(runner: BatchRunner, record: BatchRecord) -> None:
        for worker in stage.server.workers:
            worker.cancel()

    monkeypatch.setattr(BatchRunner, "_answer_lines", stopped_as_it_ends)
    with client_of(stage) as client:
        begun(client, lines(["a"]))
    assert settled(lambda: all(worker.done() for worker in stage.server.workers), 5.0)


def test_server_that_stops_keeps_the_folder_until_the_end_of_a_batch_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow(store: BatchStore, record: BatchRecord) -> None:
        began.set()
        assert go_on.wait(90)
        completion.end(store, record)

    monkeypatch.setattr(runner, "end", slow)
    with serving(batches=tmp_path) as stage, client_of(stage) as client:
        batch = begun(client, lines(["a"]))
        assert began.wait(90)
        stage.server.stop()
        (worker,) = stage.server.workers
        assert not settled(worker.done, 0.3)
        go_on.set()
    with serving(batches=tmp_path) as stage, client_of(stage) as client:
        assert client.batches.retrieve(batch.id).status == "completed"


def test_count_that_is_written_late_does_not_replace_the_end_of_a_batch(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, began, go_on = BatchStore.save, threading.Event(), threading.Event()

    def late(store: BatchStore, record: BatchRecord) -> None:
        if record.batch.request_counts.completed and not began.is_set():
            record = msgspec.json.decode(msgspec.json.encode(record), type=BatchRecord)
            began.set()
            assert go_on.wait(90)
        save(store, record)

    monkeypatch.setattr(BatchStore, "save", late)
    monkeypatch.setattr(runner, "_SAVE_S", 0.0)
    stage.scripts["slow"] = ScriptedAnswer(("word ",) * 100_000, gap_s=0.01)
    with client_of(stage) as client:
        batch = begun(client, lines(["a", "slow"]))
        assert began.wait(90)
        client.batches.cancel(batch.id)
        assert not settled(lambda: client.batches.retrieve(batch.id).status == "cancelled", 0.3)
        go_on.set()
        assert ended(client, batch).status == "cancelled"
    kept = BatchStore(tmp_path).batch(batch.id)
    assert kept is not None and kept.batch.status == "cancelled"


def test_batch_that_is_created_as_the_runner_looks_in_vain_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, stages, made = BatchRunner._next, SimpleQueue[Stage](), list[Batch]()

    def created_after(runner: BatchRunner) -> BatchRecord | None:
        found = look(runner)
        if not made:
            made.append(begun(client_of(stages.get(timeout=5.0)), lines(["a"])))
        return found

    monkeypatch.setattr(BatchRunner, "_next", created_after)
    with serving(batches=tmp_path) as begins, client_of(begins) as client:
        stages.put(begins)
        assert settled(lambda: bool(made), 5.0)
        assert settled(lambda: _completed(client, made[0]) == 1, 5.0)


def test_trouble_that_stays_is_told_once_and_the_runner_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    look, full = BatchRunner._next, OSError("the disk is full")
    troubles = [full, full, KeyError("a fault of the program"), full]
    recovered = Event()

    def troubled(runner: BatchRunner) -> BatchRecord | None:
        if troubles:
            raise troubles.pop(0)
        recovered.set()
        return look(runner)

    monkeypatch.setattr(BatchRunner, "_next", troubled)
    monkeypatch.setattr(batch_runner, "_POLL_S", 0.01)
    with serving(batches=tmp_path) as stage, client_of(stage) as client:
        assert recovered.wait(90)
        assert ended(client, begun(client, lines(["a"]))).status == "completed"
    told = [record.getMessage() for record in caplog.records if "batches" in record.getMessage()]
    assert told == ["batches cannot go on: the disk is full", "batches cannot go on"]


def test_batch_that_is_cancelled_as_the_runner_takes_it_asks_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = BatchRunner._next

    def cancelled_after(runner: BatchRunner) -> BatchRecord | None:
        found = look(runner)
        if found is not None and found.batch.status == "validating":
            client_of(stage).batches.cancel(found.batch.id)
        return found

    monkeypatch.setattr(BatchRunner, "_next", cancelled_after)
    with client_of(stage) as client:
        assert ended(client, begun(client, lines(["a"]))).status == "cancelled"
    assert not stage.engine.requests


def test_key_sees_its_own_files_and_batches_only(tmp_path: Path) -> None:
    config = replace(UNHURRIED, api_keys=KEYS)
    with (
        serving(config, batches=tmp_path) as stage,
        client_of(stage, KEYS[0]) as mine,
        client_of(stage, KEYS[1]) as other,
    ):
        done = ended(mine, begun(mine, lines(["a"])))
        assert not list(other.files.list()) and not list(other.batches.list())
        for request in (
            lambda: other.files.content(done.output_file_id or ""),
            lambda: other.files.delete(done.input_file_id),
            lambda: other.batches.retrieve(done.id),
            lambda: other.batches.cancel(done.id),
            lambda: begun_of(other, done.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                request()
        assert len(list(mine.files.list())) == 2
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*.json"))
    assert KEYS[0].encode() not in kept
    with serving(replace(config, api_keys=KEYS[:1]), batches=tmp_path) as stage:
        assert client_of(stage, KEYS[0]).batches.retrieve(done.id).status == "completed"


def begun_of(client: OpenAI, file_id: str) -> Batch:
    return client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")


def test_while_a_client_waits_a_batch_takes_few_places(tmp_path: Path) -> None:
    limits = replace(UNHURRIED.limits, batch_requests=8)
    held: list[str] = []

    def slow(request: GenerateRequest) -> ScriptedAnswer:
        held.append(said(request))
        return ScriptedAnswer(("word ",) * 100_000, gap_s=0.01)

    with (
        serving(replace(UNHURRIED, limits=limits), batches=tmp_path) as stage,
        client_of(stage) as client,
    ):
        stage.scripts["person"] = ScriptedAnswer(("word ",) * 100_000, gap_s=0.01)
        for number in range(20):
            stage.scripts[f"w{number}"] = slow
        stream = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "person"}], stream=True
        )
        next(stream)
        batch = begun(client, lines([f"w{number}" for number in range(20)]))
        assert settled(lambda: len(held) == 2)
        assert not settled(lambda: len(held) > 2, 0.3)
        stream.close()
        assert settled(lambda: len(held) == 8)
        client.batches.cancel(batch.id)


def test_input_of_a_batch_that_runs_is_not_removed(stage: Stage) -> None:
    stage.scripts["slow"] = ScriptedAnswer(("word ",) * 100_000, gap_s=0.01)
    with client_of(stage) as client:
        batch = begun(client, lines(["slow"]))
        with pytest.raises(openai.ConflictError):
            client.files.delete(batch.input_file_id)
        client.batches.cancel(batch.id)
        ended(client, batch)
        assert client.files.delete(batch.input_file_id).deleted


def test_lists_have_pages(stage: Stage) -> None:
    with client_of(stage) as client:
        made = {begun(client, lines(["a"])).id for _ in range(3)}
        page = client.batches.list(limit=2)
        assert page.has_more and len(page.data) == 2
        assert {one.id for one in page} == made
    assert ask(stage, "/v1/batches?limit=0").status == 400
    assert ask(stage, "/v1/batches?after=batch_none").status == 400


def test_paths_and_requests_that_do_not_exist_are_refused(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir(exist_ok=True)
    for path in ("/v1/files/file-none", "/v1/files/..%2f.lock/content", "/v1/batches/batch_x"):
        assert ask(stage, path).status == 404
    body = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h"}
    assert ask(stage, "/v1/batches", body).status == 404
    assert ask(stage, "/v1/batches", {**body, "endpoint": "/v1/files"}).status == 400
    assert ask(stage, "/v1/batches", {**body, "completion_window": "1h"}).status == 400


def test_server_without_a_folder_has_no_batches() -> None:
    with serving(ServerConfig(limits=ServerLimits())) as stage:
        assert ask(stage, "/v1/batches").status == 404


def test_uploads_that_come_together_do_not_exceed_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, looked = vars(BatchStore)["used_bytes"].fget, list[int]()

    def looks_with_the_other(store: BatchStore) -> int:
        found: int = used(store)
        looked.append(found)
        settled(lambda: len(looked) == 2, 0.3)
        return found

    monkeypatch.setattr(BatchStore, "used_bytes", property(looks_with_the_other))
    limits = replace(UNHURRIED.limits, stored_bytes=15)
    with (
        serving(replace(UNHURRIED, limits=limits), batches=tmp_path) as stage,
        client_of(stage) as client,
        ThreadPoolExecutor(2) as threads,
    ):
        for _ in range(2):
            threads.submit(client.files.create, file=("a", b"0123456789"), purpose="batch")
        threads.shutdown()
        assert len(list(client.files.list())) == 1


def test_batch_is_created_before_its_file_is_deleted_or_not_at_all(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, made = BatchStore.batches, list[Future[Batch]]()

    def created_meanwhile(store: BatchStore, owner: str | None = None) -> list[BatchRecord]:
        found = look(store, owner)
        if not made:
            made.append(threads.submit(begun_of, client, file.id))
            settled(made[0].done, 0.3)
        return found

    with client_of(stage) as client, ThreadPoolExecutor(1) as threads:
        file = client.files.create(file=("in.jsonl", lines(["a"])), purpose="batch")
        monkeypatch.setattr(BatchStore, "batches", created_meanwhile)
        client.files.delete(file.id)
        with pytest.raises(openai.NotFoundError):
            made[0].result()


def test_upload_that_cannot_be_kept_leaves_no_file(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: object, target: object, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(multipart, "_copy", full)
    with client_of(stage) as client, pytest.raises(openai.InternalServerError):
        client.files.create(file=("a.jsonl", b"x"), purpose="batch")
    assert not list(tmp_path.glob(".upload.*"))


def test_batch_whose_answers_cannot_be_kept_leaves_no_half_file(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: BatchStore, record: FileRecord, content: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with client_of(stage) as client:
        file = client.files.create(file=("in.jsonl", lines(["a"])), purpose="batch")
        monkeypatch.setattr(BatchStore, "add_file", full)
        client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert settled(lambda: "No space left" in caplog.text)
    assert not list(tmp_path.glob(".answers.*"))
