"""Progress bars: redrawn for a terminal, one line for anybody else."""

from __future__ import annotations

import io

from statewise.frontend.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_every_percent_once() -> None:
    stream = Terminal()
    bar = Progress(400, stream)
    for _ in range(400):
        bar.advance()
    bar.close()
    drawn = stream.getvalue().split("\r")
    assert len(drawn) == 102, "an empty start, and 0 to 100 percent"
    assert drawn[-1].endswith("400/400\n")


def test_a_file_gets_the_last_state_alone() -> None:
    stream = io.StringIO()
    bar = Progress(4, stream)
    bar.to(3)
    assert stream.getvalue() == ""
    bar.close()
    assert stream.getvalue() == f" 75% [{'#' * 30}{'.' * 10}] 3/4\n"
