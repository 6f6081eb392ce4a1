// See coded.h.
#include "coded.h"

#include <string.h>

#include "abi.h"
#include "pool.h"

namespace sw {
namespace {

#include "half.inc.h"

constexpr int64_t kPanelOutputs = 32, kStepInputs = 32;

uint16_t bf16_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 0x40);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

struct Packer {
  const CodedParams& p;
  const CodeForm form;
  const int64_t steps = p.in_dim / kStepInputs;

  uint8_t* step_at(int64_t out, int64_t step) const {
    return static_cast<uint8_t*>(p.coded) +
           (out / kPanelOutputs * steps + step) * form.step_bytes();
  }

  void put_number(uint8_t* table, int64_t place, const void* numbers, int64_t i) const {
    const int64_t size = form.wide ? 4 : 2;
    memcpy(table + place * size, static_cast<const uint8_t*>(numbers) + i * size, (size_t)size);
  }

  float number(const uint8_t* table, int64_t place) const {
    if (!form.wide) return half_to_float(reinterpret_cast<const uint16_t*>(table)[place]);
    return reinterpret_cast<const float*>(table)[place];
  }

  // Where the codes of an output's 32 inputs begin: words that four outputs share, or bytes.
  uint8_t* codes_of(uint8_t* step, int64_t out) const {
    const int64_t lane = out % kPanelOutputs;
    return step + form.codes_at() + (form.bits == 4 ? lane / 4 * 64 : lane * 32);
  }

  void pack_step(int64_t out, int64_t step) const {
    uint8_t* to = step_at(out, step);
    const int64_t lane = out % kPanelOutputs, first = (out * steps + step) * form.subs;
    for (int s = 0; s < form.subs; ++s) {
      put_number(to, s * 32 + lane, p.scales, first + s);
      if (form.has_offsets)
        put_number(to + form.scale_bytes(), s * 32 + lane, p.offsets, first + s);
    }
    const int8_t* codes = p.codes + out * p.in_dim + step * kStepInputs;
    uint8_t* at = codes_of(to, out);
    if (form.bits == 8) {
      memcpy(at, codes, kStepInputs);
      return;
    }
    uint16_t* words = reinterpret_cast<uint16_t*>(at);
    for (int64_t i = 0; i < kStepInputs; ++i)
      words[i] = (uint16_t)(words[i] | (codes[i] & 15) << (lane % 4 * 4));
  }

  void unpack_step(int64_t out, int64_t step, uint16_t* to) const {
    uint8_t* from = step_at(out, step);
    const int64_t lane = out % kPanelOutputs;
    const uint8_t* codes = codes_of(from, out);
    for (int64_t i = 0; i < kStepInputs; ++i) {
      const int64_t place = i * form.subs / kStepInputs * 32 + lane;
      const int code = form.bits == 8
          ? reinterpret_cast<const int8_t*>(codes)[i]
          : reinterpret_cast<const uint16_t*>(codes)[i] >> (lane % 4 * 4) & 15;
      float w = number(from, place) * (float)code;
      if (form.has_offsets) w += number(from + form.scale_bytes(), place);
      to[i] = bf16_of(w);
    }
  }
};

}  // namespace

int64_t coded_bytes(const CodedParams& p) {
  const int64_t panels = (p.out_dim + kPanelOutputs - 1) / kPanelOutputs;
  return panels * (p.in_dim / kStepInputs) * CodeForm(p.code_form).step_bytes();
}

void pack_codes(const CodedParams& p) {
  const Packer packer{p, CodeForm(p.code_form)};
  memset(p.coded, 0, (size_t)coded_bytes(p));
  const int64_t panels = (p.out_dim + kPanelOutputs - 1) / kPanelOutputs;
  parallel_for(panels, [&](int64_t panel, int) {
    for (int64_t out = panel * kPanelOutputs; out < (panel + 1) * kPanelOutputs; ++out) {
      if (out >= p.out_dim) break;
      for (int64_t step = 0; step < packer.steps; ++step) packer.pack_step(out, step);
    }
  });
}

void unpack_coded_rows(const CodedParams& p) {
  const Packer packer{p, CodeForm(p.code_form)};
  uint16_t* out = static_cast<uint16_t*>(p.out);
  for (int64_t r = 0; r < p.num_rows; ++r) {
    for (int64_t step = 0; step < packer.steps; ++step)
      packer.unpack_step(p.rows[r], step, out + r * p.in_dim + step * kStepInputs);
  }
}

}  // namespace sw
