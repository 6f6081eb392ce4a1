// Runs the items of an attention step: chooses the path per item and the types once.
//
// Direct path: attention.inc.h. Tile path (AMX, bfloat16): attention_amx.inc.h.

inline int64_t attend_scratch_bytes(int64_t max_rows, int64_t dim) {
  const int64_t rows = padded_rows(max_rows), pitch = padded_dim(dim);
  int64_t bytes = rows * pitch * 4 + rows * pitch * 2 + 2 * state_floats(rows, dim) * 4 + 5 * 64;
#ifdef SW_AMX
  bytes += tile_scratch_bytes(pitch);
#endif
  return bytes;
}

inline int64_t attend_tile_rows(const AttentionParams& p) {
#ifdef SW_AMX
  if (fits_tiles(p)) return p.head_dim > 128 ? 128 : 256;  // out and q of a tile stay in L2
#endif
  (void)p;
  return 32;
}

inline Tile make_tile(const AttentionParams& p, const AttentionItem& item) {
  Tile t{};
  t.group = p.num_q_heads / p.num_kv_heads;
  t.rows = item.count * t.group;
  t.dim = p.head_dim;
  t.pitch = padded_dim(p.head_dim);
  t.position = p.context_lens[item.row] -
               (p.query_starts[item.row + 1] - p.query_starts[item.row]) + item.first;
  t.read_start = p.context_starts[item.row];
  t.window = p.window;
  t.scale = p.scale;
  t.soft_cap = p.soft_cap;
  return t;
}

// Attends over keys [lo, hi) of one segment into the state of `t`. The path follows from types and
// sizes alone, so that a row takes the same one in any step.
template <typename KV>
void attend_segment(Tile& t, const PageReader<KV>& pages, int64_t lo, int64_t hi,
                    Scratch scratch) {
  clear_state(t);
  if constexpr (kHasDot && p_same<KV, BF16>::value) {
#ifdef SW_AMX
    if (fits_tiles(pages.p)) return attend_tiles(t, pages, lo, hi, scratch);
#endif
    if (t.q_bf16 != nullptr) return attend_keys<KV, true, true>(t, pages, lo, hi);
  }
  (void)scratch;
  if (t.dim % W == 0)
    attend_keys<KV, false, true>(t, pages, lo, hi);
  else
    attend_keys<KV, false, false>(t, pages, lo, hi);
}

// All segments of an item, merged in order into the first state; `spare` holds the others.
template <typename KV>
void attend_segments(Tile& t, const PageReader<KV>& pages, const AttentionItem& item,
                     float* first, float* spare, const Scratch& scratch) {
  set_state(t, first);
  if (item.lo >= item.hi) return clear_state(t);
  int64_t end = (item.lo / kSegmentKeys + 1) * kSegmentKeys;
  attend_segment(t, pages, item.lo, least<int64_t>(end, item.hi), scratch);
  for (; end < item.hi; end += kSegmentKeys) {
    Tile next = t;
    set_state(next, spare);
    attend_segment(next, pages, end, least<int64_t>(end + kSegmentKeys, item.hi), scratch);
    merge_state(t, next);
  }
}

template <typename KV>
void attend_item(const AttentionWork& work, const AttentionItem& item, int thread) {
  const AttentionParams& p = *work.params;
  const bool dot = kHasDot && p_same<KV, BF16>::value && p.q_dtype == kBF16 && p.head_dim % 32 == 0;
  Scratch scratch{work.scratch + thread * work.scratch_bytes};
  Tile t = make_tile(p, item);
  t.q = scratch.take<float>(t.rows * t.pitch);
  t.q_bf16 = dot ? scratch.take<uint16_t>(padded_rows(t.rows) * t.dim) : nullptr;
  const int64_t size = state_floats(t.rows, t.dim);
  float* own = scratch.take<float>(size);
  float* spare = scratch.take<float>(size);
  load_queries(p, item, t);
  const PageReader<KV> pages(p, item.row, item.kv_head);
  float* first = item.splits > 1 ? work.states + item.state + item.split * size : own;
  attend_segments(t, pages, item, first, spare, scratch);
  finish_tile(work, item, t);
}

template <typename KV>
int attend_all(const AttentionWork& work) {
  parallel_for(work.num_items, [&](int64_t i, int thread) {
    attend_item<KV>(work, work.items[i], thread);
  });
  return kOk;
}

inline int attend(const AttentionWork& work) {
  if (work.params->q_dtype < kF32 || work.params->q_dtype > kF16) return kUnsupported;
  switch (work.params->kv_dtype) {
    case kF32: return attend_all<F32>(work);
    case kBF16: return attend_all<BF16>(work);
    case kF16: return attend_all<F16>(work);
    default: return kUnsupported;
  }
}

// ---- append: new K and V of a step to their slots -----------------------------------------------

template <typename N, typename KV>
void append_token(const AttentionParams& p, int64_t token, int64_t block, int64_t slot) {
  const int64_t head_size = p.page_size * p.head_dim;
  typename KV::T* base = static_cast<typename KV::T*>(p.kv) + block * p.kv_stride;
  for (int64_t part = 0; part < 2; ++part) {
    const typename N::T* from = part == 0
        ? static_cast<const typename N::T*>(p.k) + token * p.k_stride
        : static_cast<const typename N::T*>(p.v) + token * p.v_stride;
    for (int64_t head = 0; head < p.num_kv_heads; ++head) {
      typename KV::T* to = base + (part * p.num_kv_heads + head) * head_size + slot * p.head_dim;
      const typename N::T* x = from + head * p.head_dim;
      if constexpr (p_same<N, KV>::value) {
        __builtin_memcpy(to, x, (size_t)p.head_dim * sizeof(*to));
      } else {
        for (int64_t d = 0; d < p.head_dim; d += W) {
          store_of<KV>(to, d, p.head_dim, load_of<N>(x, d, p.head_dim));
        }
      }
    }
  }
}

template <typename N, typename KV>
int append_all(const AttentionParams& p) {
  for (int64_t row = 0; row < p.num_rows; ++row) {
    if (!p.write_mask[row]) continue;
    const int64_t first = p.query_starts[row], last = p.query_starts[row + 1];
    const int64_t shift = p.context_lens[row] - last;  // position = token + shift
    const int32_t* table = p.page_table + row * p.table_stride;
    for (int64_t token = first; token < last; ++token) {
      const int64_t position = token + shift;
      append_token<N, KV>(p, token, table[position / p.page_size], position % p.page_size);
    }
  }
  return kOk;
}

template <typename N>
int append_kv(const AttentionParams& p) {
  switch (p.kv_dtype) {
    case kF32: return append_all<N, F32>(p);
    case kBF16: return append_all<N, BF16>(p);
    case kF16: return append_all<N, F16>(p);
    default: return kUnsupported;
  }
}

inline int append(const AttentionParams& p) {
  switch (p.new_dtype) {
    case kF32: return append_kv<F32>(p);
    case kBF16: return append_kv<BF16>(p);
    case kF16: return append_kv<F16>(p);
    default: return kUnsupported;
  }
}
