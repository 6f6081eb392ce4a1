// Which instruction sets this machine (and operating system) can run.
#include "isa.h"

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sw {
namespace {

#if defined(__x86_64__)

constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
constexpr long kTileData = 18;               // XFEATURE_XTILEDATA

struct Features {
  bool avx2 = false, avx512 = false, bf16 = false, amx = false;
};

uint64_t enabled_state() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}

// Linux gives tile registers to a process only after it has asked.
bool tiles_permitted() {
#if defined(__linux__)
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Features detect() {
  Features f;
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return f;
  const bool xsave = c & (1u << 27), fma = c & (1u << 12), f16c = c & (1u << 29);
  if (!xsave) return f;
  const uint64_t state = enabled_state();
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return f;
  const bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6;
  f.avx2 = ymm && fma && f16c && (b & (1u << 5));
  const uint32_t f_dq_bw_vl = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);
  f.avx512 = f.avx2 && zmm && (b & f_dq_bw_vl) == f_dq_bw_vl;
  const bool tile = (d & (1u << 24)) && (d & (1u << 22)) && (state & 0x60000) == 0x60000;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return f;
  f.bf16 = f.avx512 && (a & (1u << 5));
  f.amx = f.bf16 && tile && tiles_permitted();
  return f;
}

#endif

}  // namespace

const InstructionSet* find_instruction_set(const char* name) {
#if defined(__x86_64__)
  static const Features f = detect();
  static const InstructionSet sets[] = {
      {"amx", avx512bf16::kernels(), true, f.amx},
      {"avx512bf16", avx512bf16::kernels(), false, f.bf16},
      {"avx512", avx512::kernels(), false, f.avx512},
      {"avx2", avx2::kernels(), false, f.avx2},
      {"portable", portable::kernels(), false, true},
  };
#else
  static const InstructionSet sets[] = {{"portable", portable::kernels(), false, true}};
#endif
  for (const InstructionSet& set : sets) {
    const bool wanted = name[0] == 0 || strcmp(set.name, name) == 0;
    if (wanted && set.runs) return &set;
  }
  return nullptr;
}

}  // namespace sw
