"""The command line: exit status, one-line mistakes, help generated from the settings."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch

from sparing.cli import SHELLS, UNEXPECTED, VERBS, main
from sparing.jobs import interrupts


def test_without_a_verb_the_list_is_shown(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}" in shown for name in VERBS)


def test_version_is_the_packages(capsys):
    from importlib.metadata import version

    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == version("sparing")


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_verbs_and_their_settings(shell: str, capsys):
    assert main(["--print-completion", shell]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in VERBS)
    assert "--local-epochs" in shown


def test_an_unknown_shell_is_a_mistake(capsys):
    assert main(["--print-completion", "fish"]) == 2
    assert "bash, zsh" in capsys.readouterr().err


@pytest.mark.parametrize("name", VERBS)
def test_help_shows_every_setting_with_its_sentence(name: str, capsys, monkeypatch):
    """The help is generated: no field of the settings may be missing from it."""
    monkeypatch.setenv("COLUMNS", "200")
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    settings = importlib.import_module(VERBS[name].module).Settings
    for field in dataclasses.fields(settings):
        words = field.name.replace("_", "-")
        assert words in shown or field.name.upper() in shown, field.name


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"], ["fetch", "no-such-asset"], ["fetch", "--nonsense"], ["plan"], ["plan", "missing-directory"],
        ["finetune"], ["finetune", "missing-directory", "missing.jsonl"],
        ["finetune", "missing-directory", "missing.jsonl", "--batch", "many"], ["demo", "--seed", "many"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_mistake_is_one_line_and_status_two(arguments: list[str], capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert len(streams.err.strip().splitlines()) == 1
    assert streams.err.startswith("sparing: ")
    assert list(tmp_path.iterdir()) == []


def test_json_is_one_document_on_standard_output(capsys):
    assert main(["fetch", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"question", "settings", "seed", "environment", "units", "tables"} <= set(document)
    assert {row["name"] for row in document["tables"]["assets"]} >= {"stories15m"}


@pytest.mark.processes
def test_module_runs_as_the_command():
    done = subprocess.run([sys.executable, "-m", "sparing", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "finetune" in done.stdout


FAKE = "sparing.jobs.fetch"
"""A job that these tests replace."""


@pytest.fixture
def failing(monkeypatch):
    """Let ``sparing fetch`` end in an error."""

    def fail(error: BaseException) -> None:
        def run(settings: object) -> None:
            raise error

        monkeypatch.setattr(importlib.import_module(FAKE), "run", run)

    return fail


def test_a_run_whose_notes_have_no_reader_has_not_ended_well(failing, capsys):
    failing(BrokenPipeError())
    assert main(["fetch"]) == 1
    assert "standard error has no reader any more" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.parametrize(("raised", "status"), [("ValueError('x')", 1), ("KeyboardInterrupt", 130)])
def test_the_status_is_right_though_nobody_reads_the_line(raised, status):
    code = (
        "import os, sys\nfrom sparing import cli\nimport sparing.jobs.fetch as job\n"
        f"def run(settings): raise {raised}\n"
        "job.run = run\nread, write = os.pipe()\nos.close(read)\nos.dup2(write, 2)\nsys.exit(cli.main(['fetch']))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == status


def test_a_copy_of_no_asset_in_particular_is_refused(capsys, tmp_path):
    assert main(["fetch", "--path", str(tmp_path)]) == 2
    assert "it is a copy of one asset; pass its NAME too" in capsys.readouterr().err


def test_an_unforeseen_error_is_one_line_that_says_so(failing, capsys):
    failing(ZeroDivisionError("nobody thought of\nthis"))
    assert main(["fetch"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("sparing: fetch: got ZeroDivisionError: nobody thought of; ")
    assert UNEXPECTED in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("how", ["--debug", "SPARING_DEBUG"])
def test_debug_shows_where_it_came_from(how, failing, capsys, monkeypatch):
    failing(ZeroDivisionError("nobody thought of this"))
    if how != "--debug":
        monkeypatch.setenv(how, "1")
    assert main(["fetch", *[how] * (how == "--debug")]) == 1
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "in run" in err


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: 9")]
)
def test_memory_that_has_run_out_is_no_bug(error, failing, capsys):
    failing(error)
    assert main(["fetch"]) == 1
    err = capsys.readouterr().err
    assert UNEXPECTED not in err
    assert "pass smaller sizes" in err


def test_no_line_shows_the_password_of_a_url(failing, capsys):
    failing(OSError("no route to postgresql://me:s3cret@host/db"))
    assert main(["fetch"]) == 1
    assert "postgresql://me:***@host/db" in capsys.readouterr().err
    assert main(["fetch", "--storage", "postgresql://me:s3cret@host/db"]) == 2
    assert "s3cret" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "status", "line"), [(None, 0, ""), (3, 3, ""), ("no model", 1, "sparing: no model\n")]
)
def test_a_library_that_ends_the_process(failing, capsys, monkeypatch, code, status, line):
    """As ``sys.exit`` does: with a status, or with words and status 1."""

    def run(settings: object) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(importlib.import_module(FAKE), "run", run)
    assert main(["fetch"]) == status
    assert capsys.readouterr().err == line


def test_an_interrupt_that_a_library_swallowed_is_an_interrupt(failing, capsys, monkeypatch):
    """Libraries in C make other errors of Ctrl-C; what follows it is not the run's failure."""

    def run(settings: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise SystemError("error return without exception set") from None

    monkeypatch.setattr(importlib.import_module(FAKE), "run", run)
    assert main(["fetch"]) == 130
    assert capsys.readouterr().err == "sparing: interrupted\n"


@pytest.mark.processes
@pytest.mark.parametrize("moment", ["import_module", "find_spec"])
def test_ctrl_c_while_modules_load_is_one_line(moment):
    """Right before the job is imported, and from within an import that swallows what is raised in it."""
    code = (
        "import signal, sys\n"
        "class Loads:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            try: signal.raise_signal(signal.SIGINT)\n"
        "            except BaseException: raise ImportError('torch is broken') from None\n"
        "if sys.argv[1] == 'find_spec': sys.meta_path.insert(0, Loads())\n"
        "import sparing.cli as cli\n"
        "whole = cli.importlib.import_module\n"
        "def loads(name):\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    return whole(name)\n"
        "if sys.argv[1] == 'import_module': cli.importlib.import_module = loads\n"
        "sys.exit(cli.main(['plan', '--params', '7e9']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, moment], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "sparing: interrupted\n")


@pytest.mark.parametrize("size", ["9" * 30, "1e30", "9" * 5000])
@pytest.mark.parametrize(
    ("verb", "name"),
    [("plan", "batch"), ("plan", "length"), ("scan", "workers"), ("federate", "workers"), ("finetune", "batch"),
     ("finetune", "length"), ("pretrain", "batch"), ("plan", "params"), ("transfer", "batch"), ("condense", "batch")],
)  # fmt: skip
def test_absurd_numbers_are_refused(verb, name, size, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reads = {"scan": ["m"], "finetune": ["m", "d"], "plan": ["--params", "7e9"] if name != "params" else []}
    assert main([verb, *reads.get(verb, []), f"--{name}", size]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert name in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_the_command_line_speaks_before_torch_is_loaded():
    code = (
        "import sys, sparing.cli as cli\n"
        "for words in (['--help'], ['--version'], ['nonsense'], ['--print-completion', 'zsh'],\n"
        "              ['pretrain', '--help'], ['scan', '--help'], ['plan', '--help'],\n"
        "              ['merge', '--how', 'soup']): cli.main(words)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "finetune" in done.stdout


def test_an_interrupt_that_nothing_could_catch_is_raised_again(failing, capfd, monkeypatch):
    """A finaliser cannot pass Ctrl-C on; Python prints a traceback of it and goes on."""

    class Dies:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def run(settings: object) -> None:
        Dies()
        time.sleep(60)

    monkeypatch.setattr(importlib.import_module(FAKE), "run", run)
    assert main(["fetch"]) == 130
    assert capfd.readouterr().err == "sparing: interrupted\n"


@pytest.fixture
def ending() -> Iterator[None]:
    """What a process that ends with its command leaves behind is taken back: this one goes on."""
    handler, hook, listening = signal.getsignal(signal.SIGINT), sys.unraisablehook, list(interrupts._LISTENING)
    yield
    signal.signal(signal.SIGINT, handler)
    sys.unraisablehook, interrupts._LISTENING[:] = hook, listening


@pytest.mark.usefixtures("ending")
def test_an_interrupt_below_torch_waits_until_torch_has_returned(failing, capsys, monkeypatch):
    """Where C++ asks a dispatch mode for what may not fail, an exception would end the process with a core dump."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            signal.raise_signal(signal.SIGINT)
            seen.append("returned")
            return func(*args, **(kwargs or {}))

    def run(settings: object) -> None:
        with Mode():
            torch.ones(2)
        time.sleep(60)

    monkeypatch.setattr(importlib.import_module(FAKE), "run", run)
    assert main(["fetch"]) == 130
    assert seen == ["returned"]
    assert capsys.readouterr().err == "sparing: interrupted\n"
    monkeypatch.setattr(os, "_exit", left := Mock(side_effect=SystemExit))
    monkeypatch.setattr(sys, "argv", ["sparing", "fetch"])
    main()  # a process of its own leaves at once
    left.assert_called_once_with(130)
    assert seen == ["returned"]


@pytest.mark.processes
def test_a_second_ctrl_c_while_the_process_ends_is_no_traceback():
    code = (
        "import atexit, signal, sys\n"
        "import sparing.cli as cli\n"
        "atexit.register(signal.raise_signal, signal.SIGINT)\n"
        "cli._run = lambda words: signal.raise_signal(signal.SIGINT)\n"
        "sys.exit(cli.main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "sparing: interrupted\n")
