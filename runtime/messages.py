"""What crosses process borders: msgspec tagged structs, array-like, versioned. No pickle.

    server --GenerateRequest--> tokenizer --TokenizedRequest--> scheduler
    scheduler --TokenDelta--> detokenizer --TextDelta--> server
    server <--> scheduler: control (abort, flush, stats, match)
    detokenizer --StopMatched--> scheduler

Every request ends with exactly one delta whose `finish` is set. Token ids travel as int32
little-endian bytes. This module holds no behaviour beyond encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from statewise.runtime.sampling_params import SamplingParams

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 64 << 20


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base: tagged by class name, encoded as an array."""


class LogprobOptions(msgspec.Struct, frozen=True, array_like=True):
    """Which log probabilities a request returns. `start` -1: generated tokens only."""

    enabled: bool = False
    start: int = -1
    top: int = 0
    token_ids: tuple[int, ...] = ()
    with_text: bool = False


class CacheOptions(msgspec.Struct, frozen=True, array_like=True):
    """Whose state a request may share, and what it asks of retention."""

    salt: str = ""
    adapter: str = ""
    checkpoint: bool = False  # keep the trailing state at the end of the prompt
    exact: bool = False  # use no state that may be approximate


class GenerateRequest(Message, frozen=True):
    """A request as it entered. Exactly one of `text`, `input_ids`, `chat` is set."""

    rid: str
    sampling: SamplingParams
    text: str | None = None
    input_ids: bytes | None = None
    chat: bytes | None = None  # JSON: {"messages": [...], "tools": [...], "continue": bool, ...}
    logprob: LogprobOptions = LogprobOptions()
    cache: CacheOptions = CacheOptions()
    priority: int = 0
    stream: bool = False
    arrival: float = 0.0  # time.time() at the server


class TokenizedRequest(Message, frozen=True):
    """A request the scheduler can run."""

    rid: str
    input_ids: bytes
    sampling: SamplingParams
    logprob: LogprobOptions = LogprobOptions()
    cache: CacheOptions = CacheOptions()
    priority: int = 0
    stream: bool = False
    arrival: float = 0.0


class FinishReason(msgspec.Struct, frozen=True, array_like=True):
    """Why a request ended. kind: stop | length | abort | error."""

    kind: str
    matched: str | int | None = None  # stop: the string or token id
    message: str = ""
    code: str = ""
    http_status: int = 200


class GroupReport(msgspec.Struct, frozen=True):
    """One state group's share of a cache report, in tokens."""

    name: str
    resident: int  # tokens whose state was resident along the matched path
    resumable: int  # deepest position at which this group alone could resume


class CacheReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why each prompt token was or was not reused; all counts in tokens of the prompt."""

    prompt: int = 0
    matched: int = 0  # logical hit
    reused: int = 0  # effective reuse: used as it stood
    repaired: int = 0  # replayed to make trailing or partial state exact
    loaded: int = 0  # copied back from slower tiers
    loaded_from: dict[str, int] = {}  # of these, by tier
    lossy: int = 0  # of those used: their state rests on lossy copies
    recomputed: int = 0  # matched, yet computed again
    computed: int = 0  # prompt tokens never matched
    level: str = "none"  # none | direct | load | repair | rebuild | recompute | bounded
    limiting_group: str = ""  # the group whose absence set the reuse position
    reason: str = ""  # one sentence for a person
    groups: tuple[GroupReport, ...] = ()
    verdicts: tuple[str, ...] = ()


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """What a request used so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    num_retractions: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    weight_version: str = "default"  # of the weights that computed the newest token


# (logprob, token id)
Pair = tuple[float, int]


class LogprobEntry(msgspec.Struct, frozen=True, array_like=True):
    """One token's log probability with what was asked beside it."""

    logprob: float | None  # None for the very first prompt token
    token_id: int
    top: tuple[Pair, ...] = ()
    chosen: tuple[Pair, ...] = ()


class TokenDelta(Message, frozen=True):
    """New tokens of one request. `finish` set: the last message of this request.

    `sampling` and `stream` are set in a request's first delta only: how the detokenizer turns ids
    into text (stop strings, special tokens), and whether text is wanted before the end, travel with
    the ids, so that no second route can be late.
    """

    rid: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[LogprobEntry, ...] = ()
    prompt_logprobs: tuple[LogprobEntry, ...] = ()
    finish: FinishReason | None = None
    usage: Usage = Usage()
    report: CacheReport | None = None
    sampling: SamplingParams | None = None
    stream: bool = True


class TextDelta(Message, frozen=True):
    """What a client sees next: new text at a safe boundary, and what came with it.

    `token_texts` gives the text of every id that the log probabilities name.
    """

    rid: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[LogprobEntry, ...] = ()
    prompt_logprobs: tuple[LogprobEntry, ...] = ()
    finish: FinishReason | None = None
    usage: Usage = Usage()
    report: CacheReport | None = None
    token_texts: tuple[tuple[int, str], ...] = ()


class AbortRequest(Message, frozen=True):
    """End a request (empty rid: all). The scheduler answers with its terminal delta."""

    rid: str
    message: str = "aborted by the client"


class StopMatched(Message, frozen=True):
    """The detokenizer found a stop string after `num_tokens` generated tokens."""

    rid: str
    matched: str
    num_tokens: int


class ControlRequest(Message, frozen=True):
    """A question to one process.

    To the scheduler, op is flush | stats | match | cache_dump | update_weights | ping; to the
    tokenizer, tokenize | detokenize | ping.
    """

    call_id: str
    op: str
    args: bytes = b"{}"  # JSON


class ControlReply(Message, frozen=True):
    """Answer to a `ControlRequest`; `error` empty on success."""

    call_id: str
    result: bytes = b"null"  # JSON
    error: str = ""


class Connect(Message, frozen=True):
    """A process was restarted: send to `peer` at `address` from now on, drop what is unsent."""

    peer: str
    address: str


class Ready(Message, frozen=True):
    """A process finished starting; `info` is JSON for logs and /get_server_info.

    `incarnation` counts the starts of that process under one server.
    """

    process: str
    info: bytes = b"{}"
    incarnation: int = 0


class Heartbeat(Message, frozen=True):
    """A process is alive and its loop turns; `load` is JSON (running, queued, ...)."""

    process: str
    at: float
    load: bytes = b"{}"
    incarnation: int = 0


AnyMessage = (
    GenerateRequest
    | TokenizedRequest
    | TokenDelta
    | TextDelta
    | AbortRequest
    | StopMatched
    | ControlRequest
    | ControlReply
    | Connect
    | Ready
    | Heartbeat
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(tuple[int, AnyMessage])
_batch_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(tuple[int, list[AnyMessage]])


def encode(message: AnyMessage) -> bytes:
    """Encode with the protocol version in front."""
    return _encoder.encode((PROTOCOL_VERSION, message))


def encode_batch(messages: Sequence[AnyMessage]) -> bytes:
    """Encode several messages into one frame, in order."""
    return _encoder.encode((PROTOCOL_VERSION, messages))


def _decode_with(decoder: msgspec.msgpack.Decoder[Any], data: bytes | memoryview) -> Any:
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {len(data)} bytes exceeds {MAX_MESSAGE_BYTES}")
    try:
        version, content = decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"malformed message: {error}") from error
    if version != PROTOCOL_VERSION:
        raise ValueError(f"protocol version {version}, expected {PROTOCOL_VERSION}")
    return content


def decode(data: bytes | memoryview) -> AnyMessage:
    """Decode one message.

    Raises ValueError on a foreign version, an oversized or a malformed message.
    """
    return _decode_with(_decoder, data)  # type: ignore[no-any-return]


def decode_batch(data: bytes | memoryview) -> list[AnyMessage]:
    """Decode a frame of `encode_batch`; raises as `decode` does."""
    return _decode_with(_batch_decoder, data)  # type: ignore[no-any-return]


def pack_ids(ids: NDArray[np.int32] | list[int]) -> bytes:
    """Token ids as int32 little-endian bytes."""
    return np.ascontiguousarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> NDArray[np.int32]:
    """Inverse of `pack_ids`; read-only view."""
    return np.frombuffer(data, dtype="<i4")
