// See tiles.h. Numbers move in pairs of 16 bits.
#include "tiles.h"

#include <string.h>

#include "abi.h"
#include "pool.h"

namespace sw {
namespace {

constexpr int64_t kPanelOutputs = 32, kStepPairs = 16;

// Pairs before output `out`; pair i of it lies at step i / 16, place i % 16.
int64_t place_of_output(int64_t out, int64_t pairs) {
  const int64_t half = out % kPanelOutputs / 16;
  return out / kPanelOutputs * kPanelOutputs * pairs + half * 256 + out % 16;
}

int64_t place_of_pair(int64_t i) { return i / kStepPairs * 512 + i % kStepPairs * 16; }

}  // namespace

void pack_tiles(const TileParams& p) {
  const int64_t pairs = p.in_dim / 2;
  const int64_t panels = (p.out_dim + kPanelOutputs - 1) / kPanelOutputs;
  const uint32_t* weight = static_cast<const uint32_t*>(p.weight);
  uint32_t* tiles = static_cast<uint32_t*>(p.tiles);
  parallel_for(panels, [&](int64_t panel, int) {
    for (int64_t n = panel * kPanelOutputs; n < (panel + 1) * kPanelOutputs; ++n) {
      uint32_t* to = tiles + place_of_output(n, pairs);
      const uint32_t* from = weight + n * pairs;
      const bool there = n < p.out_dim;
      for (int64_t i = 0; i < pairs; ++i) to[place_of_pair(i)] = there ? from[i] : 0;
    }
  });
}

void unpack_rows(const TileParams& p) {
  const int64_t pairs = p.in_dim / 2;
  const uint32_t* tiles = static_cast<const uint32_t*>(p.tiles);
  uint32_t* out = static_cast<uint32_t*>(p.out);
  for (int64_t r = 0; r < p.num_rows; ++r) {
    const uint32_t* from = tiles + place_of_output(p.rows[r], pairs);
    for (int64_t i = 0; i < pairs; ++i) out[r * pairs + i] = from[place_of_pair(i)];
  }
}

}  // namespace sw
