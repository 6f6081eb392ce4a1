"""Every setting of a server or engine, in one frozen struct with defaults.

The command line, the config file, the environment, `Engine(**kw)` and `Runtime(**kw)` all fill this
one struct; `--help` is generated from the descriptions here. Sizes that are 0 are chosen at start
from the machine. `checked` is where values that exclude each other are refused.

This module reads no file, no environment and no machine.
"""

from __future__ import annotations

import difflib
import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from statewise.radix.lossy import KINDS as LOSSY_KINDS
from statewise.runtime.errors import InvalidRequestError
from statewise.runtime.tiers.url import check_url


def _help(group: str, text: str, *choices: str) -> Meta:
    return Meta(description=text, extra={"group": group, "choices": choices})


def _count(group: str, text: str, low: int = 0) -> Meta:
    return Meta(description=text, ge=low, extra={"group": group, "choices": ()})


def _size(group: str, text: str) -> Meta:
    return Meta(description=text, ge=0.0, extra={"group": group, "choices": ()})


def _share(group: str, text: str) -> Meta:
    return Meta(description=text, ge=0.0, le=1.0, extra={"group": group, "choices": ()})


LEAST_DISK_GB = 0.001
CODECS = ("none", "zstd", "lz4", "shuffle-zstd", "shuffle-lz4", "auto")

GROUPS = {
    "model": "what is served",
    "http": "who may ask, and where",
    "memory": "how much cached state is kept",
    "tiers": "where cached state goes that does not fit the device",
    "scheduling": "what runs next",
    "kernels": "how it is computed",
    "service": "watching and logging",
}


class ServerArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one server. Names as in docs/api.md."""

    model_path: Annotated[
        str,
        _help(
            "model",
            "a Hugging Face directory, a .gguf file, or a known name (smollm2-135m, gemma3-270m)",
        ),
    ]
    tokenizer_path: Annotated[
        str, _help("model", "where the tokenizer is, if not with the model")
    ] = ""
    served_model_name: Annotated[
        str, _help("model", "the name in responses; empty: the model path's last part")
    ] = ""
    chat_template: Annotated[
        str, _help("model", "a file with a Jinja chat template; empty: the model's own")
    ] = ""
    dtype: Annotated[
        str,
        _help("model", "type of weights and activations", "auto", "float32", "bfloat16", "float16"),
    ] = "auto"
    kv_cache_dtype: Annotated[str, _help("model", "type of cached state; auto: dtype")] = "auto"
    weight_version: Annotated[str, _help("model", "how answers name the weights")] = "default"
    context_length: Annotated[
        int, _count("model", "longest prompt plus output, in tokens; 0: the model's")
    ] = 0
    load_format: Annotated[str, _help("model", "format of the weights", "auto", "hf", "gguf")] = (
        "auto"
    )
    skip_tokenizer_init: Annotated[
        bool, _help("model", "serve token ids only: no text in, no text out")
    ] = False

    host: Annotated[str, _help("http", "address to listen on")] = "127.0.0.1"
    port: Annotated[
        int,
        Meta(
            description="port to listen on; 0: any free one",
            ge=0,
            le=65535,
            extra={"group": "http", "choices": ()},
        ),
    ] = 30000
    api_key: Annotated[
        str, _help("http", "key that every route but health and metrics asks for; empty: none")
    ] = ""
    admin_api_key: Annotated[
        str, _help("http", "key for flush and cache dump; empty: the api key does")
    ] = ""
    rpc: Annotated[
        str, _help("http", "ZMQ endpoint for RPC clients (tcp://127.0.0.1:PORT or ipc://PATH)")
    ] = ""
    rpc_secret_key_file: Annotated[
        str, _help("http", "the RPC endpoint's CURVE certificate with its secret key")
    ] = ""
    rpc_client_keys_dir: Annotated[
        str, _help("http", "directory with the CURVE certificates of admitted RPC clients")
    ] = ""
    max_body_bytes: Annotated[int, _count("http", "largest request body, in bytes", 1024)] = 8 << 20

    page_size: Annotated[
        int,
        _count("memory", "tokens per page of the cache; 0: 16, or what the model's layers need"),
    ] = 0
    mem_fraction_static: Annotated[
        float, _share("memory", "share of the free memory that block pools take")
    ] = 0.25
    max_total_tokens: Annotated[
        int, _count("memory", "tokens of every history pool; 0: from the memory fraction")
    ] = 0
    max_window_tokens: Annotated[
        int, _count("memory", "tokens of every window pool; 0: from the history pool")
    ] = 0
    watermark: Annotated[
        float, _share("memory", "share of each pool that admission keeps free")
    ] = 0.02
    eviction_policy: Annotated[
        str,
        _help(
            "memory",
            "what leaves a full cache first: least recompute saved per byte | least recently used, "
            "per group | the same, all groups of a leaf together",
            "value",
            "recency",
            "lru",
        ),
    ] = "value"
    bounded_replay: Annotated[
        int,
        _count(
            "memory",
            "APPROXIMATE: where windows are lost, replay only this many tokens if that is cheaper "
            "than being exact; outputs may differ from a cold run's; 0: always exact",
        ),
    ] = 0
    checkpoint_policy: Annotated[
        str,
        _help(
            "memory",
            "where trailing state is kept beside marks and request ends: branch points and every "
            "checkpoint interval | branch points | nowhere",
            "spaced",
            "branches",
            "ends",
        ),
    ] = "spaced"
    disable_radix_cache: Annotated[bool, _help("memory", "never reuse cached state")] = False
    checkpoint_interval: Annotated[
        int, _count("memory", "tokens between kept trailing states on long prefills", 1)
    ] = 4096

    host_cache_gb: Annotated[
        float, _size("tiers", "host memory for cached state that leaves the device, in GB; 0: none")
    ] = 0.0
    disk_cache_dir: Annotated[
        str,
        _help(
            "tiers",
            "directory of this server alone where cached state outlives a restart; empty: none",
        ),
    ] = ""
    disk_cache_gb: Annotated[float, _size("tiers", "room in that directory, in GB")] = 0.0
    disk_cache_codec: Annotated[
        str,
        _help(
            "tiers",
            "lossless compression on disk; auto: what loads soonest, measured at start on the "
            "model's own state and the directory's medium (docs/tiers.md)",
            *CODECS,
        ),
    ] = "none"
    remote_cache: Annotated[
        str,
        _help(
            "tiers",
            "object store that servers share: s3://BUCKET/PREFIX?endpoint=URL, file:///DIR; "
            "empty: none",
        ),
    ] = ""
    remote_cache_codec: Annotated[
        str,
        _help(
            "tiers",
            "lossless compression in the object store; auto: measured at start, for 100 MB/s",
            *CODECS,
        ),
    ] = "none"
    lossy_tiers: Annotated[
        str,
        _help(
            "tiers",
            "APPROXIMATE: slower tiers keep K/V at a byte a number, half the bytes of bfloat16; "
            "outputs may differ from a cold run's, unless a request says exact; none: every bit",
            "none",
            *LOSSY_KINDS,
        ),
    ] = "none"
    cache_ttl_hours: Annotated[
        float, _size("tiers", "age at which state on disk is not used any more; 0: any")
    ] = 0.0
    cache_key_file: Annotated[
        str,
        _help("tiers", "file of 32 random bytes: encrypt state on disk and in the object store"),
    ] = ""
    load_share: Annotated[
        float,
        _share(
            "tiers",
            "part of all processors' time that loads from slower tiers may take while rows decode",
        ),
    ] = 0.2

    max_running_requests: Annotated[
        int, _count("scheduling", "most requests that run at the same time", 1)
    ] = 64
    max_queued_requests: Annotated[
        int, _count("scheduling", "most waiting requests; more are refused with 503", 1)
    ] = 4096
    chunked_prefill_size: Annotated[int, _count("scheduling", "token budget of one step", 1)] = 512
    schedule_policy: Annotated[
        str,
        _help("scheduling", "lpm: longest cached prefix first; fcfs: in order", "lpm", "fcfs"),
    ] = "lpm"
    max_wait_s: Annotated[
        float,
        Meta(
            description="seconds of waiting after which a request goes first",
            ge=0.0,
            extra={"group": "scheduling", "choices": ()},
        ),
    ] = 10.0
    deterministic: Annotated[
        bool, _help("scheduling", "results that do not depend on batch or cache, bit for bit")
    ] = False
    random_seed: Annotated[int, _count("scheduling", "seed of requests that bring none")] = 0

    attention_backend: Annotated[
        str, _help("kernels", "attention kernels", "auto", "cpu", "torch", "flashinfer")
    ] = "auto"
    grammar_backend: Annotated[str, _help("kernels", "structured output", "llguidance", "none")] = (
        "llguidance"
    )
    num_threads: Annotated[
        int, _count("kernels", "compute threads; 0: the physical cores this process may use")
    ] = 0
    calibrate: Annotated[
        bool, _help("kernels", "measure at start what forwards cost, for two seconds")
    ] = True
    tp_size: Annotated[
        int, _count("kernels", "devices that share the model; this version serves from one", 1)
    ] = 1

    enable_metrics: Annotated[bool, _help("service", "serve /metrics for Prometheus")] = True
    sglang_metrics: Annotated[
        bool, _help("service", "also name the most used metrics as SGLang does")
    ] = False
    stream_interval: Annotated[
        int, _count("service", "tokens between two events of a stream", 1)
    ] = 1
    watchdog_timeout: Annotated[
        float,
        Meta(
            description="seconds without a sign of life after which a process is restarted",
            gt=0.0,
            extra={"group": "service", "choices": ()},
        ),
    ] = 300.0
    drain_timeout: Annotated[
        float,
        Meta(
            description="seconds that open requests may still take when the server is stopped",
            ge=0.0,
            extra={"group": "service", "choices": ()},
        ),
    ] = 3.0
    parent_pid: Annotated[
        int, _count("service", "stop when the process with this id has ended; 0: never")
    ] = 0
    log_level: Annotated[
        str, _help("service", "least severe message", "debug", "info", "warning", "error")
    ] = "info"
    log_requests: Annotated[bool, _help("service", "one line for each request")] = False
    log_events: Annotated[
        str, _help("service", "file to append structured events to, as JSON lines; empty: none")
    ] = ""
    audit: Annotated[bool, _help("service", "recount all blocks after every step (slow)")] = False
    audit_rate: Annotated[
        float,
        _share(
            "service", "share of cached pages whose checksum is compared at use; 0: none is kept"
        ),
    ] = 0.0
    patrol_blocks: Annotated[
        int,
        _count(
            "service", "cached blocks compared with their checksums in each idle moment; 0: none"
        ),
    ] = 64


def checked(settings: dict[str, Any]) -> ServerArgs:
    """Build `ServerArgs` from plain values, checking names, types, ranges and choices.

    Raises InvalidRequestError that names the setting, and the nearest one for an unknown name.
    """
    for name in settings:
        if name not in ServerArgs.__struct_fields__:
            near = difflib.get_close_matches(name, ServerArgs.__struct_fields__, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidRequestError(f"unknown setting {name!r}{hint}")
    try:
        args = msgspec.convert(settings, ServerArgs)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"settings: {error}") from error
    for field in msgspec.structs.fields(ServerArgs):
        choices = choices_of(field)
        value = getattr(args, field.name)
        if isinstance(value, float) and math.isinf(value):
            raise InvalidRequestError(f"setting {field.name!r} must be a finite number")
        if choices and value not in choices:
            raise InvalidRequestError(
                f"setting {field.name!r} is {value!r}; it must be one of {', '.join(choices)}"
            )
    if args.tp_size != 1:
        raise InvalidRequestError("setting 'tp_size': this version serves from one device")
    _check_tiers(args)
    return args


def _check_tiers(args: ServerArgs) -> None:
    """Refuse settings of slower tiers that do not go together."""
    _check_disk(args)
    if args.remote_cache:
        try:
            check_url(args.remote_cache)
        except ValueError as error:
            raise InvalidRequestError(f"setting 'remote_cache' is {error}") from error
    elif args.remote_cache_codec != "none":
        raise InvalidRequestError("setting 'remote_cache_codec' is for a 'remote_cache': name one")
    has_tiers = bool(args.host_cache_gb or args.disk_cache_dir or args.remote_cache)
    if has_tiers and args.disable_radix_cache:
        raise InvalidRequestError(
            "setting 'disable_radix_cache' leaves nothing that slower tiers could hold"
        )
    if args.lossy_tiers != "none" and not has_tiers:
        raise InvalidRequestError(
            "setting 'lossy_tiers' says how slower tiers keep state: name one, such as "
            "'host_cache_gb'"
        )
    if args.lossy_tiers != "none" and args.deterministic:
        raise InvalidRequestError(
            "settings 'deterministic' and 'lossy_tiers' exclude each other: what comes back from a "
            "lossy tier is not what left"
        )
    if "auto" in (args.disk_cache_codec, args.remote_cache_codec) and not args.calibrate:
        raise InvalidRequestError(
            "codec 'auto' is measured at start, and setting 'calibrate' says not to measure: "
            "name a codec"
        )
    if args.cache_key_file and not (args.disk_cache_dir or args.remote_cache):
        raise InvalidRequestError(
            "setting 'cache_key_file' encrypts 'disk_cache_dir' and 'remote_cache': name one"
        )


def _check_disk(args: ServerArgs) -> None:
    """Refuse settings of a disk cache that lacks a directory or room."""
    if args.disk_cache_dir:
        if not args.disk_cache_gb:
            raise InvalidRequestError(
                "setting 'disk_cache_dir' names a directory; say with 'disk_cache_gb' how much may "
                "be kept there"
            )
        if args.disk_cache_gb < LEAST_DISK_GB:
            raise InvalidRequestError(
                f"setting 'disk_cache_gb' is {args.disk_cache_gb:g}; less than {LEAST_DISK_GB:g} "
                "holds no prompt of any model"
            )
        return
    for name, default in (
        ("disk_cache_gb", 0.0), ("cache_ttl_hours", 0.0), ("disk_cache_codec", "none"),
    ):  # fmt: skip
        if getattr(args, name) != default:
            raise InvalidRequestError(
                f"setting {name!r} is about a disk cache: name its directory with 'disk_cache_dir'"
            )


def meta_of(field: msgspec.structs.FieldInfo) -> Meta:
    """Return what a field of `ServerArgs` was declared with: description, group, choices."""
    meta: Meta = field.type.__metadata__[0]
    return meta


def choices_of(field: msgspec.structs.FieldInfo) -> tuple[str, ...]:
    """Return the values a field is limited to; empty: any."""
    extra = meta_of(field).extra or {}
    choices: tuple[str, ...] = extra["choices"]
    return choices
