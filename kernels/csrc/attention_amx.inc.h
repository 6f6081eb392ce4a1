// Attention in bfloat16 on tile registers, for one row as for many: a token's result is the same
// bit for bit whether it is decoded alone or within a prompt.
//
//     many rows   S[16 rows][16 keys]  = Q[16][32] . K packed     packed for all row groups
//     few rows    S[16 keys][16 rows]  = K[16][32] . Q packed     keys read where they lie
//
// Both give the same sums. Softmax, weights and values are the same code.

inline bool fits_tiles(const AttentionParams& p) {
  return use_tiles && p.q_dtype == kBF16 && p.kv_dtype == kBF16 && p.head_dim % 32 == 0;
}

constexpr int kTileRows = 16;

// Packed keys and values of one block; scores and weights of a few groups of 16 rows; a block of
// scores by key.
inline int64_t tile_scratch_bytes(int64_t pitch) {
  return 2 * kKeyBlock * pitch * 2 + 4 * 16 * kKeyBlock * (4 + 2) + kKeyBlock * 64 + 5 * 64;
}

struct PackedBlock {
  uint16_t* key;    // tiles [4 key groups][dim / 32] of B: k = dim, n = key; few rows: queries
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

// ---- few rows: scores by key --------------------------------------------------------------------

// B tiles [dim / 32] of 16 queries: k = dim, n = query.
inline void pack_queries(const uint16_t* q, int64_t dim, uint16_t* out) {
  for (int64_t d = 0; d < dim; d += 32, out += 512) {
    __m512i r[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(q + i * dim + d);
    transpose(r);
    for (int i = 0; i < 16; ++i) _mm512_store_si512(out + i * 32, r[i]);
  }
}

// 16 keys of a block as rows of an A operand, `stride` bytes apart; copied where pages are small.
inline const uint16_t* key_rows(const KeyBlock<BF16>& keys, int group, int64_t dim,
                                int64_t page_size, uint16_t* copy) {
  const int first = most(keys.begin, group * 16), last = least(keys.end, group * 16 + 16);
  if (page_size % 16 == 0) return keys.key[first] - (first - group * 16) * dim;
  for (int j = first; j < last; ++j) {
    __builtin_memcpy(copy + (j - group * 16) * dim, keys.key[j], (size_t)dim * 2);
  }
  return copy;
}

// by_key[64][16] of 16 queries. What lies at places outside [begin, end) is not a score.
inline void scores_by_key(const KeyBlock<BF16>& keys, const uint16_t* queries, int64_t dim,
                          int64_t page_size, uint16_t* copy, float* by_key) {
  for (int group = keys.begin / 16; group * 16 < keys.end; ++group) {
    const uint16_t* a = key_rows(keys, group, dim, page_size, copy);
    _tile_zero(0);
    for (int64_t d = 0; d < dim; d += 32) {
      _tile_loadd(4, a + d, dim * 2);
      _tile_loadd(5, queries + d * 16, 64);
      _tile_dpbf16ps(0, 4, 5);
    }
    _tile_stored(0, by_key + group * 256, 64);
  }
}

// by_key[64][16] -> scores[row][64] of rows r0..r0+3.
inline void turn_scores(const float* by_key, int r0, float* scores) {
  for (int j = 0; j < kKeyBlock; j += 16) {
    __m512 x[4];
    for (int i = 0; i < 4; ++i) {
      const float* at = by_key + (j + i) * 16 + r0;  // keys j + i, + 4, + 8, + 12
      x[i] = _mm512_castps128_ps512(_mm_loadu_ps(at));
      x[i] = _mm512_insertf32x4(x[i], _mm_loadu_ps(at + 64), 1);
      x[i] = _mm512_insertf32x4(x[i], _mm_loadu_ps(at + 128), 2);
      x[i] = _mm512_insertf32x4(x[i], _mm_loadu_ps(at + 192), 3);
    }
    const __m512 a = _mm512_unpacklo_ps(x[0], x[1]), b = _mm512_unpackhi_ps(x[0], x[1]);
    const __m512 c = _mm512_unpacklo_ps(x[2], x[3]), d = _mm512_unpackhi_ps(x[2], x[3]);
    float* to = scores + r0 * kKeyBlock + j;
    _mm512_storeu_ps(to, _mm512_shuffle_ps(a, c, 0x44));
    _mm512_storeu_ps(to + kKeyBlock, _mm512_shuffle_ps(a, c, 0xee));
    _mm512_storeu_ps(to + 2 * kKeyBlock, _mm512_shuffle_ps(b, d, 0x44));
    _mm512_storeu_ps(to + 3 * kKeyBlock, _mm512_shuffle_ps(b, d, 0xee));
  }
}

// ---- softmax of up to 16 rows -------------------------------------------------------------------

// Scale and cap the scores of the rows, hide what a row may not see -> each row's maximum.
template <bool Masked>
inline vf prepare_scores(const Tile& t, int64_t m0, int rows, const KeyBlock<BF16>& keys,
                         float* scores) {
  vf lane;
  for (int i = 0; i < W; ++i) lane[i] = (float)i;
  const vf hidden = splat(-__builtin_inff());
  vf tops[W];
  for (int r = rows; r < W; ++r) tops[r] = hidden;
  for (int r = 0; r < rows; ++r) {
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

// Scores of up to 16 rows -> bfloat16 weights; updates top, sum and out of the rows.
inline void soften_tile(const Tile& t, int64_t m0, const KeyBlock<BF16>& keys, float* scores,
                        uint16_t* weights) {
  const int rows = (int)least<int64_t>(kTileRows, t.rows - m0);
  const bool all_visible = keys.begin == 0 && keys.end == kKeyBlock &&
                           t.visible_begin(m0 + rows - 1) <= keys.start &&
                           t.visible_end(m0) >= keys.start + kKeyBlock;
  const vf block_top = all_visible ? prepare_scores<false>(t, m0, rows, keys, scores)
                                   : prepare_scores<true>(t, m0, rows, keys, scores);
  const vf old_top = loadf(t.top + m0);
  const vf new_top = max_of(old_top, block_top);
  const vf base = new_top == -__builtin_inff() ? splat(0.0f) : new_top;
  const vf shrink = exp_of(old_top - base);
  vf totals[W];
  for (int r = rows; r < W; ++r) totals[r] = vf{};
  for (int r = 0; r < rows; ++r) {
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
  for (int r = 0; r < rows; ++r) {
    if (new_top[r] == old_top[r]) continue;
    float* out = t.out + (m0 + r) * t.pitch;
    for (int64_t d = 0; d < t.pitch; d += W) storef(out + d, loadf(out + d) * shrink[r]);
  }
}

// ---- blocks of keys -----------------------------------------------------------------------------

// Several tiles take each step together: tile registers cannot read what has only just been
// stored without waiting for it to reach the cache.
constexpr int kTilesTogether = 2;

struct TileBuffers {
  float* scores;      // [kTilesTogether][16][64]
  uint16_t* weights;  // [kTilesTogether][16][64]
  float* by_key;      // [64][16]
};

inline bool sees(const Tile& t, int64_t m, const KeyBlock<BF16>& keys) {
  const int64_t last = least(m + kTileRows - 1, t.rows - 1);
  return t.visible_end(last) > keys.start + keys.begin &&
         t.visible_begin(m) < keys.start + keys.end;
}

inline void many_rows_block(const Tile& t, const KeyBlock<BF16>& keys, const PackedBlock& packed,
                            const TileBuffers& buffers) {
  constexpr int kScores = kTileRows * kKeyBlock;
  int64_t together[kTilesTogether];
  int count = 0;
  for (int64_t m = 0; m < t.rows; m += kTileRows) {
    if (sees(t, m, keys)) together[count++] = m;
    if (count < kTilesTogether && m + kTileRows < t.rows) continue;
    for (int i = 0; i < count; ++i) {
      tile_scores(t.q_bf16 + together[i] * t.dim, packed.key, t.dim, buffers.scores + i * kScores);
    }
    for (int i = 0; i < count; ++i) {
      soften_tile(t, together[i], keys, buffers.scores + i * kScores,
                  buffers.weights + i * kScores);
    }
    for (int i = 0; i < count; ++i) {
      tile_weigh(buffers.weights + i * kScores, packed.value, t.dim, t.out + together[i] * t.pitch,
                 t.pitch);
    }
    count = 0;
  }
}

// One group of 16 rows or less; `packed.key` are the queries.
inline void few_rows_block(const Tile& t, const KeyBlock<BF16>& keys, const PackedBlock& packed,
                           int64_t page_size, uint16_t* copy, const TileBuffers& buffers) {
  scores_by_key(keys, packed.key, t.dim, page_size, copy, buffers.by_key);
  for (int r = 0; r < t.rows; r += 4) turn_scores(buffers.by_key, r, buffers.scores);
  soften_tile(t, 0, keys, buffers.scores, buffers.weights);
  tile_weigh(buffers.weights, packed.value, t.dim, t.out, t.pitch);
}

inline void prefetch_block(const KeyBlock<BF16>& keys, int64_t value_offset, int64_t dim) {
  for (int j = keys.begin; j < keys.end; ++j) prefetch_row(keys.key[j], dim * 2);
  for (int j = keys.begin; j < keys.end; ++j) prefetch_row(keys.key[j] + value_offset, dim * 2);
}

// `t.q_bf16` and `t.out` have room for rows up to a multiple of 16; the rows beyond are zero.
inline void attend_tiles(Tile& t, const PageReader<BF16>& pages, int64_t lo, int64_t hi,
                         Scratch scratch) {
  PackedBlock packed;
  packed.key = scratch.take<uint16_t>(kKeyBlock * t.dim);
  packed.value = scratch.take<uint16_t>(kKeyBlock * t.dim);
  TileBuffers buffers;
  buffers.scores = scratch.take<float>(kTilesTogether * kTileRows * kKeyBlock);
  buffers.weights = scratch.take<uint16_t>(kTilesTogether * kTileRows * kKeyBlock);
  buffers.by_key = scratch.take<float>(kKeyBlock * kTileRows);
  __builtin_memset(buffers.weights, 0, kTilesTogether * kTileRows * kKeyBlock * 2);
  const bool few = t.rows <= kTileRows;
  uint16_t* copy = packed.key + 16 * t.dim;  // few rows leave it free
  if (few) pack_queries(t.q_bf16, t.dim, packed.key);
  KeyBlock<BF16> blocks[2];
  int64_t start = lo / kKeyBlock * kKeyBlock;
  pages.locate(start, lo, hi, blocks[0]);
  prefetch_block(blocks[0], pages.value_offset, t.dim);
  open_tiles();
  for (int now = 0; start < hi; now ^= 1) {
    const KeyBlock<BF16>& keys = blocks[now];
    start += kKeyBlock;
    if (start < hi) {
      pages.locate(start, lo, hi, blocks[now ^ 1]);
      prefetch_block(blocks[now ^ 1], pages.value_offset, t.dim);
    }
    pack_values(keys, t.dim, pages.value_offset, packed.value);
    if (few) {
      few_rows_block(t, keys, packed, pages.p.page_size, copy, buffers);
    } else {
      pack_keys(keys, t.dim, packed.key);
      many_rows_block(t, keys, packed, buffers);
    }
  }
  close_tiles();
}
