// See work.h.
#include "work.h"

namespace sw {
namespace {

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Divider {
  const AttentionParams& p;
  AttentionItem* items;
  int32_t* counters;
  AttentionNeeds needs;

  void tile(int row, int64_t first, int64_t count, bool may_split) {
    const int64_t group = p.num_q_heads / p.num_kv_heads;
    const int64_t tokens = p.query_starts[row + 1] - p.query_starts[row];
    const int64_t position = p.context_lens[row] - tokens + first;
    int64_t lo = p.context_starts[row];
    if (p.window > 0) lo = most(lo, position - p.window + 1);
    const int64_t hi = position + count;
    const int64_t base = lo / kSegmentKeys * kSegmentKeys;
    const int64_t step = may_split ? kSegmentKeys : most(hi - base, 1);
    const int64_t splits = ceil_div(most(hi - base, 1), step);
    const int64_t rows = count * group;
    needs.max_rows = most(needs.max_rows, rows);
    for (int64_t head = 0; head < p.num_kv_heads; ++head) {
      if (items != nullptr && splits > 1) counters[needs.counters] = (int32_t)splits;
      for (int64_t split = 0; split < splits; ++split) {
        if (items == nullptr) continue;
        AttentionItem& item = items[needs.items + split];
        item.row = row;
        item.kv_head = (int32_t)head;
        item.first = (int32_t)first;
        item.count = (int32_t)count;
        item.lo = (int32_t)most(lo, base + split * step);
        item.hi = (int32_t)least(hi, base + (split + 1) * step);
        item.split = (int32_t)split;
        item.splits = (int32_t)splits;
        item.state = needs.state_floats;
        item.counter = needs.counters;
      }
      needs.items += splits;
      if (splits > 1) {
        needs.counters += 1;
        needs.state_floats += splits * state_floats(rows, p.head_dim);
      }
    }
  }

  void row(int r, int64_t tile_rows) {
    const int64_t tokens = p.query_starts[r + 1] - p.query_starts[r];
    if (tokens <= 0) return;
    const int64_t group = p.num_q_heads / p.num_kv_heads;
    int64_t tile_tokens = tokens;
    if (tokens * group > kSmallRows) tile_tokens = most(1, tile_rows / group);
    const int64_t tiles = ceil_div(tokens, tile_tokens);
    tile_tokens = ceil_div(tokens, tiles);
    // The last tiles read the most keys: they go first, so that none starts late.
    for (int64_t t = tiles - 1; t >= 0; --t) {
      const int64_t first = t * tile_tokens;
      tile(r, first, least(tile_tokens, tokens - first), tiles < kSplitTiles);
    }
  }
};

}  // namespace

AttentionNeeds divide_attention(const AttentionParams& p, int64_t tile_rows, AttentionItem* items,
                                int32_t* counters) {
  Divider divider{p, items, counters, {}};
  for (int64_t r = 0; r < p.num_rows; ++r) divider.row((int)r, tile_rows);
  return divider.needs;
}

}  // namespace sw
