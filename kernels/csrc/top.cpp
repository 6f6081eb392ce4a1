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
  // The smallest keys win: high scores first, low places first among equals. All differ.
  const auto key_of = [&](int64_t i) { return (uint64_t)~ordered(scores[i]) << 32 | (uint32_t)i; };
  const int64_t count = std::min(n, k);
  uint64_t last = ~(uint64_t)0;
  if (0 < count && count < n) {
    for (int64_t i = 0; i < n; ++i) keys[i] = key_of(i);
    std::nth_element(keys, keys + count - 1, keys + n);
    last = keys[count - 1];
  }
  int64_t at = 0;
  for (int64_t i = 0; at < count; ++i) {
    if (key_of(i) <= last) out[at++] = (int32_t)i;
  }
  std::fill(out + count, out + k, -1);
}

}  // namespace sw
