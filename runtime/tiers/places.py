"""Where slower tiers are to be, looked at before anything is loaded.

    URL         its form, without asking anybody
    directory   made, owned for a moment, known to be a cache's or empty, written to
    key file    read

What cannot work is an error of the first second, not one after the weights. The tiers themselves
are opened later, and check again.

This module opens no tier and leaves nothing behind: no directory and no lock that was not there.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from statewise.runtime.tiers.body import read_key_file
from statewise.runtime.tiers.disk_open import check_is_ours
from statewise.runtime.tiers.files import DirectoryLock, Files
from statewise.runtime.tiers.store import TierError
from statewise.runtime.tiers.url import check_url


def check_places(directory: str = "", url: str = "", key_file: str = "") -> None:
    """TierError where a tier could not be opened there; empty: there is none.

    A directory that another process has is an error that names the process.
    """
    if url:
        try:
            check_url(url)
        except ValueError as error:
            raise TierError(f"remote cache {error}") from error
    if key_file:
        read_key_file(Path(key_file))
    if directory:
        _check_directory(Path(directory).expanduser())


def _check_directory(directory: Path) -> None:
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        Files().make_directory(directory)
        _try_out(directory)
    except OSError as error:
        raise TierError(f"disk cache directory {directory}: {error}") from error
    finally:
        for made in missing:
            with contextlib.suppress(OSError):
                made.rmdir()


def _try_out(directory: Path) -> None:
    probe = directory / "writable"
    lock = DirectoryLock(directory)
    try:
        check_is_ours(directory)
        probe.touch()
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
        lock.withdraw()
