// The best of many scores. Compiled once, for any machine: library functions may be used here.
#pragma once

#include <stdint.h>

namespace sw {

// Writes the places of the k highest of n scores in ascending order of place, then -1 up to k.
// Of equal scores the lower place wins; NaN counts as lowest. `keys` has room for n.
void choose_top(const float* scores, int64_t n, int64_t k, uint64_t* keys, int32_t* out);

}  // namespace sw
