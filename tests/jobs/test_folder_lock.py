"""One run at a time in a directory: another process is refused, and a death of any kind gives it back."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sparing.errors import UserError
from sparing.jobs.folder import Folder
from sparing.jobs.folder_lock import hold_, release_

NOW = {"seed": 0}


def forked(work: Callable[[], object]) -> int:
    """What another process meets: 0 done, 2 refused, 3 anything else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads; this one imports nothing
        pid = os.fork()
    if not pid:
        status = 3
        try:
            work()
            status = 0
        except UserError as error:
            status = 2 if "another run is at work in it" in str(error) else 3
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def folder(tmp_path: Path):
    yield Folder(tmp_path / "out")
    release_()


@pytest.mark.parametrize("change", [{"resume": True}, {"overwrite": True}])
def test_a_second_run_is_refused_while_the_first_is_at_work(folder: Folder, change: dict[str, bool]) -> None:
    """Without the lock, the first one's checkpoints are swept or deleted under its hands."""
    folder.claim_(NOW)
    folder.at("checkpoints").mkdir()
    draft = folder.at(".run.json.x.part")
    draft.write_text("half a file of the first")
    second = replace(folder, **change)

    def run() -> None:
        second.check()
        second.newest(NOW)
        second.claim_(NOW)

    assert forked(run) == 2
    assert draft.exists()
    assert folder.at("checkpoints").exists()
    release_(folder.path)
    assert forked(run) == 0
    assert not draft.exists() or change == {"overwrite": True}


def test_two_that_begin_at_once_do_not_share(folder: Folder) -> None:
    """Both have seen an empty directory; who claims second is refused, even after the first has ended."""
    folder.check()
    assert forked(lambda: folder.claim_(NOW)) == 0
    with pytest.raises(UserError, match=r"it holds another run \(run.json\)"):
        folder.claim_(NOW)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_death_gives_it_back(folder: Folder, number: int) -> None:
    def die() -> None:
        folder.claim_(NOW)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    assert forked(die) == -number
    replace(folder, resume=True).newest(NOW)


def test_workers_that_outlive_a_run_do_not_keep_it(folder: Folder) -> None:
    """A lock belongs to an open file, which forks share: they close theirs."""
    folder.claim_(NOW)
    hears, says = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        worker = os.fork()
    if not worker:
        os.close(says)
        os.read(hears, 1)
        os._exit(0)
    release_()
    assert forked(lambda: replace(folder, overwrite=True).claim_(NOW)) == 0
    os.write(says, b"x")
    os.waitpid(worker, 0)


def test_a_folder_at_work_is_refused_before_the_work_and_left_free(folder: Folder) -> None:
    """`check` is asked before anything is computed; it takes nothing, since what follows may be refused."""
    folder.claim_(NOW)
    second = replace(folder, overwrite=True)
    second.check()  # one's own
    assert forked(second.check) == 2
    release_()
    second.check()
    assert forked(second.check) == 0
    assert forked(lambda: second.claim_(NOW)) == 0


def test_those_that_share_may_be_several(folder: Folder) -> None:
    joined = replace(folder, shared=True)
    joined.claim_(NOW)
    assert forked(lambda: replace(joined, resume=True).newest(NOW)) == 0
    assert forked(lambda: replace(joined, overwrite=True).claim_(NOW)) == 2


def test_the_first_rank_takes_it_for_all(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.claim_(NOW)
    monkeypatch.setenv("RANK", "1")
    assert forked(lambda: hold_(folder.path)) == 0
    monkeypatch.setenv("RANK", "0")
    assert forked(lambda: hold_(folder.path)) == 2
