// One instruction set's copy of every kernel: included once by each isa_*.cpp, which defines
// SW_ISA (namespace and name), SW_WIDTH, and SW_DPBF16 / SW_AMX where there are such instructions.
#include <stddef.h>
#include <stdint.h>

#if SW_WIDTH > 4 || defined(__SSE2__)
#include <immintrin.h>
#endif

#include "abi.h"
#include "coded.h"
#include "isa.h"
#include "pool.h"
#include "work.h"

namespace sw {
namespace SW_ISA {

template <typename A, typename B>
struct p_same {
  static constexpr bool value = false;
};
template <typename A>
struct p_same<A, A> {
  static constexpr bool value = true;
};

#include "vec.inc.h"
#include "attention.inc.h"
#include "ops.inc.h"
#include "quantise.inc.h"
#include "sparse.inc.h"
#include "recurrent.inc.h"
#include "linear.inc.h"
bool use_tiles = false;
void set_use_tiles(bool tiles) { use_tiles = tiles; }
#ifdef SW_AMX
#include "amx.inc.h"
#include "attention_amx.inc.h"
#include "expand_amx.inc.h"
#include "linear_amx.inc.h"
#endif
#include "attend.inc.h"
#include "linear_run.inc.h"

const Kernels* kernels() {
  static const Kernels table = {
      set_use_tiles,  attend_tile_rows,      attend_scratch_bytes,
      attend,         append,                rms_norm,
      rope,           gated_act,             linear_workspace_bytes,
      linear,         digests,               block_rows,
      quantise,
      sparse_scratch_floats,
      sparse_attend,  score_scratch_floats,  score_entries,
      pool_windows,   delta_scratch_floats,  delta_rule,
      causal_conv,    sinkhorn,
  };
  return &table;
}

}  // namespace SW_ISA
}  // namespace sw
