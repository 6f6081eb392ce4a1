// The layers of a dense decoder in one call: the operations of the library, one after the other.
//
//     norm -> q, k, v -> norm of heads -> rope -> append -> attention -> output projection
//          -> norm -> gate, up -> activation -> down projection                (next layer)
//
// Nothing is computed here that the single operations do not compute, in the same order and with
// the same parameters: so the results are theirs, bit for bit, and so is what they promise. What
// is saved is the way through the interpreter, ten times a layer. What an operation needs of one
// row alone (norms, rope) takes no thread to wait for.
//
// Each layer holds the library's lock for itself, so that other callers wait for one at most.
#include <mutex>

#include "abi.h"
#include "isa.h"
#include "library.h"

namespace sw {
namespace {

struct Buffers {
  uint8_t *normed, *qkv, *attended, *gate_up, *inner;
};

struct Stack {
  const LayersParams& p;
  const int64_t q_width = p.num_q_heads * p.head_dim;
  const int64_t kv_width = p.num_kv_heads * p.head_dim;
  const int64_t qkv_width = q_width + 2 * kv_width;
  const int64_t size = p.dtype == kF32 ? 4 : 2;

  int64_t place(int64_t width) const { return round_up(p.num_tokens * width * size); }

  int64_t arena_bytes() const {
    return place(p.hidden) + place(qkv_width) + place(q_width) + place(2 * p.inner) +
           place(p.inner);
  }

  Buffers buffers() const {
    Buffers b;
    b.normed = static_cast<uint8_t*>(p.arena);
    b.qkv = b.normed + place(p.hidden);
    b.attended = b.qkv + place(qkv_width);
    b.gate_up = b.attended + place(q_width);
    b.inner = b.gate_up + place(2 * p.inner);
    return b;
  }

  // out = norm(x), or residual += x and out = norm(residual).
  int norm(const void* weight, const void* x, void* residual, void* out) const {
    NormParams n{};
    n.x = x;
    n.residual = n.sum = residual;
    n.weight = weight;
    n.out = out;
    n.rows = p.num_tokens;
    n.dim = n.x_stride = p.hidden;
    n.dtype = n.weight_dtype = p.dtype;
    n.eps = p.eps;
    n.offset = p.offset;
    return chosen_kernels().rms_norm(n);
  }

  // Norms of each token's heads, where they lie.
  int head_norms(const void* weight, uint8_t* first, int64_t num_heads) const {
    if (weight == nullptr) return kOk;
    NormParams n{};
    n.weight = weight;
    n.rows = num_heads;
    n.dim = n.x_stride = p.head_dim;
    n.dtype = n.weight_dtype = p.dtype;
    n.eps = p.eps;
    n.offset = p.offset;
    for (int64_t t = 0; t < p.num_tokens; ++t) {
      n.x = n.out = first + t * qkv_width * size;
      const int status = chosen_kernels().rms_norm(n);
      if (status != kOk) return status;
    }
    return kOk;
  }

  int multiply(const LayerMatrix& m, const void* x, void* out) const {
    LinearParams l{};
    l.x = x;
    l.weight = m.weight;
    l.bias = m.bias;
    l.out = out;
    l.rows = p.num_tokens;
    l.in_dim = l.x_stride = m.in_dim;
    l.out_dim = m.out_dim;
    l.dtype = p.dtype;
    l.packing = m.packing;
    l.code_form = m.code_form;
    return linear(l);
  }

  int rotate(const LayerWeights& w, uint8_t* qkv) const {
    RopeParams r{};
    r.q = qkv;
    r.k = qkv + q_width * size;
    r.cos = w.cos;
    r.sin = w.sin;
    r.positions = p.positions;
    r.num_tokens = p.num_tokens;
    r.num_q_heads = p.num_q_heads;
    r.num_kv_heads = p.num_kv_heads;
    r.head_dim = p.head_dim;
    r.half = w.half;
    r.max_positions = w.max_positions;
    r.q_stride = r.k_stride = qkv_width;
    r.dtype = p.dtype;
    return chosen_kernels().rope(r);
  }

  int attend(const LayerWeights& w, const LayerPool& pool, uint8_t* qkv, void* out) const {
    AttentionParams& a = *p.plans[pool.group];
    a.kv = pool.kv;
    a.num_blocks = pool.num_blocks;
    a.kv_stride = pool.kv_stride;
    a.q = qkv;
    a.k = qkv + q_width * size;
    a.v = qkv + (q_width + kv_width) * size;
    a.q_stride = a.k_stride = a.v_stride = qkv_width;
    a.q_dtype = a.new_dtype = p.dtype;
    a.sinks = w.sinks;
    a.out = out;
    const int status = pool.writes ? append(a) : kOk;
    return status == kOk ? attention(a) : status;
  }

  int activate(const void* gate_up, void* out) const {
    ActParams a{};
    a.gate_up = gate_up;
    a.out = out;
    a.rows = p.num_tokens;
    a.dim = p.inner;
    a.x_stride = 2 * p.inner;
    a.dtype = p.dtype;
    a.kind = p.activation;
    return chosen_kernels().gated_act(a);
  }

  int layer(int64_t i, const Buffers& b) const {
    const LayerWeights& w = p.layers[i];
    int status = i == 0 ? norm(w.input_norm, p.residual, nullptr, b.normed)
                        : norm(w.input_norm, p.out, p.residual, b.normed);
    if (!status) status = multiply(w.qkv, b.normed, b.qkv);
    if (!status) status = head_norms(w.q_norm, b.qkv, p.num_q_heads);
    if (!status) status = head_norms(w.k_norm, b.qkv + q_width * size, p.num_kv_heads);
    if (!status) status = rotate(w, b.qkv);
    if (!status) status = attend(w, p.pools[i], b.qkv, b.attended);
    if (!status) status = multiply(w.output, b.attended, p.out);
    if (!status && w.attention_norm) status = norm(w.attention_norm, p.out, nullptr, p.out);
    if (!status) status = norm(w.mlp_norm, p.out, p.residual, b.normed);
    if (!status) status = multiply(w.gate_up, b.normed, b.gate_up);
    if (!status) status = activate(b.gate_up, b.inner);
    if (!status) status = multiply(w.down, b.inner, p.out);
    if (!status && w.output_norm) status = norm(w.output_norm, p.out, nullptr, p.out);
    return status;
  }
};

int run_layers(LayersParams& p) {
  const Stack stack{p};
  const Buffers buffers = stack.buffers();
  for (int64_t i = 0; i < p.num_layers; ++i) {
    const std::lock_guard<std::mutex> hold(library_lock());
    p.failed_layer = i;
    const int status = stack.layer(i, buffers);
    if (status != kOk) return status;
  }
  if (p.final_norm == nullptr) return kOk;
  const std::lock_guard<std::mutex> hold(library_lock());
  return stack.norm(p.final_norm, p.out, p.residual, p.out);
}

}  // namespace
}  // namespace sw

#define SW_EXPORT extern "C" __attribute__((visibility("default")))

// Bytes that a step of `num_tokens` needs in its arena.
SW_EXPORT int64_t sw_layers_arena(sw::LayersParams* p) { return sw::Stack{*p}.arena_bytes(); }

SW_EXPORT int32_t sw_layers(sw::LayersParams* p) { return sw::run_layers(*p); }
