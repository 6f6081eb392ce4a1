// Kernels for avx512bf16, and for amx, which differ only in taking the tile paths; the build gives
// this file its own compiler flags. Tile instructions run only where `use_tiles` was set.
#define SW_ISA avx512bf16
#define SW_WIDTH 16
#define SW_DPBF16 1
#define SW_AMX 1
#include "isa_body.h"
