// Reads neighbouring records of a file and copies their rows into blocks, a piece at a time.
//
// A piece is read into one small buffer again and again, which stays in the cache that all cores
// share; the copy hands its lines back there. A medium's driver then finds them where it can write
// them soonest, and a piece is copied while other threads' pieces are read. One call takes as many
// records as a step has: whatever the caller does for each piece would wait for its interpreter.
//
// This file does not know what a record says, and believes nothing: the caller compares the heads
// and the digests of what was copied.

#include "records.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

namespace sw {
namespace {

constexpr int64_t kSector = 4096;  // a read that ends elsewhere has met the end of the file

// Bytes that were read of `size`; less where the file ends or `error` is set.
int64_t read_fully(int fd, uint8_t* to, int64_t size, int64_t offset, int32_t& error) {
  int64_t total = 0;
  while (total < size) {
    const ssize_t got = pread(fd, to + total, (size_t)(size - total), (off_t)(offset + total));
    if (got < 0) {
      if (errno == EINTR) continue;
      error = errno;
      return total;
    }
    total += got;
    if (got == 0 || got % kSector) break;
  }
  return total;
}

}  // namespace

int read_records(ReadRecordsParams& p, const Kernels& kernels) {
  p.num_read = 0;
  p.error = 0;
  if (p.buffer_bytes < p.record_bytes) return kUnsupported;
  const int64_t most = p.buffer_bytes / p.record_bytes;
  std::vector<uint8_t*> rows((size_t)std::min(most, p.num_records));
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = p.buffer + (int64_t)i * p.record_bytes + p.head_bytes;
  }
  BlockRowsParams copy = {};
  copy.layers = p.layers;
  copy.rows = rows.data();
  copy.num_layers = p.num_layers;
  copy.block_stride = p.block_stride;
  copy.layer_bytes = p.layer_bytes;
  copy.direction = kToBlocksAndHandBack;
  while (p.num_read < p.num_records && !p.error) {
    const int64_t wanted = std::min(most, p.num_records - p.num_read);
    const int64_t offset = p.offset + p.num_read * p.record_bytes;
    const int64_t size = wanted * p.record_bytes;
    const int64_t whole = read_fully(p.fd, p.buffer, size, offset, p.error) / p.record_bytes;
    for (int64_t i = 0; i < whole; ++i) {
      uint8_t* head = p.heads + (p.num_read + i) * p.head_bytes;
      memcpy(head, p.buffer + i * p.record_bytes, (size_t)p.head_bytes);
    }
    copy.blocks = p.blocks + p.num_read;
    copy.out = p.out + p.num_read * p.num_layers;
    copy.num_blocks = whole;
    kernels.block_rows(copy);
    p.num_read += whole;
    if (whole < wanted) break;
  }
  return kOk;
}

}  // namespace sw
