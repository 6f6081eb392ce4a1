// Coded weights (coded.h) to tiles (tiles.h): the numbers that a bfloat16 matrix would hold.
//
// A vector of codes holds a dword for each of 16 outputs. Two codes that are neighbours in `in`
// become two vectors of float32, and these one row of a tile.

constexpr int64_t kCodedFetchBytes = 4096;  // codes are prefetched this far ahead

// Row of a tile: pairs (even, odd) of 16 outputs, rounded to bfloat16.
inline __m512i tile_row(__m512 even, __m512 odd) {
  alignas(64) static constexpr uint16_t kInterleave[32] = {
      0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave),
                                  (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

template <bool Wide>
inline __m512 sixteen_numbers(const uint8_t* table, int64_t first) {
  if constexpr (Wide) return _mm512_loadu_ps(table + first * 4);
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(table + first * 2)));
}

// Code `k` of each dword as float32.
template <int Bits>
inline __m512 code_at(__m512i words, int k) {
  if constexpr (Bits == 4) {  // a permutation reads four bits and nothing above them
    const __m512 values =
        _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(words, (unsigned)(4 * k)), values);
  }
  const __m512i highest = _mm512_slli_epi32(words, (unsigned)(24 - 8 * k));
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(highest, 24));
}

template <int Bits, bool Wide, bool Offsets>
inline void expand_half(const uint8_t* step, const CodeForm& form, int64_t half, uint16_t* out) {
  constexpr int kRows = Bits == 4 ? 4 : 2;  // of a tile in one vector of codes
  const uint8_t* codes = step + form.codes_at() + half * form.half_bytes();
  for (int64_t sub = 0; sub < form.subs; ++sub) {
    const int64_t first = sub * 32 + half * 16;
    const __m512 scale = sixteen_numbers<Wide>(step, first);
    __m512 offset{};
    if constexpr (Offsets) offset = sixteen_numbers<Wide>(step + form.scale_bytes(), first);
    const int64_t rows = 16 / form.subs;
    for (int64_t row = 0; row < rows; row += kRows, codes += 64, out += kRows * 32) {
      const __m512i words = _mm512_loadu_si512(codes);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        const __m512 even = code_at<Bits>(words, 2 * i), odd = code_at<Bits>(words, 2 * i + 1);
        if constexpr (Offsets)
          _mm512_store_si512(out + i * 32, tile_row(_mm512_fmadd_ps(scale, even, offset),
                                                    _mm512_fmadd_ps(scale, odd, offset)));
        else
          _mm512_store_si512(out + i * 32, tile_row(scale * even, scale * odd));
      }
    }
  }
}

template <int Bits, bool Wide, bool Offsets>
inline void expand_as(const CodeForm& form, const uint8_t* from, int64_t steps, uint16_t* out,
                      bool fetch) {
  const int64_t size = form.step_bytes();
  for (int64_t i = 0; i < steps; ++i, from += size, out += 1024) {
    if (fetch) prefetch_row((const char*)from + kCodedFetchBytes, size);
    expand_half<Bits, Wide, Offsets>(from, form, 0, out);
    expand_half<Bits, Wide, Offsets>(from, form, 1, out + 512);
  }
}

// `steps` steps of one panel as tiles, 2 KiB each; `fetch`: what follows comes from memory.
inline void expand_steps(const CodeForm& form, const uint8_t* from, int64_t steps, uint16_t* out,
                         bool fetch) {
  if (form.bits == 4) {
    if (form.wide)
      expand_as<4, true, true>(form, from, steps, out, fetch);
    else
      expand_as<4, false, true>(form, from, steps, out, fetch);
  } else if (form.has_offsets) {
    if (form.wide)
      expand_as<8, true, true>(form, from, steps, out, fetch);
    else
      expand_as<8, false, true>(form, from, steps, out, fetch);
  } else if (form.wide) {
    expand_as<8, true, false>(form, from, steps, out, fetch);
  } else {
    expand_as<8, false, false>(form, from, steps, out, fetch);
  }
}
