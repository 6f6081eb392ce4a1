"""Errors a prompt program can meet.

    ProgramError (RuntimeError)     a program failed; `__cause__` is what happened
    BackendError (RuntimeError)     a backend refused or failed a call
    +-- VisionUnsupportedError          the served model reads no images or videos
    TemplateError (ValueError)      the model's chat template is absent or cannot be rendered

A program's expressions run in another thread than its body. Whoever reads a result, waits for one,
or iterates over a stream meets the failure as a `ProgramError` with the cause chained: nothing is
swallowed in a thread. These errors know nothing of HTTP clients or servers beyond a status number.
"""

from __future__ import annotations


class ProgramError(RuntimeError):
    """A prompt program failed; the cause is chained."""


class BackendError(RuntimeError):
    """A backend refused or failed a call.

    `status` is the HTTP status (0 where no answer came), `code` the server's stable word for the
    kind of failure, `retry_after_s` what a refusing server asked for.
    """

    def __init__(
        self, message: str, *, status: int = 0, code: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class VisionUnsupportedError(BackendError):
    """The served model reads no images or videos."""


class TemplateError(ValueError):
    """The model's chat template is absent, malformed, or cannot express a conversation."""
