// How the attention of one step is divided into items. Independent of the instruction set.
//
// An item is one row's run of queries ("tile"), one K/V head, and one range of keys: all that the
// tile sees, or one segment of them. Segments begin at multiples of 512 keys of the sequence, each
// has a running softmax of its own, and they are merged in order, by the item that covers them all
// or by whichever of several ends last. So a query's result is bitwise the same however its context
// was cut into steps, in any batch, and on any number of threads.
#pragma once

#include <stdint.h>

#include "abi.h"

namespace sw {

constexpr int kKeyBlock = 64;      // keys scored at once; begin at multiples of it
constexpr int kSegmentKeys = 512;  // keys with one running softmax; begin at multiples of it
constexpr int kSmallRows = 32;     // a row with at most this many (query, head) pairs is one tile
constexpr int kSplitTiles = 4;     // segments of a row of fewer tiles are items of their own

struct AttentionItem {
  int32_t row;
  int32_t kv_head;
  int32_t first;    // first query of the tile, counted in the row
  int32_t count;    // queries in the tile
  int32_t lo, hi;   // keys of this item: one segment of several, or all keys of the tile
  int32_t split;    // index of this segment
  int32_t splits;   // items of the tile; 1: it merges its segments itself
  int64_t state;    // where the tile's split states begin in `states` (floats)
  int64_t counter;  // index of the tile's countdown in `counters`
};

// Floats of one tile state: output [rows, padded dim], then maximum and sum [rows]. There is room
// for whole groups of 16 rows, which tile registers write together.
constexpr int64_t padded_dim(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }
constexpr int64_t padded_rows(int64_t rows) { return (rows + 15) / 16 * 16; }
constexpr int64_t state_floats(int64_t rows, int64_t head_dim) {
  return padded_rows(rows) * (padded_dim(head_dim) + 2);
}

struct AttentionWork {
  const AttentionParams* params;
  AttentionItem* items;
  int64_t num_items;
  float* states;       // states of split tiles
  int32_t* counters;   // one per split tile, = its number of splits
  uint8_t* scratch;    // per thread
  int64_t scratch_bytes;
  int64_t max_rows;    // (query, head) pairs of the largest tile
};

struct AttentionNeeds {
  int64_t items = 0;
  int64_t state_floats = 0;
  int64_t counters = 0;
  int64_t max_rows = 0;
};

// Visits every item in order; the sizes first (items == null), then the items themselves.
AttentionNeeds divide_attention(const AttentionParams& p, int64_t tile_rows, AttentionItem* items,
                                int32_t* counters);

}  // namespace sw
