#include "top.h"

#include <string.h>

#include <algorithm>

namespace sw {
namespace {

// Unsigned number that orders as the float does, NaN first.
uint32_t ordered(float x) {
  if (x != x) return 0;
  x += 0.0f;  // -0 and 0 are equal
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

}  // namespace

void choose_top(const float* scores, int64_t n, int64_t k, uint64_t* keys, int32_t* out) {
  const int64_t count = std::min(n, k);
  for (int64_t i = 0; i < n; ++i) {
    // The smallest keys win: high scores first, low places first among equals.
    keys[i] = (uint64_t)~ordered(scores[i]) << 32 | (uint32_t)i;
  }
  if (count < n) std::nth_element(keys, keys + count, keys + n);
  for (int64_t i = 0; i < count; ++i) out[i] = (int32_t)(uint32_t)keys[i];
  std::sort(out, out + count);
  std::fill(out + count, out + k, -1);
}

}  // namespace sw
