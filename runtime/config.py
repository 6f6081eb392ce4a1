"""Every setting of a server or engine, in one frozen struct with defaults.

The command line, the config file, `Engine(**kw)` and `Runtime(**kw)` all fill this one struct;
`--help` is generated from it. Sizes that are 0 are chosen at start from the machine.
"""

from __future__ import annotations

import msgspec


class ServerArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one server. Names as in api.md section 2."""

    # model
    model_path: str
    tokenizer_path: str = ""
    served_model_name: str = ""
    chat_template: str = ""
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    kv_cache_dtype: str = "auto"
    context_length: int = 0  # 0: the model's
    load_format: str = "auto"  # auto | hf | gguf
    skip_tokenizer_init: bool = False
    # http
    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str = ""
    admin_api_key: str = ""
    rpc: str = ""
    max_body_bytes: int = 8 << 20
    # memory and scheduling
    page_size: int = 16
    mem_fraction_static: float = 0.25  # share of free memory for block pools
    max_total_tokens: int = 0  # tokens of every history pool; 0: from mem_fraction_static
    max_window_tokens: int = 0  # tokens of every window pool; 0: from the history pool
    max_running_requests: int = 64
    max_queued_requests: int = 4096
    chunked_prefill_size: int = 512  # token budget of one step
    schedule_policy: str = "lpm"  # lpm (longest prefix first) | fcfs
    max_wait_s: float = 10.0  # age after which a request goes first
    watermark: float = 0.02  # share of each pool kept free at admission
    disable_radix_cache: bool = False
    deterministic: bool = False
    checkpoint_interval: int = 4096  # tokens between kept trailing states on long prefills
    random_seed: int = 0
    # kernels
    attention_backend: str = "auto"  # auto | cpu | torch | flashinfer
    grammar_backend: str = "llguidance"
    num_threads: int = 0  # 0: the physical cores this process may use
    tp_size: int = 1
    # service
    enable_metrics: bool = True
    stream_interval: int = 1
    watchdog_timeout: float = 300.0
    log_level: str = "info"
    log_requests: bool = False
    audit: bool = False  # check block conservation after every step (slow)
