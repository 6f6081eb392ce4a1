// Weights packed for tile registers, and rows of them unpacked.
//
//     [out / 32 panels][in / 32 steps][2 halves][16 pairs of in][16 outputs][2]
//
// One step of one panel is 2 KiB in a row: reading weights is reading memory from front to back.
// Outputs beyond the last are zeros. `in` is a multiple of 32.
#pragma once

#include <stdint.h>

namespace sw {

struct TileParams;

void pack_tiles(const TileParams& p);
void unpack_rows(const TileParams& p);

}  // namespace sw
