"""How a run of the command line ends: status, one sentence, nothing else."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from headwise import errors
from headwise.cli import scan as scan_module
from headwise.cli.failures import is_refusal, sentence
from headwise.cli.main import main

SCAN = ["scan", "model", "--sentence", "a b"]


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def measure(*_: Any) -> None:
        raise error

    monkeypatch.setattr(scan_module, "measure", measure)


@pytest.fixture(autouse=True)
def no_traceback_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWISE_TRACEBACK", raising=False)


def out_of_memory_of_torch() -> RuntimeError:
    return type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch"})("CUDA out of memory. Tried 3 GiB")


MEMORY = "out of memory; use a smaller --batch-size, or cut the passages with --window or --max-length"
REFUSALS = {
    "refusal": (errors.DataError("text.txt: no such file"), "text.txt: no such file"),
    "two lines": (errors.ModelError("no weights.\n  Looked for a, b"), "no weights. Looked for a, b"),
    "file": (FileNotFoundError(errno.ENOENT, "No such file or directory", "x.txt"), "x.txt: No such file or directory"),
    "rename": (
        OSError(errno.EXDEV, "Invalid cross-device link", "a", None, "b"),
        "a -> b: Invalid cross-device link",
    ),
    "no space": (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    "words only": (OSError("the disk is on fire"), "the disk is on fire"),
    "memory": (MemoryError(), MEMORY),
    "memory of torch": (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), MEMORY),
    "memory of a gpu": (out_of_memory_of_torch(), MEMORY),
    "empty": (errors.GateError(), "GateError"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_are_one_sentence(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error, words = REFUSALS[name]
    raising(monkeypatch, error)
    assert main(SCAN) == 1
    said = capsys.readouterr()
    assert said.err == f"headwise: {words}\n"
    assert said.out == ""


@pytest.mark.parametrize("kind", [kind for kind in vars(errors).values() if isinstance(kind, type)])
def test_every_error_of_the_tree_is_a_refusal(kind: type[errors.HeadwiseError]) -> None:
    assert is_refusal(kind("why"))
    assert sentence(kind("why")) == "headwise: why"


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("shapes"), KeyError("a"), AssertionError()])
def test_defects_keep_their_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, error)
    with pytest.raises(type(error)):
        main(SCAN)


@pytest.mark.parametrize("arguments", [["--traceback", *SCAN], [*SCAN, "--traceback"]])
def test_traceback_option(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, errors.DataError("no"))
    with pytest.raises(errors.DataError):
        main(arguments)


@pytest.mark.parametrize(("value", "shown"), [("1", True), ("0", False), ("", False)])
def test_traceback_variable(value: str, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWISE_TRACEBACK", value)
    raising(monkeypatch, errors.DataError("no"))
    if shown:
        with pytest.raises(errors.DataError):
            main(SCAN)
    else:
        assert main(SCAN) == 1


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    raising(monkeypatch, KeyboardInterrupt())
    assert main(SCAN) == 130
    assert capsys.readouterr().err == "headwise: interrupted; nothing was saved\n"


def test_interrupt_that_a_library_turned_into_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*_: Any) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("half initialised") from None

    monkeypatch.setattr(scan_module, "measure", measure)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert main(SCAN) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "headwise: interrupted; nothing was saved\n"


def test_signal_handler_is_given_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert main(["--version"]) == 0
    assert signal.getsignal(signal.SIGINT) is before


USAGE = {
    "no verb": [],
    "unknown verb": ["scna"],
    "unknown option": ["scan", "m", "--sentence", "a", "--heads"],
    "no model": ["scan"],
    "not a number": ["scan", "m", "--sentence", "a", "--limit", "x"],
    "not positive": ["scan", "m", "--sentence", "a", "--batch-size", "0"],
    "dtype": ["scan", "m", "--sentence", "a", "--dtype", "int8"],
    "backend": ["scan", "m", "--sentence", "a", "--backend", "nope"],
    "seed of no machine word": ["scan", "m", "--sentence", "a", "--seed", "9" * 30],
    "seed of the lab": ["lab", "worked-split", "--seed", "9" * 30],
}


@pytest.mark.parametrize("name", USAGE)
def test_wrong_usage(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(USAGE[name]) == 2
    said = capsys.readouterr()
    assert "Usage: headwise" in said.err
    assert said.out == ""


def test_mistyped_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scna", "m"]) == 2
    assert "there is no verb 'scna'; did you mean 'scan'?" in capsys.readouterr().err
    assert main(["frobnicate"]) == 2
    assert "the verbs are scan" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["scan", "--help"], ["--version"]])
def test_help_and_version(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert said.out.startswith(("Usage: headwise", "headwise 0."))
    assert said.err == ""


# In a process of its own: what no call inside this one can show.

ENTRIES = {
    "script": [str(Path(sys.executable).with_name("headwise"))],
    "module": [sys.executable, "-m", "headwise"],
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_help_imports_nothing_heavy(entry: str) -> None:
    done = subprocess.run(
        [*ENTRIES[entry], "--help"],
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("Usage: headwise")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "headwise.cli.app" in imported
    assert not imported & {"torch", "transformers", "pandas", "numpy", "rich", "jinja2", "jsonschema"}


@pytest.mark.parametrize("entry", ENTRIES)
def test_help_is_quick(entry: str) -> None:
    """Well under 0.3 s of processor time, which does not depend on what else the machine does."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*ENTRIES[entry], "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.2


def program(body: str) -> list[str]:
    """A process that runs the command line with ``measure`` replaced by ``body``."""
    code = f"""
import sys
from headwise.cli import scan
from headwise.cli.main import main

def measure(*_):
{textwrap.indent(textwrap.dedent(body), "    ")}

scan.measure = measure
sys.exit(main({SCAN!r}))
"""
    return [sys.executable, "-c", code]


def interrupt(command: list[str], ready: str) -> subprocess.CompletedProcess[str]:
    """Send Ctrl-C as soon as ``command`` has printed ``ready``."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == ready
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_ctrl_c_in_the_middle() -> None:
    done = interrupt(program("import time; print('ready', flush=True); time.sleep(30)"), "ready")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "headwise: interrupted; nothing was saved\n")


def test_ctrl_c_while_a_string_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data classes execute strings. Python would then end ``python -m`` by the signal, whatever status it is given."""
    body = """exec("import time; print('ready', flush=True); time.sleep(30)")"""
    (tmp_path / "interrupted.py").write_text(program(body)[-1])
    monkeypatch.chdir(tmp_path)
    done = interrupt([sys.executable, "-m", "interrupted"], "ready")
    assert (done.returncode, done.stderr) == (130, "headwise: interrupted; nothing was saved\n")


def test_ctrl_c_while_torch_is_imported() -> None:
    done = interrupt(program("print('ready', flush=True); import torch; import time; time.sleep(30)"), "ready")
    assert (done.returncode, done.stderr) == (130, "headwise: interrupted; nothing was saved\n")


def test_an_ignored_interrupt_stays_ignored() -> None:
    command = [
        "sh",
        "-c",
        "trap '' INT; exec \"$@\"",
        "sh",
        *program("import time; print('ready', flush=True); time.sleep(0.5); raise SystemExit(7)"),
    ]
    assert interrupt(command, "ready").returncode == 7


def test_ctrl_c_after_the_run_was_put_in_its_place_says_so() -> None:
    body = """
    import time
    from headwise import saved
    saved.note("runs/book")
    print("ready", flush=True)
    time.sleep(30)
    """
    done = interrupt(program(body), "ready")
    assert (done.returncode, done.stderr) == (130, "headwise: interrupted; runs/book had been saved\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&-"])
def test_closed_streams(closed: str, tmp_path: Path) -> None:
    """A stream that was closed is as good as /dev/null, and no file of the run takes its number."""
    command = f"{sys.executable} -m headwise cost --d-model 64 --heads 4 --layers 2 {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, cwd=tmp_path)
    shown = ">&-" not in closed.split()
    said = "headwise: stdout is closed, so results are not shown\n" if closed == ">&-" else ""
    assert (done.returncode, done.stderr) == (0, said)
    assert ("d_model 64" in done.stdout) is shown


def test_a_name_that_is_no_utf_8_is_shown_with_escapes(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    done = subprocess.run([*ENTRIES["module"], "report", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("headwise: ")
    assert "caf\\udce9" in done.stderr


def test_a_closed_pipe_is_quiet() -> None:
    command = program("for _ in range(100_000): print('x' * 100)\n")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=30), err) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_device_fails() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*ENTRIES["module"], "--version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (1, "headwise: No space left on device\n")


def test_completion_script() -> None:
    done = subprocess.run(
        ENTRIES["script"],
        env={**os.environ, "_HEADWISE_COMPLETE": "zsh_source"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "#compdef headwise" in done.stdout
