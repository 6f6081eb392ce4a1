// Records of a file into blocks of memory.
#pragma once

#include "abi.h"
#include "isa.h"

namespace sw {

// On the calling thread alone. What was read before an error or the file's end is in its blocks.
int read_records(ReadRecordsParams& p, const Kernels& kernels);

}  // namespace sw
