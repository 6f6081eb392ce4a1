// Kernels for portable; the build gives this file its own compiler flags.
#define SW_ISA portable
#define SW_WIDTH 4
#include "isa_body.h"
