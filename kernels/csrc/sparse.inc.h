// Attention over entries: one key, whose first numbers are its value, serves all heads of a query.
//
// A query's keys are a list: its window, then its visible entries (all, or the selected ones), in
// ascending order. The list and so the arithmetic depend on the query alone, not on the rest of the
// step. An item is one query and up to kHeadGroup heads; keys are taken in blocks of kKeyBlock.
//
// The scoring of index keys is divided into items of a few queries and a run of keys; the
// choice of the best is made outside (top.cpp), where library functions may be called.

constexpr int kHeadGroup = 16;

inline int64_t pitch_of(int64_t dim) { return (dim + W - 1) / W * W; }

// ---- one query's list of keys -------------------------------------------------------------------

template <typename KV>
struct EntryReader {
  const EntryGroup& g;
  const typename KV::T* base;
  const int32_t* table;

  EntryReader(const EntryGroup& group, int64_t row)
      : g(group),
        base(static_cast<const typename KV::T*>(group.pool)),
        table(group.page_table + row * group.table_stride) {}

  const typename KV::T* at(int64_t entry) const {
    const int64_t page = entry / g.entries_per_page;
    return base + table[page] * g.block_stride + (entry - page * g.entries_per_page) * g.dim;
  }
};

struct QueryPlace {
  int64_t token, row, position;
};

// Where token t of the step stands; rows are few, so a scan is enough.
inline QueryPlace place_of(const int32_t* starts, const int32_t* contexts, int64_t token) {
  int64_t row = 0;
  while (starts[row + 1] <= token) ++row;
  return {token, row, contexts[row] - starts[row + 1] + token};
}

// Numbers of keys, and key j of a query's list.
template <typename KV>
struct KeyList {
  const SparseParams& p;
  EntryReader<KV> window, entries;
  const int32_t* selected;
  int64_t first = 0, num_window = 0, num_entries = 0;

  KeyList(const SparseParams& params, const QueryPlace& at)
      : p(params),
        window(params.window, at.row),
        entries(params.entries, at.row),
        selected(nullptr) {
    if (p.window.pool != nullptr) {
      first = p.context_starts[at.row];
      if (p.window.window > 0) first = most(first, at.position - p.window.window + 1);
      num_window = most<int64_t>(0, at.position + 1 - first);
    }
    if (p.entries.pool == nullptr) return;
    num_entries = (at.position + 1) / p.entries.ratio;
    if (p.selected == nullptr) return;
    selected = p.selected + at.token * p.top_k;
    num_entries = 0;
    while (num_entries < p.top_k && selected[num_entries] >= 0) ++num_entries;
  }

  int64_t size() const { return num_window + num_entries; }

  const typename KV::T* key(int64_t j) const {
    if (j < num_window) return window.at(first + j);
    j -= num_window;
    return entries.at(selected == nullptr ? j : selected[j]);
  }
};

// ---- attention ----------------------------------------------------------------------------------

struct SparseTile {
  int64_t heads, dim, value_dim, pitch;
  float scale;
  float* q;       // [heads, pitch], zero beyond dim
  float* out;     // [heads, pitch]
  float* top;     // [heads]
  float* sum;     // [heads]
  float* scores;  // [heads, kKeyBlock]
};

inline int64_t sparse_tile_floats(int64_t dim) {
  return kHeadGroup * (2 * pitch_of(dim) + 2 + kKeyBlock);
}

inline SparseTile sparse_tile(const SparseParams& p, int64_t heads, float* memory) {
  SparseTile t{};
  t.heads = heads;
  t.dim = p.dim;
  t.value_dim = p.value_dim;
  t.pitch = pitch_of(p.dim);
  t.scale = p.scale;
  t.q = memory;
  t.out = t.q + kHeadGroup * t.pitch;
  t.scores = t.out + kHeadGroup * t.pitch;
  t.top = t.scores + kHeadGroup * kKeyBlock;
  t.sum = t.top + kHeadGroup;
  return t;
}

template <typename KV, int R>
inline void sparse_scores(const SparseTile& t, int64_t h0, const typename KV::T* const* keys,
                          int count) {
  for (int j0 = 0; j0 < count; j0 += W) {
    vf tile[R][W];
    for (int i = 0; i < W; ++i) {
      vf acc[R] = {};
      if (j0 + i < count) {
        const typename KV::T* key = keys[j0 + i];
        for (int64_t d = 0; d < t.dim; d += W) {
          const vf x = load_of<KV>(key, d, t.dim);
          for (int r = 0; r < R; ++r) acc[r] += x * loadf(t.q + (h0 + r) * t.pitch + d);
        }
      }
      for (int r = 0; r < R; ++r) tile[r][i] = acc[r];
    }
    for (int r = 0; r < R; ++r) {
      storef(t.scores + (h0 + r) * kKeyBlock + j0, sums_of<W>(tile[r]) * t.scale);
    }
  }
}

// Scores of head h become weights; what was summed before is scaled to the new maximum.
inline void sparse_weights(const SparseTile& t, int64_t h, int count) {
  float* scores = t.scores + h * kKeyBlock;
  float top = t.top[h];
  for (int j = 0; j < count; ++j) top = max_of(scores[j], top);
  const float keep = exp_of(t.top[h] - top);
  float sum = t.sum[h] * keep;
  for (int j0 = 0; j0 < count; j0 += W) {
    const vf weights = exp_of(loadf(scores + j0) - top);
    storef(scores + j0, weights);
    for (int i = 0; i < W && j0 + i < count; ++i) sum += weights[i];
  }
  float* out = t.out + h * t.pitch;
  if (keep != 1.0f) {
    for (int64_t d = 0; d < t.value_dim; d += W) storef(out + d, loadf(out + d) * keep);
  }
  t.top[h] = top;
  t.sum[h] = sum;
}

template <typename KV, int R>
inline void sparse_values(const SparseTile& t, int64_t h0, const typename KV::T* const* keys,
                          int count) {
  for (int64_t d = 0; d < t.value_dim; d += W) {
    vf acc[R];
    for (int r = 0; r < R; ++r) acc[r] = loadf(t.out + (h0 + r) * t.pitch + d);
    for (int j = 0; j < count; ++j) {
      const vf x = load_of<KV>(keys[j], d, t.dim);
      for (int r = 0; r < R; ++r) acc[r] += x * t.scores[(h0 + r) * kKeyBlock + j];
    }
    for (int r = 0; r < R; ++r) storef(t.out + (h0 + r) * t.pitch + d, acc[r]);
  }
}

template <typename KV, int R>
inline void sparse_heads(const SparseTile& t, int64_t h0, const typename KV::T* const* keys,
                         int count) {
  sparse_scores<KV, R>(t, h0, keys, count);
  for (int r = 0; r < R; ++r) sparse_weights(t, h0 + r, count);
  sparse_values<KV, R>(t, h0, keys, count);
}

template <typename Q, typename KV>
void sparse_query(const SparseParams& p, const QueryPlace& at, int64_t head, int64_t heads,
                  float* memory) {
  using T = typename Q::T;
  const SparseTile t = sparse_tile(p, heads, memory);
  const T* q = static_cast<const T*>(p.q) + (at.token * p.num_heads + head) * p.dim;
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t d = 0; d < t.pitch; d += W) {
      storef(t.q + h * t.pitch + d, load_of<Q>(q + h * p.dim, d, p.dim));
      storef(t.out + h * t.pitch + d, vf{});
    }
    t.top[h] = p.sinks == nullptr ? -__builtin_inff() : p.sinks[head + h];
    t.sum[h] = p.sinks == nullptr ? 0.0f : 1.0f;
  }
  const KeyList<KV> list(p, at);
  const typename KV::T* keys[kKeyBlock];
  for (int64_t j0 = 0; j0 < list.size(); j0 += kKeyBlock) {
    const int count = (int)least<int64_t>(kKeyBlock, list.size() - j0);
    for (int j = 0; j < count; ++j) keys[j] = list.key(j0 + j);
    int64_t h = 0;
    for (; h + 4 <= heads; h += 4) sparse_heads<KV, 4>(t, h, keys, count);
    for (; h < heads; ++h) sparse_heads<KV, 1>(t, h, keys, count);
  }
  T* out = static_cast<T*>(p.out) + (at.token * p.num_heads + head) * p.value_dim;
  for (int64_t h = 0; h < heads; ++h) {
    const float scale = t.sum[h] > 0.0f ? 1.0f / t.sum[h] : 0.0f;
    for (int64_t d = 0; d < p.value_dim; d += W) {
      store_of<Q>(out + h * p.value_dim, d, p.value_dim, loadf(t.out + h * t.pitch + d) * scale);
    }
  }
}

template <typename Q, typename KV>
int sparse_all(const SparseParams& p, float* scratch) {
  const int64_t groups = (p.num_heads + kHeadGroup - 1) / kHeadGroup;
  const int64_t floats = sparse_tile_floats(p.dim);
  parallel_for(p.num_tokens * groups, [&](int64_t item, int thread) {
    const int64_t head = item % groups * kHeadGroup;
    const QueryPlace at = place_of(p.query_starts, p.context_lens, item / groups);
    const int64_t heads = least<int64_t>(kHeadGroup, p.num_heads - head);
    sparse_query<Q, KV>(p, at, head, heads, scratch + thread * floats);
  });
  return kOk;
}

template <typename Q>
int sparse_kv(const SparseParams& p, float* scratch) {
  switch (p.kv_dtype) {
    case kF32: return sparse_all<Q, F32>(p, scratch);
    case kBF16: return sparse_all<Q, BF16>(p, scratch);
    case kF16: return sparse_all<Q, F16>(p, scratch);
    default: return kUnsupported;
  }
}

inline int64_t sparse_scratch_floats(int64_t dim) { return sparse_tile_floats(dim); }

inline int sparse_attend(const SparseParams& p, float* scratch) {
  switch (p.q_dtype) {
    case kF32: return sparse_kv<F32>(p, scratch);
    case kBF16: return sparse_kv<BF16>(p, scratch);
    case kF16: return sparse_kv<F16>(p, scratch);
    default: return kUnsupported;
  }
}

// ---- scores of index keys -----------------------------------------------------------------------
//
// A block of keys is turned once, so that a lane holds a key; every head of the item's queries is
// then multiplied with it. What is summed for a pair of query and key, and in which order, depends
// on the two alone.

constexpr int kLanes = 2;                     // vectors of keys in a block
constexpr int kKeysAtOnce = kLanes * W;       // keys in a block
constexpr int kHeadsAtOnce = W == 16 ? 8 : 4;  // as many sums as there are registers for

inline int64_t score_scratch_floats(int64_t heads, int64_t dim) {
  return pitch_of(dim) * (kKeysAtOnce + kScoreQueries * heads);
}

// turned[d * kKeysAtOnce + i] = key[s + i][d]; keys from `last` on are copies of the one before.
template <typename KV>
inline void turn_keys(const EntryReader<KV>& reader, int64_t s, int64_t last, float* turned) {
  const int64_t dim = reader.g.dim;
  for (int lane = 0; lane < kLanes; ++lane) {
    const typename KV::T* keys[W];
    for (int i = 0; i < W; ++i) keys[i] = reader.at(least<int64_t>(s + lane * W + i, last - 1));
    for (int64_t d = 0; d < dim; d += W) {
      vf x[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) x[i] = load_of<KV>(keys[i], d, dim);
      turn<kFolds>(x);
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) storef(turned + (d + i) * kKeysAtOnce + lane * W, x[i]);
    }
  }
}

// total += weight * relu(q . key) over R heads; q [R, pitch], a lane for each key.
template <int R>
inline void add_heads(const float* q, const float* weights, const float* turned, int64_t dim,
                      vf total[kLanes]) {
  const int64_t pitch = pitch_of(dim);
  vf acc[R][kLanes] = {};
  for (int64_t d = 0; d < dim; ++d) {
    vf x[kLanes];
#pragma GCC unroll 2
    for (int c = 0; c < kLanes; ++c) x[c] = loadf(turned + d * kKeysAtOnce + c * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int c = 0; c < kLanes; ++c) acc[r][c] += x[c] * q[r * pitch + d];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < kLanes; ++c) total[c] += max_of(acc[r][c], vf{}) * weights[r];
  }
}

// Scores of one query for the turned keys, `count` of which it sees.
inline void score_keys(const SelectParams& p, const float* q, const float* weights,
                       const float* turned, int64_t count, float* scores) {
  const int64_t dim = p.entries.dim, pitch = pitch_of(dim);
  vf total[kLanes] = {};
  int64_t h = 0;
  for (; h + kHeadsAtOnce <= p.num_heads; h += kHeadsAtOnce) {
    add_heads<kHeadsAtOnce>(q + h * pitch, weights + h, turned, dim, total);
  }
  for (; h < p.num_heads; ++h) add_heads<1>(q + h * pitch, weights + h, turned, dim, total);
  for (int c = 0; c < kLanes && c * W < count; ++c) {
    store_of<F32>(scores, c * W, count, total[c]);
  }
}

// Scores of an item's queries, each for those keys in [first, last) that it sees.
template <typename Q, typename KV>
void index_scores(const SelectParams& p, const ScoreItem& item, float* scores, float* scratch) {
  const EntryReader<KV> reader(p.entries, item.row);
  const int64_t dim = p.entries.dim, pitch = pitch_of(dim), heads = p.num_heads;
  float* turned = scratch;
  float* queries = turned + kKeysAtOnce * pitch;  // [count, heads, pitch]
  for (int64_t t = 0; t < item.count; ++t) {
    const auto* q = static_cast<const typename Q::T*>(p.q) + (item.token + t) * p.q_stride;
    for (int64_t h = 0; h < heads; ++h) {
      float* out = queries + (t * heads + h) * pitch;
      for (int64_t d = 0; d < dim; d += W) storef(out + d, load_of<Q>(q + h * dim, d, dim));
    }
  }
  for (int64_t s = item.first; s < item.last; s += kKeysAtOnce) {
    turn_keys(reader, s, item.last, turned);
    float* row = scores + item.at;
    for (int64_t t = 0; t < item.count; ++t) {
      const int64_t visible = (item.position + t + 1) / p.entries.ratio;
      const int64_t count = least<int64_t>(least(visible, item.last) - s, kKeysAtOnce);
      if (count > 0) {
        score_keys(p, queries + t * heads * pitch, p.weights + (item.token + t) * heads, turned,
                   count, row + s);
      }
      row += visible;
    }
  }
}

template <typename Q, typename KV>
int index_all(const SelectParams& p, const ScoreItem* items, int64_t num_items, float* scores,
              float* scratch) {
  const int64_t floats = score_scratch_floats(p.num_heads, p.entries.dim);
  parallel_for(num_items, [&](int64_t i, int thread) {
    index_scores<Q, KV>(p, items[i], scores, scratch + thread * floats);
  });
  return kOk;
}

template <typename Q>
int index_kv(const SelectParams& p, const ScoreItem* items, int64_t num_items, float* scores,
             float* scratch) {
  switch (p.kv_dtype) {
    case kF32: return index_all<Q, F32>(p, items, num_items, scores, scratch);
    case kBF16: return index_all<Q, BF16>(p, items, num_items, scores, scratch);
    case kF16: return index_all<Q, F16>(p, items, num_items, scores, scratch);
    default: return kUnsupported;
  }
}

inline int score_entries(const SelectParams& p, const ScoreItem* items, int64_t num_items,
                         float* scores, float* scratch) {
  switch (p.q_dtype) {
    case kF32: return index_kv<F32>(p, items, num_items, scores, scratch);
    case kBF16: return index_kv<BF16>(p, items, num_items, scores, scratch);
    case kF16: return index_kv<F16>(p, items, num_items, scores, scratch);
    default: return kUnsupported;
  }
}

// ---- gated sums of windows ----------------------------------------------------------------------

inline void window_sum(const WindowsParams& p, int64_t n) {
  const float* values = p.values + n * p.size * p.dim;
  const float* gates = p.gates + n * p.size * p.dim;
  for (int64_t d = 0; d < p.dim; d += W) {
    vf top = splat(-__builtin_inff());
    for (int64_t j = 0; j < p.size; ++j) {
      top = max_of(load_of<F32>(gates + j * p.dim, d, p.dim), top);
    }
    vf total = vf{}, acc = vf{};
    for (int64_t j = 0; j < p.size; ++j) {
      const vf w = exp_of(load_of<F32>(gates + j * p.dim, d, p.dim) - top);
      total += w;
      acc += w * load_of<F32>(values + j * p.dim, d, p.dim);
    }
    store_of<F32>(p.out + n * p.dim, d, p.dim, acc / total);
  }
}

inline int pool_windows(const WindowsParams& p) {
  over_rows(p.rows, 4 * p.size * p.dim, [&](int64_t first, int64_t last) {
    for (int64_t n = first; n < last; ++n) window_sum(p, n);
  });
  return kOk;
}
