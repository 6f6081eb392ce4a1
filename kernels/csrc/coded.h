// Weights kept as the small numbers that a quantised file holds, in the order of tiles.h.
//
//     w[out][in] = bf16(scale[out][in / g] * code[out][in] + offset[out][in / g])      g: 16 or 32
//
// A step (32 outputs, 32 inputs) follows the next in memory, each of them
//
//     [subs][32 outputs] scales | [subs][32] offsets, where there are any | codes
//     codes of 4 bits: [8 fours of outputs][32 inputs] words of 16 bits, the first output lowest
//     codes of 8 bits: [32 outputs][32 inputs] signed bytes
//
// so that one vector of codes yields the inputs of an output in their order.
//
// Products with codes are exact in float32 wherever there is an offset, so that a fused step rounds
// as a product and a sum do. Scales and offsets are half precision where all of them are, else
// float32.
// Outputs beyond the last are zeros. `in` is a multiple of 32.
#pragma once

#include <stdint.h>

namespace sw {

struct CodedParams;

// What `code_form` of a parameter struct says, in bits.
struct CodeForm {
  int bits;  // 4: codes 0..15, 8: codes -128..127
  int subs;  // scales of an output in a step: 1 or 2
  bool wide;
  bool has_offsets;

  explicit CodeForm(int32_t form)
      : bits(form & 1 ? 4 : 8), subs(form & 2 ? 2 : 1), wide(form & 4), has_offsets(form & 8) {}
  int64_t scale_bytes() const { return subs * 32 * (wide ? 4 : 2); }
  int64_t codes_at() const { return scale_bytes() * (has_offsets ? 2 : 1); }
  int64_t half_bytes() const { return 64 * bits; }
  int64_t step_bytes() const { return codes_at() + 2 * half_bytes(); }
};

int64_t coded_bytes(const CodedParams& p);
void pack_codes(const CodedParams& p);
void unpack_coded_rows(const CodedParams& p);

}  // namespace sw
