// What the exported functions share: one lock, the chosen instruction set, one workspace.
#pragma once

#include <stdint.h>

#include <mutex>

#include "isa.h"

namespace sw {

std::mutex& library_lock();
const Kernels& chosen_kernels();        // under the lock
uint8_t* workspace(int64_t num_bytes);  // under the lock, until the next call; or null

// Under the lock.
int attention(AttentionParams& p);
int append(AttentionParams& p);
int linear(const LinearParams& p);

constexpr int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace sw
