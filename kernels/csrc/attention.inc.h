// Paged attention with online softmax, straight from the pages: no gather, no packing.
//
// All query heads of a K/V head (and all queries of a tile) share every key and value loaded.
// Keys are taken in blocks of 64: their scores for up to four query rows, one softmax update per
// row, then the weighted values; the next block is prefetched meanwhile. Key j of the sequence is
// always at place j % 64 of a block, and a running softmax covers 512 keys that begin at a multiple
// of 512; such segments are merged in order. So neither where a step begins nor who computes a
// segment moves the arithmetic of a row.
//
// Slots outside [lo, hi) of an item are never loaded: they may hold NaN.

constexpr int kRowGroup = 4;                      // query rows that share a loaded vector
constexpr int kDimGroup = SW_WIDTH == 16 ? 4 : 2;  // value vectors kept in registers

#if SW_WIDTH == 16 && defined(SW_DPBF16)
constexpr bool kHasDot = true;
inline vf dot_pairs(vf acc, const uint16_t* a, const uint16_t* b) {
  const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
  return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)y);
}
#else
constexpr bool kHasDot = false;
inline vf dot_pairs(vf acc, const uint16_t*, const uint16_t*) { return acc; }
#endif

// Memory of one thread, handed out in pieces.
struct Scratch {
  uint8_t* next;
  template <typename T>
  T* take(int64_t count) {
    T* out = reinterpret_cast<T*>(next);
    next += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
    return out;
  }
};

inline void prefetch_row(const void* p, int64_t bytes) {
  const char* c = static_cast<const char*>(p);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(c + i, 0, 3);
}

// Pointers to the keys of one block; values lie a fixed distance behind.
template <typename KV>
struct KeyBlock {
  const typename KV::T* key[kKeyBlock];
  int begin = 0, end = 0;  // valid places
  int64_t start = 0;       // sequence position of place 0
};

template <typename KV>
struct PageReader {
  const AttentionParams& p;
  const typename KV::T* base;
  const int32_t* table;
  int64_t value_offset;

  PageReader(const AttentionParams& params, int64_t row, int64_t kv_head)
      : p(params),
        base(static_cast<const typename KV::T*>(params.kv) +
             kv_head * params.page_size * params.head_dim),
        table(params.page_table + row * params.table_stride),
        value_offset(params.num_kv_heads * params.page_size * params.head_dim) {}

  void locate(int64_t start, int64_t lo, int64_t hi, KeyBlock<KV>& out) const {
    out.start = start;
    out.begin = (int)(most(lo, start) - start);
    out.end = (int)(least(hi, start + kKeyBlock) - start);
    int place = out.begin;
    int64_t page = (start + place) / p.page_size;
    int64_t slot = (start + place) % p.page_size;
    while (place < out.end) {
      const typename KV::T* q = base + table[page] * p.kv_stride + slot * p.head_dim;
      for (; slot < p.page_size && place < out.end; ++slot, ++place, q += p.head_dim) {
        out.key[place] = q;
      }
      slot = 0;
      ++page;
    }
  }
};

// The tile being worked on: rows = (query, head) pairs, row m = query m / group, head m % group.
struct Tile {
  int64_t rows, group, dim, pitch;  // pitch: floats between rows of q and out
  int64_t position;                 // of the tile's first query
  int64_t read_start, window;
  float scale, soft_cap;
  float* q;         // [rows, pitch] float32, zero beyond dim
  uint16_t* q_bf16;  // [rows, dim] or null
  float* out;       // [rows, pitch]
  float* top;       // [rows] maximum so far
  float* sum;       // [rows]

  int64_t visible_end(int64_t m) const { return position + m / group + 1; }
  int64_t visible_begin(int64_t m) const {
    const int64_t at = position + m / group;
    return window > 0 ? most(read_start, at - window + 1) : read_start;
  }
};

// Scores of R rows against one block -> scores[r * kKeyBlock + place].
template <typename KV, int R, bool Dot, bool Whole>
inline void score(const Tile& t, int64_t m0, const KeyBlock<KV>& keys, const KeyBlock<KV>& next,
                  float* scores) {
  const int64_t row_bytes = t.dim * (int64_t)sizeof(typename KV::T);
  for (int j0 = keys.begin / W * W; j0 < keys.end; j0 += W) {
    vf tile[R][W];
    for (int i = 0; i < W; ++i) {
      const int j = j0 + i;
      vf acc[R] = {};
      if (j >= keys.begin && j < keys.end) {
        const typename KV::T* key = keys.key[j];
        if constexpr (Dot) {
          for (int64_t d = 0; d < t.dim; d += 32) {
            for (int r = 0; r < R; ++r) {
              acc[r] = dot_pairs(acc[r], (const uint16_t*)key + d, t.q_bf16 + (m0 + r) * t.dim + d);
            }
          }
        } else {
          for (int64_t d = 0; d < t.dim; d += W) {
            const vf x = Whole ? load<KV>(key + d) : load_of<KV>(key, d, t.dim);
            for (int r = 0; r < R; ++r) acc[r] += x * loadf(t.q + (m0 + r) * t.pitch + d);
          }
        }
        if (m0 == 0 && j < next.end) prefetch_row(next.key[j], row_bytes);
      }
      for (int r = 0; r < R; ++r) tile[r][i] = acc[r];
    }
    for (int r = 0; r < R; ++r) storef(scores + r * kKeyBlock + j0, sums_of<W>(tile[r]));
  }
}

// Scale, cap and mask the scores of row m and turn them into weights; update top, sum and out.
// Works on places [from, to), of which [begin, end) hold keys; the others get weight 0.
inline void soften(const Tile& t, int64_t m, int64_t start, int from, int to, int begin, int end,
                   float* s) {
  const int64_t first = most<int64_t>(begin, t.visible_begin(m) - start);
  const int64_t last = least<int64_t>(end, t.visible_end(m) - start);
  if (first >= last) {
    for (int j = from; j < to; j += W) storef(s + j, vf{});
    return;
  }
  vf lane;
  for (int i = 0; i < W; ++i) lane[i] = (float)i;
  const vf hidden = splat(-__builtin_inff());
  vf block_top = hidden;
  for (int j = from; j < to; j += W) {
    vf x = loadf(s + j) * t.scale;
    if (t.soft_cap > 0) x = t.soft_cap * tanh_of(x / t.soft_cap);
    const vf at = lane + (float)j;
    x = at < (float)first ? hidden : x;
    x = at >= (float)last ? hidden : x;
    storef(s + j, x);
    block_top = max_of(x, block_top);  // this order ignores NaN; the sum keeps it
  }
  const float old_top = t.top[m];
  const float new_top = max_of(old_top, max_in(block_top));
  const float base = new_top == -__builtin_inff() ? 0.0f : new_top;
  vf total = vf{};
  for (int j = from; j < to; j += W) {
    const vf e = exp_of(loadf(s + j) - base);
    storef(s + j, e);
    total += e;
  }
  if (new_top != old_top) {
    const float shrink = exp_of(old_top - base);
    t.sum[m] *= shrink;
    float* out = t.out + m * t.pitch;
    for (int64_t d = 0; d < t.pitch; d += W) storef(out + d, loadf(out + d) * shrink);
  }
  t.top[m] = new_top;
  t.sum[m] += sum_of(total);
}

// out[m0 + r] += weights[r] . values, for N vectors of the head dim from d0.
template <typename KV, int R, int N, bool Whole>
inline void weigh(const Tile& t, int64_t m0, int64_t d0, const KeyBlock<KV>& keys,
                  const KeyBlock<KV>& next, int64_t value_offset, const float* weights) {
  const int64_t row_bytes = t.dim * (int64_t)sizeof(typename KV::T);
  const int fetch_end = m0 == 0 && d0 == 0 ? next.end : 0;
  vf acc[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) acc[r][n] = loadf(t.out + (m0 + r) * t.pitch + d0 + n * W);
  for (int j = keys.begin; j < keys.end; ++j) {
    const typename KV::T* value = keys.key[j] + value_offset;
    if (j < fetch_end) prefetch_row(next.key[j] + value_offset, row_bytes);
    vf x[N];
    for (int n = 0; n < N; ++n) {
      x[n] = Whole ? load<KV>(value + d0 + n * W) : load_of<KV>(value, d0 + n * W, t.dim);
    }
    for (int r = 0; r < R; ++r) {
      const float w = weights[r * kKeyBlock + j];
      for (int n = 0; n < N; ++n) acc[r][n] += w * x[n];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) storef(t.out + (m0 + r) * t.pitch + d0 + n * W, acc[r][n]);
}

template <typename KV, int R, bool Dot, bool Whole>
inline void attend_rows(const Tile& t, int64_t m0, const KeyBlock<KV>& keys,
                        const KeyBlock<KV>& next, int64_t value_offset) {
  float scores[R * kKeyBlock];
  score<KV, R, Dot, Whole>(t, m0, keys, next, scores);
  for (int r = 0; r < R; ++r) {
    soften(t, m0 + r, keys.start, keys.begin / W * W, keys.end, keys.begin, keys.end,
           scores + r * kKeyBlock);
  }
  int64_t d = 0;
  for (; d + kDimGroup * W <= (t.dim + W - 1) / W * W; d += kDimGroup * W) {
    weigh<KV, R, kDimGroup, Whole>(t, m0, d, keys, next, value_offset, scores);
  }
  for (; d < t.dim; d += W) weigh<KV, R, 1, Whole>(t, m0, d, keys, next, value_offset, scores);
}

template <typename KV, bool Dot, bool Whole>
void attend_block(const Tile& t, const KeyBlock<KV>& keys, const KeyBlock<KV>& next,
                  int64_t value_offset) {
  // Odd head dims are rare: one compiled row group serves them.
  constexpr int64_t kGroup = Whole ? kRowGroup : 1;
  for (int64_t m = 0; m < t.rows; m += kGroup) {
    const int64_t rows = least<int64_t>(kGroup, t.rows - m);
    // Rows of a group are in query order: the last sees the furthest, the first the earliest.
    if (t.visible_end(m + rows - 1) <= keys.start + keys.begin) continue;
    if (t.visible_begin(m) >= keys.start + keys.end) continue;
    if constexpr (Whole) {
      switch (rows) {
        case 1: attend_rows<KV, 1, Dot, Whole>(t, m, keys, next, value_offset); break;
        case 2: attend_rows<KV, 2, Dot, Whole>(t, m, keys, next, value_offset); break;
        case 3: attend_rows<KV, 3, Dot, Whole>(t, m, keys, next, value_offset); break;
        default: attend_rows<KV, 4, Dot, Whole>(t, m, keys, next, value_offset); break;
      }
    } else {
      attend_rows<KV, 1, Dot, Whole>(t, m, keys, next, value_offset);
    }
  }
}

template <typename KV, bool Dot, bool Whole>
void attend_keys(const Tile& t, const PageReader<KV>& pages, int64_t lo, int64_t hi) {
  if (lo >= hi) return;
  KeyBlock<KV> blocks[2];
  int64_t start = lo / kKeyBlock * kKeyBlock;
  pages.locate(start, lo, hi, blocks[0]);
  const int64_t row_bytes = t.dim * (int64_t)sizeof(typename KV::T);
  for (int j = blocks[0].begin; j < blocks[0].end; ++j) prefetch_row(blocks[0].key[j], row_bytes);
  for (int j = blocks[0].begin; j < blocks[0].end; ++j)
    prefetch_row(blocks[0].key[j] + pages.value_offset, row_bytes);
  for (int now = 0; start < hi; now ^= 1) {
    start += kKeyBlock;
    KeyBlock<KV>& next = blocks[now ^ 1];
    if (start < hi)
      pages.locate(start, lo, hi, next);
    else
      next.begin = next.end = 0;
    attend_block<KV, Dot, Whole>(t, blocks[now], next, pages.value_offset);
  }
}

// ---- tiles: load queries, merge splits, write out -----------------------------------------------

template <typename Q>
void load_queries_of(const AttentionParams& p, const AttentionItem& item, const Tile& t) {
  const int64_t token = p.query_starts[item.row] + item.first;
  for (int64_t m = 0; m < t.rows; ++m) {
    const typename Q::T* from = static_cast<const typename Q::T*>(p.q) +
                                (token + m / t.group) * p.q_stride +
                                (item.kv_head * t.group + m % t.group) * t.dim;
    for (int64_t d = 0; d < t.pitch; d += W) {
      storef(t.q + m * t.pitch + d, d < t.dim ? load_of<Q>(from, d, t.dim) : vf{});
    }
    if (t.q_bf16 != nullptr) {
      __builtin_memcpy(t.q_bf16 + m * t.dim, from, (size_t)t.dim * 2);
    }
  }
  if (t.q_bf16 != nullptr) {
    const int64_t spare = padded_rows(t.rows) - t.rows;
    __builtin_memset(t.q_bf16 + t.rows * t.dim, 0, (size_t)(spare * t.dim) * 2);
  }
}

inline void load_queries(const AttentionParams& p, const AttentionItem& item, const Tile& t) {
  switch (p.q_dtype) {
    case kF32: load_queries_of<F32>(p, item, t); break;
    case kBF16: load_queries_of<BF16>(p, item, t); break;
    default: load_queries_of<F16>(p, item, t); break;
  }
}

// Row m of the result: out / (sum + exp(sink)), with the sink in the maximum.
template <typename Q>
void write_row(const AttentionParams& p, const AttentionItem& item, const Tile& t, int64_t m) {
  const int64_t token = p.query_starts[item.row] + item.first + m / t.group;
  const int64_t head = item.kv_head * t.group + m % t.group;
  typename Q::T* to =
      static_cast<typename Q::T*>(p.out) + (token * p.num_q_heads + head) * t.dim;
  float sum = t.sum[m];
  float shrink = 1.0f;
  if (p.sinks != nullptr) {
    const float top = max_of(t.top[m], p.sinks[head]);
    shrink = exp_of(t.top[m] - top);
    sum = sum * shrink + exp_of(p.sinks[head] - top);
  }
  const float factor = sum == 0.0f ? 0.0f : shrink / sum;
  for (int64_t d = 0; d < t.dim; d += W) {
    store_of<Q>(to, d, t.dim, loadf(t.out + m * t.pitch + d) * factor);
  }
}

inline void set_state(Tile& t, float* state) {
  t.out = state;
  t.top = state + padded_rows(t.rows) * t.pitch;
  t.sum = t.top + padded_rows(t.rows);
}

inline void clear_state(const Tile& t) {
  for (int64_t i = 0; i < padded_rows(t.rows) * t.pitch; i += W) storef(t.out + i, vf{});
  for (int64_t m = 0; m < padded_rows(t.rows); ++m) {
    t.top[m] = -__builtin_inff();
    t.sum[m] = 0.0f;
  }
}

// Adds the later segment `from` to `into`, row by row. An empty state changes no bit.
inline void merge_state(const Tile& into, const Tile& from) {
  for (int64_t m = 0; m < into.rows; ++m) {
    const float top = max_of(into.top[m], from.top[m]);
    const float base = top == -__builtin_inff() ? 0.0f : top;
    const float a = exp_of(into.top[m] - base), b = exp_of(from.top[m] - base);
    float* x = into.out + m * into.pitch;
    const float* y = from.out + m * from.pitch;
    for (int64_t d = 0; d < into.pitch; d += W) storef(x + d, loadf(x + d) * a + loadf(y + d) * b);
    into.sum[m] = into.sum[m] * a + from.sum[m] * b;
    into.top[m] = top;
  }
}

inline void finish_tile(const AttentionWork& work, const AttentionItem& item, Tile& t) {
  const int64_t size = state_floats(t.rows, t.dim);
  if (item.splits > 1) {
    if (__atomic_sub_fetch(&work.counters[item.counter], 1, __ATOMIC_ACQ_REL) != 0) return;
    float* first = work.states + item.state;
    set_state(t, first);
    for (int64_t split = 1; split < item.splits; ++split) {
      Tile other = t;
      set_state(other, first + split * size);
      merge_state(t, other);
    }
  }
  const AttentionParams& p = *work.params;
  for (int64_t m = 0; m < t.rows; ++m) {
    switch (p.q_dtype) {
      case kF32: write_row<F32>(p, item, t, m); break;
      case kBF16: write_row<BF16>(p, item, t, m); break;
      default: write_row<F16>(p, item, t, m); break;
    }
  }
}
