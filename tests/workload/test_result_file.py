"""Files of results: resumed after a kill at any instant, and never of two jobs or processes."""

import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

import jaxinfer.errors
from jaxinfer.errors import JaxinferError
from jaxinfer.workload.batch_input import BadLine
from jaxinfer.workload.batch_output import error_line
from jaxinfer.workload.result_file import ResultFile

JOB = {"input_sha256": "ab" * 32, "model": "tiny", "engine": {"dtype": "float32", "seed": 0}}
ROOT = Path(jaxinfer.errors.__file__).parents[1]


def record(custom_id: str, text: str = "héllo\n") -> dict[str, object]:
    return {"custom_id": custom_id, "text": text}


def as_line(custom_id: str, text: str = "héllo\n") -> bytes:
    return (json.dumps(record(custom_id, text), ensure_ascii=False) + "\n").encode()


def write_results(path: Path, *ids: str) -> None:
    with ResultFile.open(path, JOB, force=False) as file:
        for custom_id in ids:
            file.append(record(custom_id))


def refusal(path: Path, job: dict[str, object] = JOB, force: bool = False) -> str:
    with pytest.raises(JaxinferError) as error:
        ResultFile.open(path, job, force)
    message = str(error.value)
    assert "\n" not in message
    assert path.name in message
    return message


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_new_file_gets_its_lines_and_its_sidecar(out):
    write_results(out, "a", "b")
    assert out.read_bytes() == as_line("a") + as_line("b")
    assert json.loads(Path(f"{out}.job.json").read_text()) == JOB
    assert sorted(p.name for p in out.parent.iterdir()) == ["out.jsonl", "out.jsonl.job.json"]


def test_same_job_resumes(out):
    write_results(out, "a", "b")
    with ResultFile.open(str(out), dict(reversed(JOB.items())), force=False) as file:
        assert file.finished == {"a", "b"}
        file.append(record("c"))
        assert file.finished == {"a", "b", "c"}
    assert out.read_bytes() == as_line("a") + as_line("b") + as_line("c")


def test_a_record_is_in_the_file_when_append_returns(out):
    with ResultFile.open(out, JOB, force=False) as file:
        file.append(record("a"))
        assert out.read_bytes() == as_line("a")


def test_failures_are_counted_in_the_file_and_as_they_come(out):
    with ResultFile.open(out, JOB, force=False) as file:
        counts = []
        for each in (record("a"), error_line(BadLine(7, "bad", "why"), "why"), record("b")):
            file.append(each)
            counts.append(file.num_failed)
        assert counts == [0, 1, 1]
    with ResultFile.open(out, JOB, force=False) as file:
        assert (file.num_failed, file.finished) == (1, {"a", "bad", "b"})
        file.append(error_line(BadLine(8, "worse", "why"), "why"))
        assert file.num_failed == 2


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"model": "big"}, "model was 'tiny', is now 'big':"),
        ({"engine": {"dtype": "float32", "seed": 1}}, "engine.seed was 0, is now 1:"),
        ({"engine": {"dtype": "float32", "seed": 0.0}}, "engine.seed was 0, is now 0.0:"),
        ({"engine": {}}, "engine was not set, is now {} (and 2 more):"),
        ({"extra": None}, "extra was not set, is now None:"),
        ({"input_sha256": "cd" * 32}, "of another job: the input has changed: give another output"),
        ({"input_sha256": "cd", "model": "x"}, "the input has changed (and 1 more): give another"),
    ],
)
def test_other_job_is_refused_and_nothing_is_lost(out, change, difference):
    write_results(out, "a")
    before = out.read_bytes()
    message = refusal(out, JOB | change)
    assert difference in message
    assert "--force" in message
    assert out.read_bytes() == before
    with ResultFile.open(out, JOB, force=False) as file:
        assert file.finished == {"a"}


def test_file_of_no_job_is_refused(out):
    out.write_text("my notes\n")
    assert "has no out.jsonl.job.json beside it" in refusal(out)
    assert out.read_text() == "my notes\n"


@pytest.mark.parametrize("damage", [b"{", b"[1]", b"\xff"])
def test_damaged_sidecar_is_refused(out, damage):
    write_results(out, "a")
    Path(f"{out}.job.json").write_bytes(damage)
    assert "out.jsonl.job.json is damaged" in refusal(out)


def test_force_starts_over(out):
    write_results(out, "a")
    other = JOB | {"model": "big"}
    with ResultFile.open(out, other, force=True) as file:
        assert file.finished == set()
        file.append(record("b"))
    assert out.read_bytes() == as_line("b")
    with ResultFile.open(out, other, force=False) as file:
        assert file.finished == {"b"}


def test_empty_output_belongs_to_nobody(out):
    out.touch()
    write_results(out)
    other = JOB | {"model": "big"}
    with ResultFile.open(out, other, force=False) as file:
        assert file.finished == set()
    assert json.loads(Path(f"{out}.job.json").read_text()) == other


def test_deleted_output_starts_over(out):
    write_results(out, "a")
    out.unlink()
    with ResultFile.open(out, JOB | {"model": "big"}, force=False) as file:
        assert file.finished == set()


def test_same_id_twice_and_append_after_close_are_programming_errors(out):
    with ResultFile.open(out, JOB, force=False) as file:
        file.append(record("a"))
        with pytest.raises(ValueError, match="'a'"):
            file.append(record("a"))
        file.close()
        with pytest.raises(ValueError, match="is closed"):
            file.append(record("b"))


def test_half_a_surrogate_pair_in_a_text_survives(out):
    with ResultFile.open(out, JOB, force=False) as file:
        file.append(record("a", "\ud800"))
    assert json.loads(out.read_bytes())["text"] == "\ud800"
    with ResultFile.open(out, JOB, force=False) as file:
        assert file.finished == {"a"}


@given(
    texts=st.lists(st.text(max_size=12), min_size=1, max_size=5),
    data=st.data(),
)
@examples(80)
def test_file_cut_at_any_byte_resumes_to_the_uninterrupted_one(texts, data):
    records = [record(f"id-{i}", text) for i, text in enumerate(texts)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        with ResultFile.open(out, JOB, force=False) as file:
            for r in records:
                file.append(r)
        whole = out.read_bytes()
        cut = data.draw(st.integers(0, len(whole)))
        out.write_bytes(whole[:cut])

        with ResultFile.open(out, JOB, force=False) as file:
            kept = whole[:cut].count(b"\n")
            assert file.finished == {f"id-{i}" for i in range(kept)}
            for r in records[kept:]:
                file.append(r)
        assert out.read_bytes() == whole


@pytest.mark.parametrize(
    "tail", [b"\x00\x00\n", b'{"custom_id": "z"', b'{"x": 1}\n', b"\xff\n", b"\n"]
)
def test_torn_last_line_is_cut_away(out, tail):
    write_results(out, "a")
    with out.open("ab") as file:
        file.write(tail)
    with ResultFile.open(out, JOB, force=False) as file:
        assert file.finished == {"a"}
    assert out.read_bytes() == as_line("a")


def test_damage_in_the_middle_is_refused_by_line(out):
    write_results(out, "a", "b", "c")
    lines = out.read_bytes().splitlines(keepends=True)
    damaged = lines[0] + lines[1][5:] + lines[2]
    out.write_bytes(damaged)
    assert "line 2 is not a result line" in refusal(out)
    assert out.read_bytes() == damaged


KILLED = """
import sys
from jaxinfer.workload.result_file import ResultFile
file = ResultFile.open(sys.argv[1], {"job": 1}, force=False)
for i in range(100_000):
    if str(i) not in file.finished:
        file.append({"custom_id": str(i), "text": "x" * 5000})
"""


def child(code: str, out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, str(out)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_killed_process_leaves_no_gap_and_no_double(out):
    for delay in (0.0, 0.05):
        process = child(KILLED, out)
        before = out.stat().st_size if out.exists() else 0
        while not out.exists() or out.stat().st_size <= before:
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with ResultFile.open(out, {"job": 1}, force=False) as file:
        ids = [json.loads(line)["custom_id"] for line in out.read_bytes().splitlines()]
        assert ids == [str(i) for i in range(len(ids))]
        assert file.finished == set(ids)


def test_second_process_is_refused_until_the_first_ends(out):
    holder = """
import sys
from jaxinfer.workload.result_file import ResultFile
file = ResultFile.open(sys.argv[1], {"job": 1}, force=False)
print("open", flush=True)
sys.stdin.read()
"""
    with child(holder, out) as process:
        assert process.stdout.readline() == "open\n"
        for force in (False, True):
            assert "is in use by another process" in refusal(out, {"job": 1}, force)
        process.communicate()
    ResultFile.open(out, {"job": 1}, force=False).close()


def test_two_opens_in_one_process_are_refused_too_and_close_twice_is_fine(out):
    with ResultFile.open(out, JOB, force=False) as file:
        assert "in use" in refusal(out)
        file.close()
        ResultFile.open(out, JOB, force=False).close()


def test_refused_open_releases_the_lock(out):
    out.write_text("my notes\n")
    refusal(out)
    with out.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_output_is_a_folder_or_a_device_or_in_no_folder(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    assert refusal(folder) == f"cannot write {folder}: Is a directory"
    assert "not a regular file" in refusal(Path("/dev/null"))
    missing = refusal(tmp_path / "no" / "out.jsonl")
    assert missing.endswith(f"{tmp_path / 'no'} is not a folder, create it first")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_output_that_may_not_be_written(out, monkeypatch, code):
    def refuse(*args: object, **kwargs: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", refuse)
    assert refusal(out) == f"cannot write {out}: {os.strerror(code)}"


def test_sidecar_that_cannot_be_written(out):
    Path(f"{out}.job.json").mkdir()
    assert "cannot write" in refusal(out)


def test_disk_full_in_the_middle_of_a_line_keeps_the_lines_before(out):
    whole = as_line("a")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ResultFile.open(out, JOB, force=False) as file:
        file.append(record("a"))
        try:
            # The kernel takes 10 bytes of the second line and then refuses.
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, hard))
            with pytest.raises(JaxinferError) as error:
                file.append(record("b"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert file.finished == {"a"}
        # Closed and unlocked at once: nothing may follow a line that was lost.
        with pytest.raises(ValueError, match="is closed"):
            file.append(record("c"))
        ResultFile.open(out, JOB, force=False).close()
    assert str(error.value).startswith(f"cannot write {out}: File too large; results so far")
    assert "\n" not in str(error.value)
    assert out.read_bytes() == whole
    write_results(out, "b")
    assert out.read_bytes() == whole + as_line("b")


def test_failed_sync_is_a_failed_append(out, monkeypatch):
    def refuse(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with ResultFile.open(out, JOB, force=False) as file:
        file.append(record("a"))
        monkeypatch.setattr(os, "fsync", refuse)
        with pytest.raises(JaxinferError, match="No space left on device"):
            file.append(record("b"))
    assert out.read_bytes() == as_line("a")


@pytest.mark.parametrize("at", ["write", "half", "fsync"])
def test_an_interrupted_append_leaves_nothing_and_others_may_follow(out, monkeypatch, at):
    """As of Ctrl-C, at whichever moment: the same file goes on, and so does the next process."""
    write, sync = os.write, os.fsync

    def half(fd, data):
        if at == "write":
            raise KeyboardInterrupt
        done = write(fd, data[:5] if at == "half" else data)
        if at == "half":
            raise KeyboardInterrupt
        return done

    def interrupted(fd):
        sync(fd)
        raise KeyboardInterrupt

    with ResultFile.open(out, JOB, force=False) as file:
        file.append(record("a"))
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", half)
            patch.setattr(os, "fsync", interrupted)
            with pytest.raises(KeyboardInterrupt):
                file.append(record("b"))
        assert file.finished == {"a"}
        file.append(record("c"))
        file.append(record("b"))
    assert out.read_bytes() == as_line("a") + as_line("c") + as_line("b")
    with ResultFile.open(out, JOB, force=False) as file:
        assert file.finished == {"a", "b", "c"}
