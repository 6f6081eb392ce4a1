// Vectors of W floats on the compiler's generic vectors: one source for every instruction set.
//
// Included inside the namespace of one instruction set, with SW_WIDTH set (4, 8 or 16). Loads and
// stores convert between the stored type and float32; a part load fills with zeros.
//
// No library function is called here: an inline function shared between differently compiled
// files could be taken from the wrong one.

constexpr int W = SW_WIDTH;

typedef float vf __attribute__((vector_size(4 * SW_WIDTH)));
typedef int32_t vi __attribute__((vector_size(4 * SW_WIDTH)));
typedef uint32_t vu __attribute__((vector_size(4 * SW_WIDTH)));
typedef uint16_t vh __attribute__((vector_size(2 * SW_WIDTH)));

struct F32 {
  using T = float;
};
struct BF16 {
  using T = uint16_t;
};
struct F16 {
  using T = uint16_t;
};

inline vf splat(float x) { return vf{} + x; }
inline vf as_float(vu x) { return (vf)x; }
inline vu as_bits(vf x) { return (vu)x; }
inline vf max_of(vf a, vf b) { return a > b ? a : b; }  // b if either is NaN
inline float max_of(float a, float b) { return a > b ? a : b; }
template <typename I>
inline I least(I a, I b) { return a < b ? a : b; }
template <typename I>
inline I most(I a, I b) { return a > b ? a : b; }

#include "half.inc.h"

// ---- loads and stores -------------------------------------------------------------------------

inline vf widen(F32, vf x) { return x; }
// Between 16 and 32 bits: the compiler's own conversion goes through pieces of 128 bits.
inline vu to_words(vh x) {
#if SW_WIDTH == 16
  return (vu)_mm512_cvtepu16_epi32((__m256i)x);
#elif SW_WIDTH == 8
  return (vu)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, vu);
#endif
}
inline vh to_halves(vu x) {
#if SW_WIDTH == 16
  return (vh)_mm512_cvtepi32_epi16((__m512i)x);
#else
  return __builtin_convertvector(x, vh);
#endif
}

inline vf widen(BF16, vh x) { return as_float(to_words(x) << 16); }
inline vf widen(F16, vh x) {
#if SW_WIDTH == 16
  return (vf)_mm512_cvtph_ps((__m256i)x);
#elif SW_WIDTH == 8
  return (vf)_mm256_cvtph_ps((__m128i)x);
#else
  vf out;
  for (int i = 0; i < W; ++i) out[i] = half_to_float(x[i]);
  return out;
#endif
}

inline vf narrow(F32, vf x) { return x; }
inline vh narrow(BF16, vf x) {  // round to nearest even; any NaN becomes a quiet one
  const vu bits = as_bits(x);
  const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const vu out = x == x ? rounded : (vu{} + 0x7fc0u);
  return to_halves(out);
}
inline vh narrow(F16, vf x) {
#if SW_WIDTH == 16
  return (vh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif SW_WIDTH == 8
  return (vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  vh out;
  for (int i = 0; i < W; ++i) out[i] = float_to_half(x[i]);
  return out;
#endif
}

template <typename D>
struct Stored {
  using V = vh;
};
template <>
struct Stored<F32> {
  using V = vf;
};

template <typename D>
inline vf load(const typename D::T* p) {
  typename Stored<D>::V x;
  __builtin_memcpy(&x, p, sizeof x);
  return widen(D{}, x);
}
template <typename D>
inline void store(typename D::T* p, vf x) {
  const typename Stored<D>::V y = narrow(D{}, x);
  __builtin_memcpy(p, &y, sizeof y);
}
template <typename D>
inline vf load_part(const typename D::T* p, int64_t count) {
  typename D::T x[W] = {};
  for (int i = 0; i < W; ++i)
    if (i < count) x[i] = p[i];
  return load<D>(x);
}
template <typename D>
inline void store_part(typename D::T* p, vf x, int64_t count) {
  typename D::T y[W];
  store<D>(y, x);
  for (int i = 0; i < W; ++i)
    if (i < count) p[i] = y[i];
}
// Loads of element i.. of a row of n: whole vectors, then the zero-filled rest.
template <typename D>
inline vf load_of(const typename D::T* row, int64_t i, int64_t n) {
  return i + W <= n ? load<D>(row + i) : load_part<D>(row + i, n - i);
}
template <typename D>
inline void store_of(typename D::T* row, int64_t i, int64_t n, vf x) {
  if (i + W <= n)
    store<D>(row + i, x);
  else
    store_part<D>(row + i, x, n - i);
}
inline vf loadf(const float* p) { return load<F32>(p); }
inline void storef(float* p, vf x) { store<F32>(p, x); }

// ---- reductions -------------------------------------------------------------------------------

#if SW_WIDTH == 16
inline vf even(vf a, vf b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}
inline vf odd(vf a, vf b) {
  return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
#elif SW_WIDTH == 8
inline vf even(vf a, vf b) { return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14); }
inline vf odd(vf a, vf b) { return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15); }
#else
inline vf even(vf a, vf b) { return __builtin_shufflevector(a, b, 0, 2, 4, 6); }
inline vf odd(vf a, vf b) { return __builtin_shufflevector(a, b, 1, 3, 5, 7); }
#endif

constexpr int kFolds = W == 16 ? 4 : W == 8 ? 3 : 2;  // halvings from W lanes to one

inline vf pair_sums(vf a, vf b) { return even(a, b) + odd(a, b); }
inline vf pair_tops(vf a, vf b) { return max_of(even(a, b), odd(a, b)); }

inline float sum_of(vf x) {
#pragma GCC unroll 4
  for (int step = 0; step < kFolds; ++step) x = pair_sums(x, x);
  return x[0];
}
inline float max_in(vf x) {
#pragma GCC unroll 4
  for (int step = 0; step < kFolds; ++step) x = pair_tops(x, x);
  return x[0];
}
// Lane i of the result is the sum (the maximum) over the lanes of x[i]; N vectors become N / 2
// until one is left. Recursion, because the compiler keeps no array in registers over such a loop.
template <int N>
inline vf sums_of(const vf* x) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    vf y[N / 2];
#pragma GCC unroll 8
    for (int i = 0; i < N / 2; ++i) y[i] = pair_sums(x[2 * i], x[2 * i + 1]);
    return sums_of<N / 2>(y);
  }
}
template <int N>
inline vf tops_of(const vf* x) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    vf y[N / 2];
#pragma GCC unroll 8
    for (int i = 0; i < N / 2; ++i) y[i] = pair_tops(x[2 * i], x[2 * i + 1]);
    return tops_of<N / 2>(y);
  }
}

// ---- turning ----------------------------------------------------------------------------------

#if SW_WIDTH == 16
inline vf zip_low(vf a, vf b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline vf zip_high(vf a, vf b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                 31);
}
#elif SW_WIDTH == 8
inline vf zip_low(vf a, vf b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
inline vf zip_high(vf a, vf b) { return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
#else
inline vf zip_low(vf a, vf b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
inline vf zip_high(vf a, vf b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
#endif

// Lane j of x[i] becomes lane i of x[j]: each of kFolds steps rotates the bits of (i, j) by one.
template <int kSteps>
inline void turn(vf* x) {
  if constexpr (kSteps > 0) {
    vf y[W];
#pragma GCC unroll 8
    for (int i = 0; i < W / 2; ++i) {
      y[2 * i] = zip_low(x[i], x[i + W / 2]);
      y[2 * i + 1] = zip_high(x[i], x[i + W / 2]);
    }
    turn<kSteps - 1>(y);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) x[i] = y[i];
  }
}

// ---- exp and friends --------------------------------------------------------------------------

// 2^n for whole numbers n in -150..128 times x; results below 2^-126 are never asked for.
inline vf times_power_of_two(vf x, vf n) {
#if SW_WIDTH == 16
  return (vf)_mm512_scalef_ps((__m512)x, (__m512)n);
#else
  // As two factors: 2^128 has no float of its own.
  const vi k = __builtin_convertvector(n, vi);
  const vi half = k >> 1;
  return x * (vf)((half + 127) << 23) * (vf)((k - half + 127) << 23);
#endif
}

// exp(x) to about 1 ulp; 0 below -87.3 (no subnormals), infinity above 88.7; NaN stays NaN.
inline vf exp_of(vf x) {
  const vf too_small = splat(-87.33654f), large = splat(100.0f);
  // The order of the operands of these two lets NaN through.
  vf t = too_small > x ? too_small : x;
  t = large < t ? large : t;
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const vf n = (t * 1.44269504088896341f + magic) - magic;
  vf r = t - n * 0.693359375f;
  r -= n * -2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const vf y = times_power_of_two(p, n);
  return x < too_small ? splat(0.0f) : y;
}

inline float exp_of(float x) { return exp_of(splat(x))[0]; }

inline vf sigmoid_of(vf x) { return 1.0f / (1.0f + exp_of(-x)); }

inline vf tanh_of(vf x) {
  const vf magnitude = x < 0.0f ? -x : x;
  const vf t = exp_of(-2.0f * magnitude);
  const vf large = (1.0f - t) / (1.0f + t);
  const vf s = x * x;  // series below 0.1: exact where 1 - t would cancel
  const vf small = magnitude * (1.0f + s * (-1.0f / 3 + s * (2.0f / 15 + s * (-17.0f / 315))));
  const vf y = magnitude < 0.1f ? small : large;
  return x < 0.0f ? -y : y;
}
