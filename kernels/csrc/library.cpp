// The exported functions: choose the instruction set once, find memory, call the kernels.
//
// Operations hold one lock: there is one pool of threads and one workspace. Callers that want two
// models side by side run them in two processes.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <mutex>

#include "abi.h"
#include "coded.h"
#include "isa.h"
#include "library.h"
#include "pool.h"
#include "records.h"
#include "tiles.h"
#include "work.h"

#ifndef SW_SOURCE_DIGEST
#define SW_SOURCE_DIGEST "unknown"
#endif

#define SW_EXPORT extern "C" __attribute__((visibility("default")))

namespace sw {
namespace {

std::mutex g_lock;
const InstructionSet* g_set = nullptr;

void use(const InstructionSet* set) {
  set->kernels->set_use_tiles(set->tiles);
  g_set = set;
}

const Kernels& kernels() {
  if (g_set == nullptr) use(find_instruction_set(""));
  return *g_set->kernels;
}

// Grows, never shrinks; one for the whole library, under its lock.
struct Workspace {
  uint8_t* data = nullptr;
  int64_t size = 0;

  bool reserve(int64_t bytes) {
    if (bytes <= size) return true;
    free(data);
    size = 0;
    data = static_cast<uint8_t*>(aligned_alloc(64, (size_t)((bytes + 4095) / 4096 * 4096)));
    if (data == nullptr) return false;
    size = (bytes + 4095) / 4096 * 4096;
    return true;
  }
};

Workspace g_workspace;

// Every table entry that the step may read or write names a block of the pool.
int check_blocks(AttentionParams& p) {
  if (p.checked_blocks == p.num_blocks) return kOk;
  for (int64_t r = 0; r < p.num_rows; ++r) {
    const int64_t tokens = p.query_starts[r + 1] - p.query_starts[r];
    if (tokens <= 0) continue;
    int64_t lo = p.context_starts[r];
    const int64_t first = p.context_lens[r] - tokens;
    if (p.window > 0 && first - p.window + 1 > lo) lo = first - p.window + 1;
    if (p.write_mask[r] && first < lo) lo = first;
    const int64_t end = (p.context_lens[r] + p.page_size - 1) / p.page_size;
    for (int64_t page = lo / p.page_size; page < end; ++page) {
      const int64_t block = p.page_table[r * p.table_stride + page];
      if (block < 0 || block >= p.num_blocks) {
        p.bad_block = block;
        return kBadBlock;
      }
    }
  }
  p.checked_blocks = p.num_blocks;
  return kOk;
}

}  // namespace

std::mutex& library_lock() { return g_lock; }

const Kernels& chosen_kernels() { return kernels(); }

uint8_t* workspace(int64_t num_bytes) {
  return g_workspace.reserve(num_bytes) ? g_workspace.data : nullptr;
}

int attention(AttentionParams& p) {
  const int status = check_blocks(p);
  if (status != kOk) return status;
  const Kernels& k = kernels();
  const int64_t tile_rows = k.attend_tile_rows(p);
  const AttentionNeeds needs = divide_attention(p, tile_rows, nullptr, nullptr);
  if (needs.items == 0) return kOk;
  AttentionWork work{};
  work.params = &p;
  work.num_items = needs.items;
  work.max_rows = needs.max_rows;
  work.scratch_bytes = round_up(k.attend_scratch_bytes(needs.max_rows, p.head_dim)) + 4096;
  const int64_t items = round_up(needs.items * (int64_t)sizeof(AttentionItem));
  const int64_t counters = round_up(needs.counters * 4);
  const int64_t states = round_up(needs.state_floats * 4);
  const int64_t scratch = work.scratch_bytes * pool_num_threads();
  if (!g_workspace.reserve(items + counters + states + scratch)) return kNoMemory;
  uint8_t* at = g_workspace.data;
  work.items = reinterpret_cast<AttentionItem*>(at);
  work.counters = reinterpret_cast<int32_t*>(at + items);
  work.states = reinterpret_cast<float*>(at + items + counters);
  work.scratch = at + items + counters + states;
  divide_attention(p, tile_rows, work.items, work.counters);
  return k.attend(work);
}

int linear(const LinearParams& p) {
  const Kernels& k = kernels();
  const int64_t bytes = k.linear_workspace_bytes(p);
  if (bytes > 0 && !g_workspace.reserve(bytes)) return kNoMemory;
  return k.linear(p, g_workspace.data);
}

int append(AttentionParams& p) {
  const int status = check_blocks(p);
  return status == kOk ? kernels().append(p) : status;
}

}  // namespace sw

SW_EXPORT int32_t sw_abi_version() { return sw::kAbiVersion; }

SW_EXPORT const char* sw_source_digest() { return SW_SOURCE_DIGEST; }

SW_EXPORT int64_t sw_struct_size(int32_t which) {
  switch (which) {
    case 0: return sizeof(sw::AttentionParams);
    case 1: return sizeof(sw::NormParams);
    case 2: return sizeof(sw::RopeParams);
    case 3: return sizeof(sw::ActParams);
    case 4: return sizeof(sw::LinearParams);
    case 5: return sizeof(sw::DigestParams);
    case 6: return sizeof(sw::TileParams);
    case 7: return sizeof(sw::BlockRowsParams);
    case 8: return sizeof(sw::QuantiseParams);
    case 9: return sizeof(sw::CodedParams);
    case 10: return sizeof(sw::LayerWeights);
    case 11: return sizeof(sw::LayerPool);
    case 12: return sizeof(sw::LayersParams);
    case 13: return sizeof(sw::ReadRecordsParams);
    default: return 0;
  }
}

SW_EXPORT const char* sw_isa() {
  const std::lock_guard<std::mutex> hold(sw::g_lock);
  sw::kernels();
  return sw::g_set->name;
}

// "" chooses the best. Returns 0 where this machine cannot run the one named.
SW_EXPORT int32_t sw_set_isa(const char* name) {
  const std::lock_guard<std::mutex> hold(sw::g_lock);
  const sw::InstructionSet* found = sw::find_instruction_set(name);
  if (found == nullptr) return 0;
  sw::use(found);
  return 1;
}

SW_EXPORT int32_t sw_num_threads() {
  const std::lock_guard<std::mutex> hold(sw::g_lock);
  return sw::pool_num_threads();
}

SW_EXPORT void sw_set_num_threads(int32_t num_threads) {
  const std::lock_guard<std::mutex> hold(sw::g_lock);
  sw::pool_set_num_threads(num_threads);
}

SW_EXPORT void sw_set_spin(int32_t iterations) { sw::pool_set_spin(iterations); }

SW_EXPORT int32_t sw_attention(sw::AttentionParams* p) {
  const std::lock_guard<std::mutex> hold(sw::g_lock);
  return sw::attention(*p);
}

SW_EXPORT int32_t sw_append(sw::AttentionParams* p) {
  const std::lock_guard<std::mutex> hold(sw::g_lock);
  return sw::append(*p);
}

SW_EXPORT int32_t sw_rms_norm(sw::NormParams* p) {
  const std::lock_guard<std::mutex> hold(sw::g_lock);
  return sw::kernels().rms_norm(*p);
}

SW_EXPORT int32_t sw_rope(sw::RopeParams* p) {
  const std::lock_guard<std::mutex> hold(sw::g_lock);
  return sw::kernels().rope(*p);
}

SW_EXPORT int32_t sw_gated_act(sw::ActParams* p) {
  const std::lock_guard<std::mutex> hold(sw::g_lock);
  return sw::kernels().gated_act(*p);
}

SW_EXPORT int32_t sw_linear(sw::LinearParams* p) {
  const std::lock_guard<std::mutex> hold(sw::g_lock);
  return sw::linear(*p);
}

SW_EXPORT int32_t sw_pack_tiles(sw::TileParams* p) {
  const std::lock_guard<std::mutex> hold(sw::g_lock);
  sw::pack_tiles(*p);
  return sw::kOk;
}

SW_EXPORT int32_t sw_unpack_rows(sw::TileParams* p) {
  sw::unpack_rows(*p);
  return sw::kOk;
}

SW_EXPORT int64_t sw_coded_bytes(sw::CodedParams* p) { return sw::coded_bytes(*p); }

SW_EXPORT int32_t sw_pack_codes(sw::CodedParams* p) {
  const std::lock_guard<std::mutex> hold(sw::g_lock);
  sw::pack_codes(*p);
  return sw::kOk;
}

SW_EXPORT int32_t sw_unpack_coded_rows(sw::CodedParams* p) {
  sw::unpack_coded_rows(*p);
  return sw::kOk;
}

SW_EXPORT int32_t sw_digest(sw::DigestParams* p) {
  const std::lock_guard<std::mutex> hold(sw::g_lock);
  sw::kernels().digests(*p);
  return sw::kOk;
}

// The kernels in use, for what takes no threads and no workspace: it runs beside whatever holds the
// lock.
static const sw::Kernels& kernels_unlocked() {
  const std::lock_guard<std::mutex> hold(sw::g_lock);
  return sw::kernels();
}

SW_EXPORT int32_t sw_block_rows(sw::BlockRowsParams* p) {
  kernels_unlocked().block_rows(*p);
  return sw::kOk;
}

SW_EXPORT int32_t sw_read_records(sw::ReadRecordsParams* p) {
  return sw::read_records(*p, kernels_unlocked());
}

SW_EXPORT int32_t sw_quantise(sw::QuantiseParams* p) { return kernels_unlocked().quantise(*p); }
