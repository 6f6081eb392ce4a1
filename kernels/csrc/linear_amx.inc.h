// Linear layers in bfloat16 on tile registers, over weights packed as tiles (tiles.h).
//
//     C[16 rows][16 outputs] += X[16 rows][32 in] . W[16 pairs of in][16 outputs x 2]
//
// Every output is summed by one register over `in`, in order: the number of rows changes nothing.
// Rows of x are read where they lie; those of a last part tile are copied, zeros below them.
//
// Weights that are codes become tiles on the way. For up to 32 rows they are the left operand, as
// they come out of the codes, and rows of x the right one, as narrow as there are rows:
//
//     C[16 outputs][rows] += W[16 outputs][32 in] . X[16 pairs of in][rows x 2]
//
// which gives the same sums: a product of two numbers does not ask which is left.

constexpr int64_t kRowBlockBytes = 1 << 20;  // rows of x that a panel passes over: kept in L2
constexpr int64_t kFetchBytes = 8192;        // weights are prefetched this far ahead
constexpr int64_t kFewRows = 32;             // codes become tiles again for each panel

inline bool linear_fits_tiles(const LinearParams& p) {
  return use_tiles && p.packing != kRowMajor && p.dtype == kBF16;
}

inline bool is_few_coded(const LinearParams& p) {
  return p.packing == kCoded && p.rows <= kFewRows;
}

// Rows of x copied: the last ones up to a multiple of 16, or few of them as pairs.
inline int64_t tile_x_bytes(const LinearParams& p) {
  if (is_few_coded(p)) return p.rows > 1 ? p.rows * p.in_dim * 2 : 0;
  return p.rows % 16 ? 16 * p.in_dim * 2 : 0;
}

// A panel of coded weights as tiles, for each thread: where many rows pass over it.
inline int64_t tile_panel_bytes(const LinearParams& p) {
  return p.packing == kCoded && p.rows > kFewRows ? p.in_dim * 64 : 0;
}

inline int64_t tile_workspace_bytes(const LinearParams& p) {
  return tile_x_bytes(p) + pool_num_threads() * tile_panel_bytes(p);
}

struct TileRows {
  const uint16_t* x[2];  // of 16 rows each
  int64_t stride[2];     // bytes
  int64_t first;         // row of the output
  int64_t count;         // rows to store, 1..32
};

inline TileRows tile_rows(const LinearParams& p, const uint16_t* rest, int64_t first,
                          int64_t last) {
  TileRows t;
  t.first = first;
  t.count = least<int64_t>(32, last - first);
  const uint16_t* x = static_cast<const uint16_t*>(p.x);
  for (int64_t i = 0; i < 2; ++i) {
    const int64_t row = first + i * 16;
    const bool whole = row + 16 <= p.rows;
    t.x[i] = whole ? x + row * p.x_stride : rest;
    t.stride[i] = (whole ? p.x_stride : p.in_dim) * 2;
  }
  return t;
}

// c [rows 16][outputs 32] of one row tile to the output, 64 bytes at a time.
inline void store_tile_rows(const LinearParams& p, int64_t n, int64_t first, int64_t count,
                            const float* left, const float* right) {
  const int64_t width = least<int64_t>(32, p.out_dim - n);
  const vf bias_left = bias_of<BF16>(p, n);
  const vf bias_right = width > 16 ? bias_of<BF16>(p, n + 16) : vf{};
  const __mmask32 mask = (__mmask32)((1ull << width) - 1);
  for (int64_t r = 0; r < count; ++r) {
    const vf a = loadf(left + r * 16) + bias_left, b = loadf(right + r * 16) + bias_right;
    const __m512i pair = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    const int64_t place = (first + r) * p.out_dim + n;
    if (p.wide) {
      float* out = static_cast<float*>(p.out) + place;
      const vf low = widen(BF16{}, (vh)_mm512_castsi512_si256(pair));
      const vf high = widen(BF16{}, (vh)_mm512_extracti64x4_epi64(pair, 1));
      _mm512_mask_storeu_ps(out, (__mmask16)mask, (__m512)low);
      _mm512_mask_storeu_ps(out + 16, (__mmask16)(mask >> 16), (__m512)high);
    } else {
      _mm512_mask_storeu_epi16(static_cast<uint16_t*>(p.out) + place, mask, pair);
    }
  }
}

// Outputs n .. n+31 of up to 16 rows, or of up to 32 (Two), from weights as tiles; `fetch`: they
// come from memory.
template <bool Two>
inline void tile_panel(const LinearParams& p, const uint16_t* w, int64_t n, const TileRows& t,
                       bool fetch) {
  alignas(64) float c[4][256];
  _tile_zero(0);
  _tile_zero(1);
  if (Two) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t d = 0; d < p.in_dim; d += 32, w += 1024) {
    if (fetch) prefetch_row((const char*)w + kFetchBytes, 2048);
    _tile_loadd(4, t.x[0] + d, t.stride[0]);
    _tile_loadd(5, w, 64);
    _tile_loadd(6, w + 512, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 6);
    if (Two) {
      _tile_loadd(7, t.x[1] + d, t.stride[1]);
      _tile_dpbf16ps(2, 7, 5);
      _tile_dpbf16ps(3, 7, 6);
    }
  }
  _tile_stored(0, c[0], 64);
  _tile_stored(1, c[1], 64);
  if (Two) {
    _tile_stored(2, c[2], 64);
    _tile_stored(3, c[3], 64);
  }
  store_tile_rows(p, n, t.first, least<int64_t>(16, t.count), c[0], c[1]);
  if (Two) store_tile_rows(p, n, t.first + 16, t.count - 16, c[2], c[3]);
}

inline void tile_block(const LinearParams& p, const uint16_t* rest, const uint16_t* w,
                       int64_t panel, int64_t first, int64_t last, bool fetch) {
  for (int64_t row = first; row < last; row += 32) {
    const TileRows t = tile_rows(p, rest, row, last);
    if (t.count > 16)
      tile_panel<true>(p, w, panel * 32, t, fetch && row == first);
    else
      tile_panel<false>(p, w, panel * 32, t, fetch && row == first);
  }
}

// ---- few rows over codes ------------------------------------------------------------------------

// Up to 32 rows of x as one or two right operands: [in / 2 pairs][rows] words of 32 bits.
struct PairRows {
  const uint32_t* x[2];
  int64_t rows[2];
};

// One row is its own operand; of several, those of an operand lie side by side in `to`.
inline PairRows pair_rows(const LinearParams& p, uint32_t* to) {
  PairRows t{};
  const uint16_t* x = static_cast<const uint16_t*>(p.x);
  t.rows[0] = least<int64_t>(16, p.rows);
  t.rows[1] = p.rows - t.rows[0];
  t.x[0] = p.rows > 1 ? to : reinterpret_cast<const uint32_t*>(x);
  t.x[1] = to + t.rows[0] * p.in_dim / 2;
  if (p.rows == 1) return t;
  for (int64_t r = 0; r < p.rows; ++r, x += p.x_stride) {
    uint32_t* place = to + (r < 16 ? r : t.rows[0] * p.in_dim / 2 + r - 16);
    const int64_t stride = t.rows[r / 16];
    for (int64_t d = 0; d < p.in_dim; d += 2) __builtin_memcpy(place + d / 2 * stride, x + d, 4);
  }
  return t;
}

// c[16 outputs][rows] -> out[rows][16 outputs]
inline void turn_outputs(const float* c, int64_t rows, float* out) {
  if (rows == 1) {
    storef(out, loadf(c));
    return;
  }
  __m512i r[16];
  const __mmask16 mask = (__mmask16)((1u << rows) - 1);
  for (int i = 0; i < 16; ++i) r[i] = _mm512_maskz_loadu_epi32(mask, c + i * rows);
  transpose(r);
  for (int64_t i = 0; i < rows; ++i) _mm512_store_si512(out + i * 16, r[i]);
}

inline void store_outputs(const LinearParams& p, int64_t n, int64_t first, int64_t rows,
                          const float* left, const float* right) {
  alignas(64) float by_row[2][256];
  turn_outputs(left, rows, by_row[0]);
  turn_outputs(right, rows, by_row[1]);
  store_tile_rows(p, n, first, rows, by_row[0], by_row[1]);
}

// One step's weights, as tiles, times its pairs of x.
template <bool Two>
inline void add_step(const uint16_t* tiles, const PairRows& t, int64_t step) {
  _tile_loadd(4, t.x[0] + step * 16 * t.rows[0], t.rows[0] * 4);
  _tile_loadd(5, tiles, 64);
  _tile_dpbf16ps(0, 5, 4);
  _tile_loadd(6, tiles + 512, 64);
  _tile_dpbf16ps(1, 6, 4);
  if (Two) {
    _tile_loadd(7, t.x[1] + step * 16 * t.rows[1], t.rows[1] * 4);
    _tile_dpbf16ps(2, 5, 7);
    _tile_dpbf16ps(3, 6, 7);
  }
}

// Outputs n .. n+31. A step's codes are expanded while the tiles of the step before are read: tile
// registers wait for what has only just been stored.
template <bool Two>
inline void coded_panel(const LinearParams& p, const CodeForm& form, Expand expand,
                        const uint8_t* w, int64_t n, const PairRows& t) {
  alignas(64) uint16_t tiles[4][1024];
  alignas(64) float c[4][256];
  const int64_t steps = p.in_dim / 32, size = form.step_bytes();
  _tile_zero(0);
  _tile_zero(1);
  if (Two) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step <= steps; ++step, w += size) {
    if (step < steps) {
      prefetch_row((const char*)w + kCodedFetchBytes, size);
      expand(w, tiles[step % 4]);
    }
    if (step > 0) add_step<Two>(tiles[(step - 1) % 4], t, step - 1);
  }
  _tile_stored(0, c[0], t.rows[0] * 4);
  _tile_stored(1, c[1], t.rows[0] * 4);
  if (Two) {
    _tile_stored(2, c[2], t.rows[1] * 4);
    _tile_stored(3, c[3], t.rows[1] * 4);
  }
  store_outputs(p, n, 0, t.rows[0], c[0], c[1]);
  if (Two) store_outputs(p, n, 16, t.rows[1], c[2], c[3]);
}

// Registers as wide as there are rows: 0 to 3 are outputs, 4 and 7 rows of x.
inline TileConfig narrow_tiles(const PairRows& t) {
  TileConfig config;
  uint16_t* bytes = config.bytes_per_row;
  bytes[0] = bytes[1] = bytes[4] = (uint16_t)(t.rows[0] * 4);
  if (t.rows[1] > 0) bytes[2] = bytes[3] = bytes[7] = (uint16_t)(t.rows[1] * 4);
  return config;
}

inline int linear_few_coded(const LinearParams& p, void* workspace) {
  const PairRows t = pair_rows(p, static_cast<uint32_t*>(workspace));
  const CodeForm form(p.code_form);
  const Expand expand = expand_of(form);
  const TileConfig config = narrow_tiles(t);
  const int64_t panel_bytes = p.in_dim / 32 * form.step_bytes();
  over_panels((p.out_dim + 31) / 32, panel_bytes, [&](int64_t from, int64_t to, int) {
    open_tiles(config);
    for (int64_t i = from; i < to; ++i) {
      const uint8_t* w = static_cast<const uint8_t*>(p.weight) + i * panel_bytes;
      if (p.rows > 16)
        coded_panel<true>(p, form, expand, w, i * 32, t);
      else
        coded_panel<false>(p, form, expand, w, i * 32, t);
    }
    close_tiles();
  });
  return kOk;
}

// ---- everything else ----------------------------------------------------------------------------

inline int linear_tiles(const LinearParams& p, void* workspace) {
  if (is_few_coded(p)) return linear_few_coded(p, workspace);
  uint16_t* rest = static_cast<uint16_t*>(workspace);
  const int64_t whole = p.rows / 16 * 16;
  for (int64_t r = whole; p.rows > whole && r < whole + 16; ++r) {
    uint16_t* to = rest + (r - whole) * p.in_dim;
    if (r < p.rows)
      __builtin_memcpy(to, static_cast<const uint16_t*>(p.x) + r * p.x_stride,
                       (size_t)p.in_dim * 2);
    else
      __builtin_memset(to, 0, (size_t)p.in_dim * 2);
  }
  uint16_t* expanded = rest + tile_x_bytes(p) / 2;
  const int64_t panels = (p.out_dim + 31) / 32;
  const int64_t block = most<int64_t>(32, kRowBlockBytes / 2 / p.in_dim / 32 * 32);
  const bool coded = p.packing == kCoded;
  const int64_t panel_bytes =
      coded ? p.in_dim / 32 * CodeForm(p.code_form).step_bytes() : 64 * p.in_dim;
  for (int64_t first = 0; first < p.rows; first += block) {
    const int64_t last = least(p.rows, first + block);
    over_panels(panels, panel_bytes, [&](int64_t from, int64_t to, int thread) {
      open_tiles();
      for (int64_t i = from; i < to; ++i) {
        const uint8_t* w = static_cast<const uint8_t*>(p.weight) + i * panel_bytes;
        if (coded) {
          uint16_t* tiles = expanded + thread * p.in_dim * 32;
          expand_steps(CodeForm(p.code_form), w, p.in_dim / 32, tiles);
          tile_block(p, rest, tiles, i, first, last, false);
        } else {
          tile_block(p, rest, reinterpret_cast<const uint16_t*>(w), i, first, last, first == 0);
        }
      }
      close_tiles();
    });
  }
  return kOk;
}
