"""GGUF metadata and tensor names in Hugging Face's terms: one meaning of config and names.

    gguf arch   architecture              what differs in the file
    llama       LlamaForCausalLM          rows of q and k permuted (rotary pairs interleaved)
    qwen2/3     Qwen2/Qwen3ForCausalLM    -
    gemma3      Gemma3ForCausalLM         norm weights stored with the 1 added

Mistral files say "llama" (their window is not recorded and was not used by the tools that read
them). Sources: the GGUF specification and llama.cpp's conversion scripts.

This module does not read tensors' bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from statewise.runtime.models.gguf_file import GgufFile

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
PERMUTED_ARCHITECTURES = ("llama", "mistral")
GEMMA3_27B_LAYERS = 62  # its attention scale is by d / heads; all other sizes use the head dim

SHARED_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LLAMA_LAYER_TENSORS = SHARED_LAYER_TENSORS | {"ffn_norm": "post_attention_layernorm"}
GEMMA3_LAYER_TENSORS = SHARED_LAYER_TENSORS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
WHOLE_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
ROPE_DIVISORS = "rope_freqs.weight"  # not a weight: part of the config
END_OF_TURN_TEXTS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eom_id|>")
CONTROL_TOKEN = 3  # tokenizer.ggml.token_type


def gguf_architecture(file: GgufFile) -> str:
    """GGUF name of the file's architecture; ModelLoadError where it is missing or unknown."""
    name = file.text("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise file.fail(f"architecture {name!r} is not supported; known GGUF names: {known}")
    if (file.integer("split.count") or 1) > 1:
        raise file.fail("one part of a split model; join the parts with gguf-split first")
    return str(name)


def hf_tensor_name(arch: str, name: str) -> str | None:
    """Hugging Face name of a GGUF tensor; None for one that is not a weight, or not known."""
    stem, _, suffix = name.rpartition(".")
    if stem in WHOLE_TENSORS:
        return f"{WHOLE_TENSORS[stem]}.{suffix}"
    parts = stem.split(".")
    tensors = GEMMA3_LAYER_TENSORS if arch == "gemma3" else LLAMA_LAYER_TENSORS
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in tensors:
        return f"model.layers.{parts[1]}.{tensors[parts[2]]}.{suffix}"
    return None


def hf_config(file: GgufFile, divisors: Callable[[], tuple[float, ...]]) -> dict[str, Any]:
    """Write a file's metadata as config.json says it; `divisors` reads the rope divisors."""
    arch = gguf_architecture(file)
    read = _Metadata(file, arch)
    heads, hidden = read("attention.head_count"), read("embedding_length")
    head_dim = read("attention.key_length", hidden // heads)
    if read("attention.value_length", head_dim) != head_dim:
        raise file.fail(f"'{arch}.attention.value_length' differs from the key length")
    if read("rope.dimension_count", head_dim) != head_dim:
        raise file.fail(f"'{arch}.rope.dimension_count' differs from the head dimension")
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "hidden_size": hidden,
        "num_hidden_layers": read("block_count"),
        "intermediate_size": read("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": read("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": read("context_length"),
        "rms_norm_eps": read("attention.layer_norm_rms_epsilon"),
        "rope_theta": read("rope.freq_base", 10_000.0),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors and arch != "qwen2",
    }
    config["rope_scaling"] = _rope_scaling(file, read, divisors)
    if arch == "gemma3":
        config |= _gemma3_entries(read, config)
    return config


def token_ids(file: GgufFile) -> tuple[int | None, tuple[int, ...]]:
    """(beginning of text, ids that end a generation): end of text, end of turn."""
    ends = [
        file.integer(f"tokenizer.ggml.{key}")
        for key in ("eos_token_id", "eot_token_id", "eom_token_id")
    ]
    texts = file.strings("tokenizer.ggml.tokens") or []
    types = file.numbers("tokenizer.ggml.token_type", len(texts))
    if types is not None:
        controls = {texts[i]: i for i in (types == CONTROL_TOKEN).nonzero()[0].tolist()}
        ends += [controls.get(text) for text in END_OF_TURN_TEXTS]
    return file.integer("tokenizer.ggml.bos_token_id"), tuple(
        dict.fromkeys(i for i in ends if i is not None)
    )


class _Metadata:
    """Numbers under the architecture's prefix; ModelLoadError where one is missing."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self.file = file
        self.arch = arch

    def __call__(self, key: str, default: Any = None) -> Any:
        value = self.file.get(f"{self.arch}.{key}", default)
        if value is None:
            raise self.file.fail(f"metadata '{self.arch}.{key}' is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.file.fail(f"metadata '{self.arch}.{key}' must be a number")
        return value


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise file.fail("tensor 'token_embd.weight' is missing or not a matrix")
    return embedding.shape[0]


def _rope_scaling(
    file: GgufFile, read: _Metadata, divisors: Callable[[], tuple[float, ...]]
) -> dict[str, Any] | None:
    if ROPE_DIVISORS in file.tensors:
        return {"rope_type": "divisors", "divisors": divisors()}
    kind = file.text(f"{read.arch}.rope.scaling.type") or "none"
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": read("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = read("rope.scaling.original_context_length")
    return scaling


def _gemma3_entries(read: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    is_27b = config["num_hidden_layers"] == GEMMA3_27B_LAYERS
    scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        "sliding_window": read("attention.sliding_window"),
        "sliding_window_pattern": read("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": read("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": scalar if is_27b else config["head_dim"],
        "final_logit_softcapping": read("final_logit_softcapping", 0.0),
        "attn_logit_softcapping": read("attn_logit_softcapping", 0.0),
    }
