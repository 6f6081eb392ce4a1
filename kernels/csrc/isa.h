// The table of kernels that each instruction set provides, and the choice among them.
#pragma once

#include <stdint.h>

#include "abi.h"
#include "work.h"

namespace sw {

struct Kernels {
  void (*set_use_tiles)(bool);  // before anything else; true only where AMX may be used
  int64_t (*attend_tile_rows)(const AttentionParams&);
  int64_t (*attend_scratch_bytes)(int64_t max_rows, int64_t head_dim);
  int (*attend)(const AttentionWork&);
  int (*append)(const AttentionParams&);
  int (*rms_norm)(const NormParams&);
  int (*rope)(const RopeParams&);
  int (*gated_act)(const ActParams&);
  int64_t (*linear_workspace_bytes)(const LinearParams&);
  int (*linear)(const LinearParams&, void* workspace);
  void (*digests)(const DigestParams&);
  void (*block_rows)(const BlockRowsParams&);
  int (*quantise)(const QuantiseParams&);
  int64_t (*sparse_scratch_floats)(int64_t dim);  // per thread
  int (*sparse_attend)(const SparseParams&, float* scratch);
  int64_t (*score_scratch_floats)(int64_t num_heads, int64_t dim);  // per thread
  int (*score_entries)(const SelectParams&, const ScoreItem*, int64_t num_items, float* scores,
                       float* scratch);
  int (*pool_windows)(const WindowsParams&);
  int64_t (*delta_scratch_floats)(int64_t key_dim);  // per thread
  int (*delta_rule)(const DeltaParams&, float* scratch);
  int (*causal_conv)(const ConvParams&);
  int (*sinkhorn)(const SinkhornParams&);
};

namespace portable {
const Kernels* kernels();
}
namespace avx2 {
const Kernels* kernels();
}
namespace avx512 {
const Kernels* kernels();
}
namespace avx512bf16 {
const Kernels* kernels();
}

struct InstructionSet {
  const char* name;
  const Kernels* kernels;
  bool tiles;
  bool runs;  // on this machine
};

// The one named, or the best for ""; null where this machine cannot run it.
const InstructionSet* find_instruction_set(const char* name);

}  // namespace sw
