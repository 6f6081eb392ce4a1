// Kernels for avx512; the build gives this file its own compiler flags.
#define SW_ISA avx512
#define SW_WIDTH 16
#include "isa_body.h"
