"""Run folders: there whole or not at all, whatever interrupts."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headwise import artifacts, saved
from headwise.artifacts import _runs
from headwise.errors import RunError
from headwise.heads import HeadTable
from tests.tables import synthetic_run, synthetic_table

TABLE = synthetic_table({("encoder", "self"): [3, 2]}, measures=2)
OTHER = synthetic_table({("encoder", "self"): [3, 2]}, measures=2, seed=1)


def write(folder: Path, table: HeadTable = TABLE, **options: Any) -> Path:
    return artifacts.write_run(folder, synthetic_run(table), table, **options)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_written_and_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "deep" / "run")
    assert sorted(os.listdir(folder)) == ["heads.json", "run.json"]
    assert os.listdir(folder.parent) == ["run"]
    run = artifacts.read_run(folder)
    assert HeadTable.from_document(run.heads) == TABLE
    assert run.run["counts"]["heads"] == 5
    umask = os.umask(0)
    os.umask(umask)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask
    assert (folder / "run.json").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_report_is_made_inside_before_the_folder_appears(tmp_path: Path) -> None:
    seen = []

    def report(folder: Path) -> None:
        seen.append((folder, sorted(os.listdir(folder)), (tmp_path / "run").exists()))
        (folder / "report.html").write_text("page")

    write(tmp_path / "run", report=report)
    assert seen[0][1:] == (["heads.json", "run.json"], False)
    assert sorted(os.listdir(tmp_path / "run")) == ["heads.json", "report.html", "run.json"]


def test_an_empty_folder_may_be_there(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write(tmp_path / "run")
    assert (tmp_path / "run" / "run.json").exists()


def test_an_empty_folder_is_filled_and_not_replaced(tmp_path: Path) -> None:
    """It may be a mounted volume, or where a shell stands; its mode and identity stay."""
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(0o770)
    before = folder.stat()
    write(folder, report=lambda new: (new / "report.html").write_text("page"))
    assert (folder.stat().st_ino, folder.stat().st_mode) == (before.st_ino, before.st_mode)
    assert sorted(os.listdir(folder)) == ["heads.json", "report.html", "run.json"]
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("step", ["fsync", "rename", "report"])
def test_a_failure_leaves_an_empty_folder_empty(step: str, tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    real, calls = os.rename, []

    def second_time(source: Any, target: Any) -> None:
        calls.append(source)
        if len(calls) == 2:
            no_space()
        real(source, target)

    if step != "report":
        monkeypatch.setattr(_runs.os, step, no_space if step == "fsync" else second_time)
    with pytest.raises(RunError, match="No space left on device; nothing was changed"):
        write(folder, report=no_space if step == "report" else None)
    assert os.listdir(folder) == []
    assert os.listdir(tmp_path) == ["run"]


def test_what_a_killed_run_left_in_a_folder_is_no_obstacle(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / ".headwise-new-run-abc").mkdir(parents=True)
    (folder / ".headwise-new-run-abc" / "heads.json").write_text("{")
    (folder / "heads.json").write_text("{")
    write(folder)
    assert sorted(os.listdir(folder)) == ["heads.json", "run.json"]


def test_a_mount_point_is_filled_but_never_exchanged(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setattr(_runs.os.path, "ismount", lambda path: Path(path) == folder)
    write(folder)
    with pytest.raises(RunError, match="is a mount point, which cannot be replaced in one step; choose a folder in"):
        artifacts.check_folder(folder, overwrite=True)


def test_the_mode_of_a_folder_survives_overwriting(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    folder.chmod(0o2770)
    write(folder, OTHER, overwrite=True)
    assert folder.stat().st_mode & 0o7777 == 0o2770


def test_overwrite_replaces_a_finished_run(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", report=lambda new: (new / "report.html").write_text("old"))
    before = snapshot(folder)
    with pytest.raises(RunError, match=r"holds a finished run; choose another folder, or overwrite it \(over"):
        write(folder, OTHER)
    assert snapshot(folder) == before
    write(folder, OTHER, overwrite=True)
    assert HeadTable.load(folder) == OTHER
    assert os.listdir(tmp_path) == ["run"]
    assert not (folder / "report.html").exists()  # nothing of the old run is left


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "a finished run"])
def test_an_interrupt_while_the_old_run_is_cleared_away_knows_that_the_new_one_is_there(
    there: str, tmp_path: Path, monkeypatch: Any
) -> None:
    folder = tmp_path / "run"
    if there == "an empty folder":
        folder.mkdir()
    elif there == "a finished run":
        write(folder, TABLE)
    saved.forget()

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", stop)
    with pytest.raises(KeyboardInterrupt):
        write(folder, TABLE, overwrite=True)
    assert saved.so_far() == (str(folder),)
    assert artifacts.read_run(folder)


def test_a_pipe_named_run_json_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "run.json")
    with pytest.raises(RunError, match=r"is not a headwise run \(it holds run.json\)"):
        artifacts.check_folder(tmp_path / "run", overwrite=True)


def test_a_damaged_or_newer_run_can_be_overwritten(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    (folder / "heads.json").write_text("{")
    text = (folder / "run.json").read_text()
    (folder / "run.json").write_text(text.replace('"version": "1.0"', '"version": "9.0"'))
    write(folder, overwrite=True)
    assert HeadTable.load(folder) == TABLE


def make_file(path: Path) -> None:
    path.write_text("x")


def make_foreign(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("x")


def make_fake(path: Path) -> None:
    path.mkdir()
    (path / "run.json").write_text('{"format": "someone else\'s"}')


def make_run_with_guest(path: Path) -> None:
    write(path)
    (path / "notes.md").write_text("mine")
    (path / "notes2.md").write_text("mine")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (make_file, "is a file, not a folder; choose another name"),
        (make_foreign, r"exists and is not a headwise run \(it holds thesis.tex\)"),
        (make_fake, r"exists and is not a headwise run \(it holds run.json\)"),
        (make_run_with_guest, r"holds a finished run|also holds notes.md and 1 more, not written by headwise"),
    ],
)
def test_what_is_not_ours_is_never_replaced(
    make: Callable[[Path], None], words: str, overwrite: bool, tmp_path: Path
) -> None:
    make(tmp_path / "run")
    before = snapshot(tmp_path)
    for attempt in (artifacts.check_folder, write):
        with pytest.raises(RunError, match=words):
            attempt(tmp_path / "run", overwrite=overwrite)
    assert snapshot(tmp_path) == before


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("step", ["fsync", "rename", "report"])
@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (no_space, RunError, "run cannot be written: No space left on device; nothing was changed"),
        (interrupted, KeyboardInterrupt, None),
    ],
)
def test_a_failure_leaves_everything_as_it_was(
    fault: Any, kind: type[BaseException], words: str | None, step: str, there: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    if there:
        write(tmp_path / "run")
    before = snapshot(tmp_path)
    if step != "report":
        monkeypatch.setattr(_runs.os, step, fault)
    with pytest.raises(kind, match=words):
        write(tmp_path / "run", OTHER, overwrite=True, report=fault if step == "report" else None)
    monkeypatch.undo()
    assert snapshot(tmp_path) == before
    assert os.listdir(tmp_path) == (["run"] if there else [])


@pytest.mark.parametrize("fault", [no_space, interrupted])
def test_a_failure_between_the_two_renames_brings_the_old_run_back(
    fault: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    write(tmp_path / "run")
    before = snapshot(tmp_path)
    real, calls = os.rename, []

    def rename(source: Any, target: Any) -> None:
        calls.append(source)
        if len(calls) == 2:
            fault()
        real(source, target)

    monkeypatch.setattr(_runs.os, "rename", rename)
    with pytest.raises((RunError, KeyboardInterrupt)):
        write(tmp_path / "run", OTHER, overwrite=True)
    assert len(calls) == 3
    assert snapshot(tmp_path) == before


def test_a_process_killed_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    write(tmp_path / "run")
    old = snapshot(tmp_path / "run")
    script = f"""
        import os
        from tests.artifacts.test_runs import OTHER, write
        from headwise.artifacts import _runs
        from pathlib import Path
        real, calls = os.rename, []
        def rename(source, target):
            calls.append(source)
            if len(calls) == 2:
                os._exit(9)
            real(source, target)
        _runs.os.rename = rename
        write(Path({str(tmp_path / "run")!r}), OTHER, overwrite=True)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=Path(__file__).parents[2], check=False)
    assert ended.returncode == 9
    assert not (tmp_path / "run").exists()
    with pytest.raises(RunError, match=r"there is no run folder .*; a run that was being replaced is at .*-old"):
        artifacts.read_run(tmp_path / "run")
    # The next look at the folder puts the run back, and asks before replacing it.
    with pytest.raises(RunError, match="holds a finished run"):
        artifacts.check_folder(tmp_path / "run")
    assert snapshot(tmp_path / "run") == old
    write(tmp_path / "run", OTHER, overwrite=True)
    assert HeadTable.load(tmp_path / "run") == OTHER


def test_a_run_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    def report(folder: Path) -> None:
        if not (tmp_path / "run").exists():
            write(tmp_path / "run", OTHER)

    with pytest.raises(RunError, match="holds a finished run"):
        write(tmp_path / "run", report=report)
    assert HeadTable.load(tmp_path / "run") == OTHER
    assert os.listdir(tmp_path) == ["run"]


def test_a_link_to_a_folder_is_followed_and_kept(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    link = tmp_path / "run"
    link.symlink_to(tmp_path / "scratch" / "real")
    write(link)
    write(link, OTHER, overwrite=True)
    assert link.is_symlink()
    assert HeadTable.load(tmp_path / "scratch" / "real") == OTHER
    assert sorted(os.listdir(tmp_path)) == ["run", "scratch"]
    assert os.listdir(tmp_path / "scratch") == ["real"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_place(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RunError, match=r"cannot be written: .*Permission denied; choose another folder"):
        write(tmp_path / "run")


def test_a_read_only_place_whoever_asks(tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(_runs.tempfile, "mkdtemp", refuse)
    for attempt in (artifacts.check_folder, write):
        with pytest.raises(RunError, match=r"run cannot be written: .*Read-only file system; choose another folder"):
            attempt(tmp_path / "run")
    assert os.listdir(tmp_path) == []


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    with pytest.raises(RunError, match="cannot be written"):
        write(tmp_path / "a" / "run")


def test_check_folder_leaves_no_trace(tmp_path: Path) -> None:
    artifacts.check_folder(tmp_path / "run")
    assert os.listdir(tmp_path) == []


def test_documents_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    run = synthetic_run(TABLE)
    for change, words in [
        ({"seconds": -1.0}, "seconds: -1.0 breaks the rule minimum 0"),
        ({"date": "yesterday"}, "date: 'yesterday' breaks the rule pattern"),
        ({"seed": "x"}, "seed: must be integer or null, not 'x'"),
        ({"counts": {"heads": -1}}, "counts.heads: -1 breaks"),
        ({"backends": [{"backend": "tiled"}]}, r"backends\[0\]: 'sites' is a required property"),
        ({"data": {"x": {1, 2}}}, r"\$\.data\.x holds a set, which JSON cannot hold"),
        ({"data": {"x": float("nan")}}, r"\$\.data\.x holds nan"),
        ({"data": {3: 1}}, r"\$\.data has the key 3; keys are strings"),
    ]:
        with pytest.raises(RunError, match=words):
            artifacts.write_run(tmp_path / "run", run | change, TABLE)
    assert os.listdir(tmp_path) == []


def test_files_of_two_runs_are_noticed(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    text = (folder / "run.json").read_text().replace("sha256:00ff", "sha256:00fe")
    (folder / "run.json").write_text(text)
    with pytest.raises(RunError, match=r"of weights sha256:00fe and heads\.json of weights sha256:00ff"):
        artifacts.read_run(folder)


def test_refusals_of_reading(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no run folder"):
        artifacts.read_run(tmp_path / "none")
    with pytest.raises(RunError, match=r"is not a headwise run: it has no run\.json"):
        artifacts.read_run(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="is a file; give the run folder"):
        artifacts.read_run(tmp_path / "file")
    folder = write(tmp_path / "run")
    (folder / "heads.json").unlink()
    with pytest.raises(RunError, match=r"heads\.json does not exist"):
        artifacts.read_run(folder)


@pytest.mark.parametrize("fault", [no_space, interrupted])
def test_saving_a_table_in_one_step(fault: Any, tmp_path: Path, monkeypatch: Any) -> None:
    file = TABLE.save(tmp_path / "table.json")
    before = snapshot(tmp_path)
    monkeypatch.setattr(os, "fsync", fault)
    with pytest.raises((RunError, KeyboardInterrupt)):
        OTHER.save(file)
    monkeypatch.undo()
    assert snapshot(tmp_path) == before
    with pytest.raises(RunError, match="is a folder; give the path of a file"):
        TABLE.save(tmp_path)
    with pytest.raises(RunError, match="cannot be written: No such file"):
        TABLE.save(tmp_path / "none" / "table.json")


def test_importing_artifacts_and_heads_is_light() -> None:
    script = (
        "import sys, headwise.heads, headwise.artifacts; "
        "print(sorted({'torch', 'transformers', 'pandas', 'rich', 'jsonschema', 'jinja2'} & sys.modules.keys()))"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"
