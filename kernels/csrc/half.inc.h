// Half precision, one number (exact, without hardware). Included into a namespace of the including
// file: each instruction set has its own copy, which the linker must not take for another's.

inline float half_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16;
  const uint32_t exponent = (h >> 10) & 31;
  const uint32_t mantissa = h & 1023;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000 | (mantissa << 13);
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {
    const float small = (float)mantissa * 5.9604644775390625e-8f;  // 2^-24
    __builtin_memcpy(&bits, &small, 4);
    bits |= sign;
  }
  float out;
  __builtin_memcpy(&out, &bits, 4);
  return out;
}

inline uint16_t float_to_half(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;   // NaN
  if (bits >= 0x477ff000) return sign | 0x7c00;  // rounds to infinity
  if (bits < 0x38800000) {                       // subnormal half: let the FPU round
    float magnitude;
    __builtin_memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;  // ulp of 0.5 is 2^-24, the subnormal step
    uint32_t rounded;
    __builtin_memcpy(&rounded, &magnitude, 4);
    return sign | (uint16_t)(rounded - 0x3f000000);
  }
  const uint32_t odd = (bits >> 13) & 1;
  return sign | (uint16_t)((bits - 0x38000000 + 0xfff + odd) >> 13);
}
