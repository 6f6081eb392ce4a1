// AMX: attention over tiles of query rows, and linear layers of 2 to 128 rows, in bfloat16.
//
// Every tile register is 16 rows of 64 bytes; the configuration is loaded for each item, since
// other libraries in the process reset it, and released at its end to keep context switches cheap.
//
//     tdpbf16:  C[16 m][16 n] += A[16 m][32 k] . B[16 k-pairs][16 n x 2]

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

inline void open_tiles() {
  TileConfig config;
  // The intrinsic of some compilers declares fewer bytes than the instruction reads.
  __asm__ volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}
inline void close_tiles() { _tile_release(); }

// 16 x 16 words of 32 bits: out[i][j] = in[j][i].
inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// ---- attention ----------------------------------------------------------------------------------

inline bool fits_tiles(const AttentionParams& p) {
  return use_tiles && p.q_dtype == kBF16 && p.kv_dtype == kBF16 && p.head_dim % 32 == 0;
}

// Packed keys and values of one block; scores and weights of a few groups of 16 rows.
inline int64_t tile_scratch_bytes(int64_t pitch) {
  return 2 * kKeyBlock * pitch * 2 + 4 * 16 * kKeyBlock * (4 + 2) + 4 * 64;
}

struct PackedBlock {
  uint16_t* key;    // tiles [4 key groups][dim / 32] of B: k = dim, n = key
  uint16_t* value;  // tiles [2 key groups][dim / 16] of B: k = key, n = dim
};

inline void pack_keys(const KeyBlock<BF16>& keys, int64_t dim, uint16_t* out) {
  for (int group = 0; group < 4; ++group) {
    for (int64_t d = 0; d < dim; d += 32, out += 512) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) {
        const int j = group * 16 + i;
        const bool valid = j >= keys.begin && j < keys.end;
        r[i] = valid ? _mm512_loadu_si512(keys.key[j] + d) : _mm512_setzero_si512();
      }
      transpose(r);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(out + i * 32, r[i]);
    }
  }
}

inline void pack_values(const KeyBlock<BF16>& keys, int64_t dim, int64_t value_offset,
                        uint16_t* out) {
  uint16_t order[2][32];
  for (int i = 0; i < 16; ++i) {
    order[0][2 * i] = (uint16_t)i;
    order[0][2 * i + 1] = (uint16_t)(32 + i);
    order[1][2 * i] = (uint16_t)(16 + i);
    order[1][2 * i + 1] = (uint16_t)(48 + i);
  }
  const __m512i low = _mm512_loadu_si512(order[0]), high = _mm512_loadu_si512(order[1]);
  for (int group = 0; group < 2; ++group) {
    for (int pair = 0; pair < 16; ++pair) {
      const int j = group * 32 + pair * 2;
      const bool a_valid = j >= keys.begin && j < keys.end;
      const bool b_valid = j + 1 >= keys.begin && j + 1 < keys.end;
      uint16_t* row = out + group * dim * 32 + pair * 32;
      for (int64_t d = 0; d < dim; d += 32, row += 1024) {
        const __m512i zero = _mm512_setzero_si512();
        const __m512i a = a_valid ? _mm512_loadu_si512(keys.key[j] + value_offset + d) : zero;
        const __m512i b = b_valid ? _mm512_loadu_si512(keys.key[j + 1] + value_offset + d) : zero;
        _mm512_store_si512(row, _mm512_permutex2var_epi16(a, low, b));
        _mm512_store_si512(row + 512, _mm512_permutex2var_epi16(a, high, b));
      }
    }
  }
}

// scores[16][64] of 16 query rows; q [16, dim].
inline void tile_scores(const uint16_t* q, const uint16_t* keys, int64_t dim, float* scores) {
  const int64_t stride = dim * 2, group = dim * 16;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t d = 0; d < dim; d += 32) {
    const uint16_t* b = keys + d * 16;
    _tile_loadd(4, q + d, stride);
    _tile_loadd(5, b, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, b + group, 64);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(5, b + 2 * group, 64);
    _tile_dpbf16ps(2, 4, 5);
    _tile_loadd(6, b + 3 * group, 64);
    _tile_dpbf16ps(3, 4, 6);
  }
  _tile_stored(0, scores, kKeyBlock * 4);
  _tile_stored(1, scores + 16, kKeyBlock * 4);
  _tile_stored(2, scores + 32, kKeyBlock * 4);
  _tile_stored(3, scores + 48, kKeyBlock * 4);
}

// out[16, pitch] += weights[16][64] . values
inline void tile_weigh(const uint16_t* weights, const uint16_t* values, int64_t dim, float* out,
                       int64_t pitch) {
  _tile_loadd(4, weights, kKeyBlock * 2);
  _tile_loadd(5, weights + 32, kKeyBlock * 2);
  for (int64_t d = 0; d < dim; d += 32) {
    const uint16_t* b = values + d * 32;
    _tile_loadd(0, out + d, pitch * 4);
    _tile_loadd(1, out + d + 16, pitch * 4);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + 512, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, b + dim * 32, 64);
    _tile_dpbf16ps(0, 5, 6);
    _tile_loadd(7, b + dim * 32 + 512, 64);
    _tile_dpbf16ps(1, 5, 7);
    _tile_stored(0, out + d, pitch * 4);
    _tile_stored(1, out + d + 16, pitch * 4);
  }
}

// Scale and cap the scores of 16 rows, hide what a row may not see -> each row's maximum.
template <bool Masked>
inline vf prepare_scores(const Tile& t, int64_t m0, const KeyBlock<BF16>& keys, float* scores) {
  vf lane;
  for (int i = 0; i < W; ++i) lane[i] = (float)i;
  const vf hidden = splat(-__builtin_inff());
  vf tops[W];
  for (int r = 0; r < 16; ++r) {
    float* s = scores + r * kKeyBlock;
    const float first = (float)most<int64_t>(keys.begin, t.visible_begin(m0 + r) - keys.start);
    const float last = (float)least<int64_t>(keys.end, t.visible_end(m0 + r) - keys.start);
    vf top = hidden;
    for (int j = 0; j < kKeyBlock; j += W) {
      vf x = loadf(s + j) * t.scale;
      if (t.soft_cap > 0) x = t.soft_cap * tanh_of(x / t.soft_cap);
      if (Masked) {
        const vf at = lane + (float)j;
        x = at < first ? hidden : x;
        x = at >= last ? hidden : x;
      }
      storef(s + j, x);
      top = max_of(x, top);
    }
    tops[r] = top;
  }
  return tops_of<W>(tops);
}

// Scores of 16 rows -> bfloat16 weights; updates top, sum and out of the rows.
inline void soften_tile(const Tile& t, int64_t m0, const KeyBlock<BF16>& keys, float* scores,
                        uint16_t* weights) {
  const bool all_visible = keys.begin == 0 && keys.end == kKeyBlock &&
                           t.visible_begin(m0 + 15) <= keys.start &&
                           t.visible_end(m0) >= keys.start + kKeyBlock;
  const vf block_top = all_visible ? prepare_scores<false>(t, m0, keys, scores)
                                   : prepare_scores<true>(t, m0, keys, scores);
  const vf old_top = loadf(t.top + m0);
  const vf new_top = max_of(old_top, block_top);
  const vf base = new_top == -__builtin_inff() ? splat(0.0f) : new_top;
  const vf shrink = exp_of(old_top - base);
  vf totals[W];
  for (int r = 0; r < 16; ++r) {
    const float* s = scores + r * kKeyBlock;
    const float row_base = base[r];
    vf e[4];
    for (int j = 0; j < 4; ++j) e[j] = exp_of(loadf(s + j * W) - row_base);
    totals[r] = (e[0] + e[1]) + (e[2] + e[3]);
    for (int j = 0; j < 4; j += 2) {
      const __m512bh pair = _mm512_cvtne2ps_pbh((__m512)e[j + 1], (__m512)e[j]);
      _mm512_storeu_si512(weights + r * kKeyBlock + j * W, (__m512i)pair);
    }
  }
  storef(t.sum + m0, loadf(t.sum + m0) * shrink + sums_of<W>(totals));
  storef(t.top + m0, new_top);
  for (int r = 0; r < 16; ++r) {
    if (new_top[r] == old_top[r]) continue;
    float* out = t.out + (m0 + r) * t.pitch;
    for (int64_t d = 0; d < t.pitch; d += W) storef(out + d, loadf(out + d) * shrink[r]);
  }
}

// Several tiles take each step together: tile registers cannot read what has only just been
// stored without waiting for it to reach the cache.
constexpr int kTilesTogether = 2;

struct TileBuffers {
  float* scores;      // [kTilesTogether][16][64]
  uint16_t* weights;  // [kTilesTogether][16][64]
};

inline void attend_tile_block(const Tile& t, const KeyBlock<BF16>& keys, const PackedBlock& packed,
                              const TileBuffers& buffers) {
  int64_t together[kTilesTogether];
  int count = 0;
  for (int64_t m = 0; m < t.rows; m += 16) {
    const int64_t last = least(m + 15, t.rows - 1);
    const bool unseen = t.visible_end(last) <= keys.start + keys.begin ||
                        t.visible_begin(m) >= keys.start + keys.end;
    if (!unseen) together[count++] = m;
    if (count < kTilesTogether && m + 16 < t.rows) continue;
    for (int i = 0; i < count; ++i) {
      tile_scores(t.q_bf16 + together[i] * t.dim, packed.key, t.dim,
                  buffers.scores + i * 16 * kKeyBlock);
    }
    for (int i = 0; i < count; ++i) {
      soften_tile(t, together[i], keys, buffers.scores + i * 16 * kKeyBlock,
                  buffers.weights + i * 16 * kKeyBlock);
    }
    for (int i = 0; i < count; ++i) {
      tile_weigh(buffers.weights + i * 16 * kKeyBlock, packed.value, t.dim,
                 t.out + together[i] * t.pitch, t.pitch);
    }
    count = 0;
  }
}

// `t.q_bf16` and `t.out` have room for rows up to a multiple of 16; the rows beyond are zero.
template <typename S>
void attend_tiles(Tile& t, const PageReader<BF16>& pages, int64_t lo, int64_t hi, S& scratch) {
  PackedBlock packed;
  packed.key = scratch.template take<uint16_t>(kKeyBlock * t.dim);
  packed.value = scratch.template take<uint16_t>(kKeyBlock * t.dim);
  TileBuffers buffers;
  buffers.scores = scratch.template take<float>(kTilesTogether * 16 * kKeyBlock);
  buffers.weights = scratch.template take<uint16_t>(kTilesTogether * 16 * kKeyBlock);
  open_tiles();
  for (int64_t start = lo / kKeyBlock * kKeyBlock; start < hi; start += kKeyBlock) {
    KeyBlock<BF16> keys;
    pages.locate(start, lo, hi, keys);
    pack_keys(keys, t.dim, packed.key);
    pack_values(keys, t.dim, pages.value_offset, packed.value);
    attend_tile_block(t, keys, packed, buffers);
  }
  close_tiles();
}

// ---- linear -------------------------------------------------------------------------------------
//
// The weights are the A operand as they lie in memory: [16 outputs][32 in]; x is packed once.
// C = [16 outputs][16 x rows], transposed when stored.

constexpr int64_t kTileMaxRows = 128;  // more go to torch

inline bool linear_fits_tiles(const LinearParams& p) {
  const bool fits = p.rows >= 2 && p.rows <= kTileMaxRows && p.in_dim % 32 == 0;
  return use_tiles && fits && p.dtype == kBF16 && p.out_dim % 32 == 0;
}

inline int64_t tile_x_bytes(const LinearParams& p) {
  return (p.rows + 15) / 16 * 16 * p.in_dim * 2;
}

// B tiles [row groups][in / 32]: pair r of the tile holds x[n][2r], x[n][2r + 1] for 16 rows n.
inline void pack_x(const LinearParams& p, uint16_t* out) {
  const uint16_t* x = static_cast<const uint16_t*>(p.x);
  for (int64_t base = 0; base < p.rows; base += 16) {
    for (int64_t d = 0; d < p.in_dim; d += 32, out += 512) {
      __m512i r[16];
      for (int64_t i = 0; i < 16; ++i) {
        const bool valid = base + i < p.rows;
        r[i] = valid ? _mm512_loadu_si512(x + (base + i) * p.x_stride + d)
                     : _mm512_setzero_si512();
      }
      transpose(r);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(out + i * 32, r[i]);
    }
  }
}

inline void store_outputs(const LinearParams& p, int64_t n, int64_t base, float* c) {
  __m512i r[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_load_si512(c + i * 16);
  transpose(r);
  const vf bias = bias_of<BF16>(p, n);
  uint16_t* out = static_cast<uint16_t*>(p.out);
  const int64_t rows = least<int64_t>(16, p.rows - base);
  for (int64_t i = 0; i < rows; ++i) {
    store<BF16>(out + (base + i) * p.out_dim + n, (vf)r[i] + bias);
  }
}

// Outputs n..n+31 of x rows base..base+15, or ..base+31 (Two).
template <bool Two>
inline void tile_panel(const LinearParams& p, const uint16_t* packed, int64_t n, int64_t base) {
  alignas(64) float c[4][256];
  const uint16_t* w = static_cast<const uint16_t*>(p.weight) + n * p.in_dim;
  const uint16_t* w2 = w + 16 * p.in_dim;
  const bool more = base == 0 && n + 64 <= p.out_dim;
  const uint16_t* fetch = more ? w + 32 * p.in_dim : nullptr;
  const int64_t stride = p.in_dim * 2, group = p.in_dim * 16;
  const uint16_t* x = packed + base * p.in_dim;
  _tile_zero(0);
  _tile_zero(1);
  if (Two) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t d = 0; d < p.in_dim; d += 32) {
    if (fetch != nullptr) {
      for (int i = 0; i < 32; ++i) __builtin_prefetch(fetch + (d + i) * 32, 0, 2);
    }
    _tile_loadd(4, w + d, stride);
    _tile_loadd(5, w2 + d, stride);
    _tile_loadd(6, x + d * 16, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if (Two) {
      _tile_loadd(7, x + group + d * 16, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c[0], 64);
  _tile_stored(1, c[1], 64);
  store_outputs(p, n, base, c[0]);
  store_outputs(p, n + 16, base, c[1]);
  if (Two) {
    _tile_stored(2, c[2], 64);
    _tile_stored(3, c[3], 64);
    store_outputs(p, n, base + 16, c[2]);
    store_outputs(p, n + 16, base + 16, c[3]);
  }
}

inline int linear_tiles(const LinearParams& p, void* workspace) {
  uint16_t* x = static_cast<uint16_t*>(workspace);
  pack_x(p, x);
  over_panels(p.out_dim / 32, 64 * p.in_dim, [&](int64_t first, int64_t last) {
    open_tiles();
    for (int64_t i = first; i < last; ++i) {
      for (int64_t base = 0; base < p.rows; base += 32) {
        if (p.rows - base > 16)
          tile_panel<true>(p, x, i * 32, base);
        else
          tile_panel<false>(p, x, i * 32, base);
      }
    }
    close_tiles();
  });
  return kOk;
}
