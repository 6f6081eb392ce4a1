"""Errors of the runtime.

    StatewiseError
    +-- OperatingError            expected in operation; typed, counted, answered
    |   +-- InvalidRequestError       400: the request can never be served as written
    |   |   +-- PromptTooLongError        longer than the context or than any pool
    |   |   +-- BodyTooLargeError         413: the body exceeds the server's limit
    |   |   +-- BodyTimeoutError          408: the body did not come in time
    |   |   +-- UnauthorizedError         401: the key is missing or wrong
    |   +-- RefusedError              503: not now (starting, draining, queue full); retry later
    |   +-- AbortedError              the client or an operator ended the request
    |   +-- WorkerDiedError           503: a process died; open requests end with this
    |   +-- ModelLoadError            a model file is missing, truncated, unknown or misshapen
    |   +-- OutOfBlocksError          a pool is exhausted (internal: planned around)
    |   +-- InjectedError             a simulation asked for it
    +-- (programmer errors are AssertionError: they end the worker)

Corrupt is worse than crash; crash is worse than recompute.
"""

from __future__ import annotations


class StatewiseError(Exception):
    """Base of every error raised on purpose."""


class OperatingError(StatewiseError):
    """Expected in operation: `code` is a stable word, `http_status` what a client sees."""

    code = "internal_error"
    http_status = 500


class InvalidRequestError(OperatingError):
    """The request can never be served as written; the message names the field and the limit."""

    code = "invalid_request"
    http_status = 400


class PromptTooLongError(InvalidRequestError):
    """Prompt plus reserved output exceed the context length or a whole pool."""

    code = "prompt_too_long"


class BodyTooLargeError(InvalidRequestError):
    """A request's body exceeds the server's limit."""

    code = "body_too_large"
    http_status = 413


class BodyTimeoutError(InvalidRequestError):
    """A request's body was not sent in time."""

    code = "request_timeout"
    http_status = 408


class UnauthorizedError(InvalidRequestError):
    """The key is missing or wrong."""

    code = "unauthorized"
    http_status = 401


class RefusedError(OperatingError):
    """Not now: starting, draining, or the queue is full."""

    code = "refused"
    http_status = 503


class AbortedError(OperatingError):
    """The request was ended from outside."""

    code = "aborted"
    http_status = 499


class WorkerDiedError(OperatingError):
    """A process of the server died while it held this request."""

    code = "worker_died"
    http_status = 503


class ModelLoadError(OperatingError):
    """A model cannot be loaded; the message names the file and the tensor."""

    code = "model_load"


class OutOfBlocksError(OperatingError):
    """A block pool has too few free blocks; `group` names it."""

    code = "out_of_blocks"
    http_status = 503

    def __init__(self, group: str, needed: int, free: int) -> None:
        super().__init__(f"group {group!r}: {needed} blocks needed, {free} free")
        self.group = group
        self.needed = needed
        self.free = free


class InjectedError(OperatingError):
    """An error that a simulation asked for."""

    code = "injected"
