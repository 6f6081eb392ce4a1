// The small operations beside attention: norms, rotary embedding, gated activations, digests.
// Rows are independent and computed whole by one thread, so results do not depend on the others.

constexpr int64_t kInlineElements = 32768;  // less work than this is not worth waking a thread

// body(first, last) over [0, rows) in runs of rows.
template <typename F>
void over_rows(int64_t rows, int64_t elements_per_row, const F& body) {
  const int64_t run = most<int64_t>(1, kInlineElements / 2 / most<int64_t>(1, elements_per_row));
  if (rows <= 2 * run) {
    body((int64_t)0, rows);
    return;
  }
  parallel_for((rows + run - 1) / run, [&](int64_t i, int) {
    body(i * run, least(rows, (i + 1) * run));
  });
}

// ---- rms norm -----------------------------------------------------------------------------------

template <typename X, typename Wt>
void rms_row(const NormParams& p, const typename X::T* x, typename X::T* out) {
  vf squares = vf{};
  for (int64_t d = 0; d < p.dim; d += W) {
    const vf v = load_of<X>(x, d, p.dim);
    squares += v * v;
  }
  const float scale = 1.0f / __builtin_sqrtf(sum_of(squares) / (float)p.dim + p.eps);
  const typename Wt::T* weight = static_cast<const typename Wt::T*>(p.weight);
  for (int64_t d = 0; d < p.dim; d += W) {
    const vf g = load_of<Wt>(weight, d, p.dim) + p.offset;
    store_of<X>(out, d, p.dim, load_of<X>(x, d, p.dim) * scale * g);
  }
}

template <typename X>
void add_row(const NormParams& p, const typename X::T* x, const typename X::T* residual,
             typename X::T* sum) {
  for (int64_t d = 0; d < p.dim; d += W) {
    store_of<X>(sum, d, p.dim, load_of<X>(x, d, p.dim) + load_of<X>(residual, d, p.dim));
  }
}

template <typename X, typename Wt>
int rms_rows(const NormParams& p) {
  using T = typename X::T;
  over_rows(p.rows, p.dim, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const T* x = static_cast<const T*>(p.x) + r * p.x_stride;
      if (p.residual != nullptr) {
        T* sum = static_cast<T*>(p.sum) + r * p.dim;
        add_row<X>(p, x, static_cast<const T*>(p.residual) + r * p.dim, sum);
        x = sum;
      }
      rms_row<X, Wt>(p, x, static_cast<T*>(p.out) + r * p.dim);
    }
  });
  return kOk;
}

template <typename X>
int rms_weight(const NormParams& p) {
  switch (p.weight_dtype) {
    case kF32: return rms_rows<X, F32>(p);
    case kBF16: return rms_rows<X, BF16>(p);
    case kF16: return rms_rows<X, F16>(p);
    default: return kUnsupported;
  }
}

inline int rms_norm(const NormParams& p) {
  switch (p.dtype) {
    case kF32: return rms_weight<F32>(p);
    case kBF16: return rms_weight<BF16>(p);
    case kF16: return rms_weight<F16>(p);
    default: return kUnsupported;
  }
}

// ---- rotary embedding ---------------------------------------------------------------------------

template <typename X>
void rotate_head(typename X::T* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t d = 0; d < half; d += W) {
    const vf a = load_of<X>(x, d, half), b = load_of<X>(x + half, d, half);
    const vf c = load_of<F32>(cos, d, half), s = load_of<F32>(sin, d, half);
    store_of<X>(x, d, half, a * c - b * s);
    store_of<X>(x + half, d, half, b * c + a * s);
  }
}

template <typename X>
int rope_tokens(const RopeParams& p) {
  using T = typename X::T;
  const int64_t per_token = (p.num_q_heads + p.num_kv_heads) * p.head_dim;
  over_rows(p.num_tokens, per_token, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const float* cos = p.cos + p.positions[t] * p.half;
      const float* sin = p.sin + p.positions[t] * p.half;
      T* q = static_cast<T*>(p.q) + t * p.q_stride;
      T* k = static_cast<T*>(p.k) + t * p.k_stride;
      for (int64_t h = 0; h < p.num_q_heads; ++h)
        rotate_head<X>(q + h * p.head_dim, cos, sin, p.half);
      for (int64_t h = 0; h < p.num_kv_heads; ++h)
        rotate_head<X>(k + h * p.head_dim, cos, sin, p.half);
    }
  });
  return kOk;
}

inline int rope(const RopeParams& p) {
  for (int64_t t = 0; t < p.num_tokens; ++t)
    if (p.positions[t] < 0 || p.positions[t] >= p.max_positions) return kBadPosition;
  switch (p.dtype) {
    case kF32: return rope_tokens<F32>(p);
    case kBF16: return rope_tokens<BF16>(p);
    case kF16: return rope_tokens<F16>(p);
    default: return kUnsupported;
  }
}

// ---- gated activations --------------------------------------------------------------------------

inline vf activate(vf x, int32_t kind) {
  if (kind == kSilu) return x * sigmoid_of(x);
  // gelu, tanh form: x * (1 + tanh(u)) / 2 = x * sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3)
  const vf u2 = 1.5957691216057308f * (x + 0.044715f * x * x * x);
  return x * sigmoid_of(u2);
}

template <typename X>
int gate_rows(const ActParams& p) {
  using T = typename X::T;
  over_rows(p.rows, 2 * p.dim, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const T* gate = static_cast<const T*>(p.gate_up) + r * p.x_stride;
      T* out = static_cast<T*>(p.out) + r * p.dim;
      for (int64_t d = 0; d < p.dim; d += W) {
        const vf g = activate(load_of<X>(gate, d, p.dim), p.kind);
        store_of<X>(out, d, p.dim, g * load_of<X>(gate + p.dim, d, p.dim));
      }
    }
  });
  return kOk;
}

inline int gated_act(const ActParams& p) {
  switch (p.dtype) {
    case kF32: return gate_rows<F32>(p);
    case kBF16: return gate_rows<BF16>(p);
    case kF16: return gate_rows<F16>(p);
    default: return kUnsupported;
  }
}

// ---- digests ------------------------------------------------------------------------------------
//
// digest(words) = mix(size + sum over i of mix(word[i] ^ key(i))), key(i) = (i + 1) * golden.
// `mix` is a bijection: a change confined to one word always changes the sum.

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;
constexpr uint64_t kMixA = 0xbf58476d1ce4e5b9ull;
constexpr uint64_t kMixB = 0x94d049bb133111ebull;

template <typename U>
inline U mix(U x) {
  x = (x ^ (x >> 32)) * kMixA;
  x = (x ^ (x >> 29)) * kMixB;
  return x ^ (x >> 32);
}

constexpr int64_t kCopyFetchBytes = 2048;  // a copy reads this far ahead

// Eight words to memory; past the caches where the instruction set can and the place allows it.
template <typename V>
inline void put_words(uint8_t* to, const V& x, bool past_caches) {
#if SW_WIDTH >= 16
  if (past_caches) {
    _mm512_stream_si512((__m512i*)to, (__m512i)x);
    return;
  }
#endif
  (void)past_caches;
  __builtin_memcpy(to, &x, sizeof x);
}

// A line of memory leaves this core's caches for the one that all share, where the instruction set
// has that; elsewhere it is no operation.
inline void demote_line(const void* p) {
#if SW_WIDTH >= 16
  asm volatile(".byte 0x0f, 0x1c, 0x00" : : "a"(p));  // cldemote (%rax)
#else
  (void)p;
#endif
}

// Digest of the `bytes` at `p`, which are copied to `to` on the way: the very words that were read.
// A copy is not read again soon, so it does not pass through the caches: a third less traffic. With
// `hand_back` the lines that were read leave this core's caches as well.
template <bool kCopies>
inline uint64_t digest(const uint8_t* p, int64_t bytes, uint8_t* to, bool hand_back = false) {
  constexpr int kLanes = 8;
  typedef uint64_t vq __attribute__((vector_size(8 * kLanes)));
  vq key, total = {};
  for (int i = 0; i < kLanes; ++i) key[i] = (uint64_t)(i + 1) * kGolden;
  const bool past_caches = kCopies && (uintptr_t)to % 64 == 0;
  int64_t at = 0;
  for (; at + 8 * kLanes <= bytes; at += 8 * kLanes) {
    vq x;
    if (kCopies) __builtin_prefetch(p + at + kCopyFetchBytes);
    __builtin_memcpy(&x, p + at, sizeof x);
    if (kCopies) put_words(to + at, x, past_caches);
    if (kCopies && hand_back) demote_line(p + at);
    total += mix(x ^ key);
    key += kGolden * kLanes;
  }
  uint64_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += total[i];
  for (; at < bytes; at += 8) {
    const int64_t left = least<int64_t>(8, bytes - at);
    uint64_t x = 0;
    for (int64_t i = 0; i < left; ++i) x |= (uint64_t)p[at + i] << (8 * i);
    if (kCopies) {
      for (int64_t i = 0; i < left; ++i) to[at + i] = (uint8_t)(x >> (8 * i));
    }
    sum += mix(x ^ ((uint64_t)(at / 8 + 1) * kGolden));
  }
  return mix(sum + (uint64_t)bytes);
}

// On the calling thread alone: copies run beside a step, and must not take its threads.
inline void block_rows(const BlockRowsParams& p) {
  const bool hand_back = p.direction == kToBlocksAndHandBack;
  for (int64_t i = 0; i < p.num_blocks; ++i) {
    for (int64_t layer = 0; layer < p.num_layers; ++layer) {
      uint8_t* block = p.layers[layer] + p.blocks[i] * p.block_stride;
      uint8_t* row = p.rows[i] + layer * p.layer_bytes;
      uint8_t* to = p.direction == kToRows ? row : block;
      const uint8_t* from = p.direction == kToRows ? block : row;
      p.out[i * p.num_layers + layer] = digest<true>(from, p.layer_bytes, to, hand_back);
    }
  }
#if SW_WIDTH >= 16
  _mm_sfence();  // whoever is told of the copy sees it whole
#endif
}

inline void digests(const DigestParams& p) {
  over_rows(p.num_blocks, p.block_bytes / 4, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const uint8_t* block = p.base + p.blocks[i] * p.block_stride;
      p.out[i] = digest<false>(block, p.block_bytes, nullptr);
    }
  });
}
