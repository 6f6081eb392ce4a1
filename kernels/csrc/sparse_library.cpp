// The exported functions of sparse attention and of recurrent layers.
//
// Every page-table entry that a step reads is checked before any kernel runs. Scoring is divided
// into slabs of queries whose scores fit the workspace; each query's best are chosen in its slab.
#include <stdint.h>

#include <algorithm>

#include "abi.h"
#include "isa.h"
#include "library.h"
#include "pool.h"
#include "top.h"

#define SW_EXPORT extern "C" __attribute__((visibility("default")))

namespace sw {
namespace {

constexpr int64_t kSlabScores = 4 << 20;  // scores of one slab of queries (at least of one item)
constexpr int64_t kItemKeys = 512;        // keys of one item of scoring

struct RowRange {
  int64_t first, start, end;  // first packed token; positions of the first and behind the last
};

RowRange row_range(const int32_t* query_starts, const int32_t* context_lens, int64_t r) {
  const int64_t tokens = query_starts[r + 1] - query_starts[r];
  return {query_starts[r], context_lens[r] - tokens, context_lens[r]};
}

// Pages of entries [lo, hi) of a row name blocks of the pool.
bool blocks_exist(const EntryGroup& g, int64_t row, int64_t lo, int64_t hi, int64_t* bad_block) {
  for (int64_t page = lo / g.entries_per_page; page * g.entries_per_page < hi; ++page) {
    const int64_t block = g.page_table[row * g.table_stride + page];
    if (block < 0 || block >= g.num_blocks) {
      *bad_block = block;
      return false;
    }
  }
  return true;
}

int check(SparseParams& p) {
  for (int64_t r = 0; r < p.num_rows; ++r) {
    const RowRange row = row_range(p.query_starts, p.context_lens, r);
    if (row.start >= row.end) continue;
    if (p.window.pool != nullptr) {
      int64_t lo = p.context_starts[r];
      if (p.window.window > 0) lo = std::max(lo, row.start - p.window.window + 1);
      if (!blocks_exist(p.window, r, lo, row.end, &p.bad_block)) return kBadBlock;
    }
    if (p.entries.pool != nullptr) {
      const int64_t visible = row.end / p.entries.ratio;
      if (!blocks_exist(p.entries, r, 0, visible, &p.bad_block)) return kBadBlock;
    }
  }
  return kOk;
}

int attend(SparseParams& p) {
  const int status = check(p);
  if (status != kOk || p.num_tokens == 0) return status;
  const Kernels& k = chosen_kernels();
  uint8_t* memory = workspace(k.sparse_scratch_floats(p.dim) * 4 * pool_num_threads());
  if (memory == nullptr) return kNoMemory;
  return k.sparse_attend(p, reinterpret_cast<float*>(memory));
}

// One query of a slab: where its scores lie.
struct Query {
  int64_t token, visible, at;
};

// Where a selection keeps what it computes; room for the scores of one slab.
struct SelectSpace {
  Query* queries;
  ScoreItem* items;
  float* scores;
  uint64_t* keys;
  float* scratch;  // per thread
};

// Queries of a step whose scores fit the workspace, and the items of their scoring.
struct Slab {
  SelectSpace space;
  int64_t num_queries = 0, num_items = 0, num_scores = 0;

  // Adds a row's `count` queries from `token`, at `position`, on.
  void add(int64_t row, int64_t token, int64_t position, int64_t count, int64_t ratio) {
    const int64_t at = num_scores;
    for (int64_t t = 0; t < count; ++t) {
      const int64_t visible = (position + t + 1) / ratio;
      space.queries[num_queries++] = {token + t, visible, num_scores};
      num_scores += visible;
    }
    const int64_t visible = (position + count) / ratio;
    for (int64_t s = 0; s < visible; s += kItemKeys) {
      const int64_t last = std::min(visible, s + kItemKeys);
      space.items[num_items++] = {token, row, position, count, s, last, at};
    }
  }

  int run(const SelectParams& p) const {
    const Kernels& k = chosen_kernels();
    const int status = k.score_entries(p, space.items, num_items, space.scores, space.scratch);
    if (status != kOk) return status;
    parallel_for(num_queries, [&](int64_t i, int) {
      const Query& q = space.queries[i];
      choose_top(space.scores + q.at, q.visible, p.top_k, space.keys + q.at,
                 p.out + q.token * p.top_k);
    });
    return kOk;
  }
};

// Space for slabs of `room` scores; false if there is no memory.
bool select_space(const SelectParams& p, int64_t room, SelectSpace* space) {
  const int64_t query_bytes = round_up(p.num_tokens * (int64_t)sizeof(Query));
  const int64_t num_items = p.num_tokens + room / kItemKeys + 1;
  const int64_t item_bytes = round_up(num_items * (int64_t)sizeof(ScoreItem));
  const int64_t score_bytes = round_up(room * 4), key_bytes = round_up(room * 8);
  const int64_t floats = chosen_kernels().score_scratch_floats(p.num_heads, p.entries.dim);
  const int64_t scratch_bytes = floats * 4 * pool_num_threads();
  uint8_t* at = workspace(query_bytes + item_bytes + score_bytes + key_bytes + scratch_bytes);
  if (at == nullptr) return false;
  space->queries = reinterpret_cast<Query*>(at);
  space->items = reinterpret_cast<ScoreItem*>(at += query_bytes);
  space->scores = reinterpret_cast<float*>(at += item_bytes);
  space->keys = reinterpret_cast<uint64_t*>(at += score_bytes);
  space->scratch = reinterpret_cast<float*>(at += key_bytes);
  return true;
}

int select(SelectParams& p) {
  int64_t longest = 0;
  for (int64_t r = 0; r < p.num_rows; ++r) {
    const RowRange row = row_range(p.query_starts, p.context_lens, r);
    if (row.start >= row.end) continue;
    const int64_t visible = row.end / p.entries.ratio;
    if (!blocks_exist(p.entries, r, 0, visible, &p.bad_block)) return kBadBlock;
    longest = std::max(longest, visible);
  }
  const int64_t room = std::max(kSlabScores, longest * kScoreQueries);
  SelectSpace space{};
  if (!select_space(p, room, &space)) return kNoMemory;
  Slab slab{space};
  for (int64_t r = 0; r < p.num_rows; ++r) {
    const RowRange row = row_range(p.query_starts, p.context_lens, r);
    for (int64_t at = row.start; at < row.end; at += kScoreQueries) {
      const int64_t count = std::min(kScoreQueries, row.end - at);
      const int64_t most = count * ((at + count) / p.entries.ratio);
      if (slab.num_queries > 0 && slab.num_scores + most > room) {
        const int status = slab.run(p);
        if (status != kOk) return status;
        slab = Slab{space};
      }
      slab.add(r, row.first + at - row.start, at, count, p.entries.ratio);
    }
  }
  return slab.run(p);
}

int delta_rule(const DeltaParams& p) {
  const Kernels& k = chosen_kernels();
  uint8_t* memory = workspace(k.delta_scratch_floats(p.key_dim) * 4 * pool_num_threads());
  if (memory == nullptr) return kNoMemory;
  return k.delta_rule(p, reinterpret_cast<float*>(memory));
}

}  // namespace
}  // namespace sw

SW_EXPORT int64_t sw_sparse_struct_size(int32_t which) {
  switch (which) {
    case 0: return sizeof(sw::EntryGroup);
    case 1: return sizeof(sw::SparseParams);
    case 2: return sizeof(sw::SelectParams);
    case 3: return sizeof(sw::WindowsParams);
    case 4: return sizeof(sw::DeltaParams);
    case 5: return sizeof(sw::ConvParams);
    case 6: return sizeof(sw::SinkhornParams);
    default: return 0;
  }
}

SW_EXPORT int32_t sw_sparse_attend(sw::SparseParams* p) {
  const std::lock_guard<std::mutex> hold(sw::library_lock());
  return sw::attend(*p);
}

SW_EXPORT int32_t sw_select(sw::SelectParams* p) {
  const std::lock_guard<std::mutex> hold(sw::library_lock());
  return sw::select(*p);
}

SW_EXPORT int32_t sw_pool_windows(sw::WindowsParams* p) {
  const std::lock_guard<std::mutex> hold(sw::library_lock());
  return sw::chosen_kernels().pool_windows(*p);
}

SW_EXPORT int32_t sw_delta_rule(sw::DeltaParams* p) {
  const std::lock_guard<std::mutex> hold(sw::library_lock());
  return sw::delta_rule(*p);
}

SW_EXPORT int32_t sw_causal_conv(sw::ConvParams* p) {
  const std::lock_guard<std::mutex> hold(sw::library_lock());
  return sw::chosen_kernels().causal_conv(*p);
}

SW_EXPORT int32_t sw_sinkhorn(sw::SinkhornParams* p) {
  const std::lock_guard<std::mutex> hold(sw::library_lock());
  return sw::chosen_kernels().sinkhorn(*p);
}
