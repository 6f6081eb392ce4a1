// Coded weights (coded.h) to tiles: the numbers that a bfloat16 matrix would hold.
//
// A step becomes two tiles [16 outputs][32 inputs], the left operand of a product. An output's 32
// inputs are one vector: of four-bit codes, a table of their 16 numbers is made (two tables fill a
// vector) and looked up; eight-bit codes are widened and multiplied.

constexpr int64_t kCodedFetchBytes = 4096;  // codes are prefetched this far ahead

// Sixteen scales or offsets from place `first` on, as float32.
template <bool Wide>
inline void sixteen_numbers(const uint8_t* table, int64_t first, float* out) {
  __m512 x;
  if constexpr (Wide)
    x = _mm512_loadu_ps(table + first * 4);
  else
    x = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(table + first * 2)));
  _mm512_store_ps(out, x);
}

// Scales and offsets of the 16 outputs of half a step.
struct HalfNumbers {
  alignas(64) float scale[2][16];
  alignas(64) float offset[2][16];
};

template <bool Wide, bool Offsets, int Subs>
inline void load_numbers(const uint8_t* scales, int64_t half, HalfNumbers& out) {
  const uint8_t* offsets = scales + Subs * 32 * (Wide ? 4 : 2);
  for (int s = 0; s < Subs; ++s) {
    sixteen_numbers<Wide>(scales, s * 32 + half * 16, out.scale[s]);
    if (Offsets) sixteen_numbers<Wide>(offsets, s * 32 + half * 16, out.offset[s]);
  }
  // Read back as broadcasts, which are loads: taken out of registers they would be permutations.
  __asm__ volatile("" : "+m"(out));
}

// The numbers of codes 0 to 15.
inline __m512 table_of(const HalfNumbers& numbers, int sub, int64_t output) {
  const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_fmadd_ps(codes, _mm512_set1_ps(numbers.scale[sub][output]),
                         _mm512_set1_ps(numbers.offset[sub][output]));
}

// Looks words up among the 32 of a table; bits above the fifth are not read.
inline void look_up(__m512i table, __m512i places, uint16_t* out) {
  _mm512_store_si512(out, _mm512_permutexvar_epi16(places, table));
}

inline __m512i table_pair(__m512 low, __m512 high) {
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// Codes of the four outputs from `o` on: words, the first output's code lowest.
template <int Subs>
inline void four_outputs(__m512i words, const HalfNumbers& numbers, int64_t o, uint16_t* out) {
  const __m512i codes = _mm512_set1_epi8(15);
  const __m512i high = Subs == 1
      ? _mm512_set1_epi8(16)
      : _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi8(16), 1);
  // Bytes: the codes of two outputs, with the bit that chooses half a table above each.
  const __m512i even = Subs == 1 ? _mm512_and_si512(words, codes)
                                 : _mm512_ternarylogic_epi32(words, codes, high, 0xea);
  const __m512i odd =
      _mm512_ternarylogic_epi32(_mm512_srli_epi16(words, 4), codes, high, 0xea);
  for (int64_t i = 0; i < 4; i += 2, o += 2) {
    const __m512i first = i == 0 ? even : _mm512_srli_epi16(even, 8);
    const __m512i second = i == 0 ? odd : _mm512_srli_epi16(odd, 8);
    if constexpr (Subs == 1) {  // half a table for each output
      const __m512i table = table_pair(table_of(numbers, 0, o), table_of(numbers, 0, o + 1));
      look_up(table, first, out + o * 32);
      look_up(table, second, out + o * 32 + 32);
    } else {  // half a table for each half of the inputs
      look_up(table_pair(table_of(numbers, 0, o), table_of(numbers, 1, o)), first, out + o * 32);
      look_up(table_pair(table_of(numbers, 0, o + 1), table_of(numbers, 1, o + 1)), second,
              out + o * 32 + 32);
    }
  }
}

template <int Subs>
inline void four_bits(const uint8_t* codes, const HalfNumbers& numbers, uint16_t* out) {
#pragma GCC unroll 4
  for (int64_t o = 0; o < 16; o += 4)
    four_outputs<Subs>(_mm512_loadu_si512(codes + o * 16), numbers, o, out);
}

template <bool Offsets>
inline __m512 sixteen_codes(const uint8_t* codes, const HalfNumbers& numbers, int sub,
                            int64_t output) {
  const __m512 x = _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))));
  const __m512 scale = _mm512_set1_ps(numbers.scale[sub][output]);
  if constexpr (Offsets)
    return _mm512_fmadd_ps(scale, x, _mm512_set1_ps(numbers.offset[sub][output]));
  return scale * x;
}

template <bool Offsets, int Subs>
inline void eight_bits(const uint8_t* codes, const HalfNumbers& numbers, uint16_t* out) {
#pragma GCC unroll 16
  for (int64_t o = 0; o < 16; ++o) {
    const __m512 first = sixteen_codes<Offsets>(codes + o * 32, numbers, 0, o);
    const __m512 last = sixteen_codes<Offsets>(codes + o * 32 + 16, numbers, Subs - 1, o);
    _mm512_store_si512(out + o * 32, (__m512i)_mm512_cvtne2ps_pbh(last, first));
  }
}

// One step as two tiles, 1 KiB each.
template <int Bits, bool Wide, bool Offsets, int Subs>
void expand_step(const uint8_t* step, uint16_t* out) {
  constexpr int64_t kCodesAt = Subs * 32 * (Wide ? 4 : 2) * (Offsets ? 2 : 1);
  HalfNumbers numbers[2];
  load_numbers<Wide, Offsets, Subs>(step, 0, numbers[0]);
  load_numbers<Wide, Offsets, Subs>(step, 1, numbers[1]);
  for (int64_t half = 0; half < 2; ++half) {
    const uint8_t* codes = step + kCodesAt + half * 64 * Bits;
    if constexpr (Bits == 4)
      four_bits<Subs>(codes, numbers[half], out + half * 512);
    else
      eight_bits<Offsets, Subs>(codes, numbers[half], out + half * 512);
  }
}

using Expand = void (*)(const uint8_t* step, uint16_t* out);

template <int Bits, bool Offsets>
inline Expand expand_of(const CodeForm& form) {
  if (form.subs == 1)
    return form.wide ? expand_step<Bits, true, Offsets, 1> : expand_step<Bits, false, Offsets, 1>;
  return form.wide ? expand_step<Bits, true, Offsets, 2> : expand_step<Bits, false, Offsets, 2>;
}

inline Expand expand_of(const CodeForm& form) {
  if (form.bits == 4) return expand_of<4, true>(form);
  return form.has_offsets ? expand_of<8, true>(form) : expand_of<8, false>(form);
}

// `steps` steps of one panel in the order of tiles.h, 2 KiB each.
inline void expand_steps(const CodeForm& form, const uint8_t* from, int64_t steps, uint16_t* out) {
  const Expand expand = expand_of(form);
  const int64_t size = form.step_bytes();
  for (int64_t i = 0; i < steps; ++i, from += size, out += 1024) {
    prefetch_row((const char*)from + kCodedFetchBytes, size);
    expand(from, out);
    for (int64_t half = 0; half < 2; ++half) {
      __m512i r[16];
      for (int o = 0; o < 16; ++o) r[o] = _mm512_load_si512(out + half * 512 + o * 32);
      transpose(r);
      for (int k = 0; k < 16; ++k) _mm512_store_si512(out + half * 512 + k * 32, r[k]);
    }
  }
}
