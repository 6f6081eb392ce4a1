// Kernels for avx2; the build gives this file its own compiler flags.
#define SW_ISA avx2
#define SW_WIDTH 8
#include "isa_body.h"
