// Linear layers in bfloat16 on tile registers, over weights packed as tiles (tiles.h).
//
//     C[16 rows][16 outputs] += X[16 rows][32 in] . W[16 pairs of in][16 outputs x 2]
//
// Every output is summed by one register over `in`, in order: the number of rows changes nothing.
// Rows of x are read where they lie; those of a last part tile are copied, zeros below them.

constexpr int64_t kRowBlockBytes = 1 << 20;  // rows of x that a panel passes over: kept in L2
constexpr int64_t kFetchBytes = 8192;        // weights are prefetched this far ahead
constexpr int64_t kStepsTogether = 2;         // of coded weights: 4 KiB of tiles

inline bool linear_fits_tiles(const LinearParams& p) {
  return use_tiles && p.packing != kRowMajor && p.dtype == kBF16;
}

// The last rows of x, up to a multiple of 16.
inline int64_t tile_x_bytes(const LinearParams& p) { return p.rows % 16 ? 16 * p.in_dim * 2 : 0; }

// A panel of coded weights as tiles, for each thread: where many rows pass over it.
inline int64_t tile_panel_bytes(const LinearParams& p) {
  return p.packing == kCoded && p.rows > 32 ? p.in_dim * 64 : 0;
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
  uint16_t* out = static_cast<uint16_t*>(p.out) + first * p.out_dim + n;
  for (int64_t r = 0; r < count; ++r, out += p.out_dim) {
    const vf a = loadf(left + r * 16) + bias_left, b = loadf(right + r * 16) + bias_right;
    const __m512i pair = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    if (width == 32)
      _mm512_storeu_si512(out, pair);
    else
      _mm512_mask_storeu_epi16(out, (1u << width) - 1, pair);
  }
}

// Adds inputs [from, to) of up to 16 rows, or of up to 32 (Two); w: their weights as tiles.
template <bool Two>
inline void tile_steps(const TileRows& t, const uint16_t* w, int64_t from, int64_t to, bool fetch) {
  for (int64_t d = from; d < to; d += 32, w += 1024) {
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
}

// Outputs n .. n+31; `add` adds all inputs, with `tile_steps`.
template <bool Two, typename F>
inline void tile_outputs(const LinearParams& p, int64_t n, const TileRows& t, const F& add) {
  alignas(64) float c[4][256];
  _tile_zero(0);
  _tile_zero(1);
  if (Two) {
    _tile_zero(2);
    _tile_zero(3);
  }
  add();
  _tile_stored(0, c[0], 64);
  _tile_stored(1, c[1], 64);
  if (Two) {
    _tile_stored(2, c[2], 64);
    _tile_stored(3, c[3], 64);
  }
  store_tile_rows(p, n, t.first, least<int64_t>(16, t.count), c[0], c[1]);
  if (Two) store_tile_rows(p, n, t.first + 16, t.count - 16, c[2], c[3]);
}

// Outputs n .. n+31 from weights as tiles; `fetch`: they come from memory.
template <bool Two>
inline void tile_panel(const LinearParams& p, const uint16_t* w, int64_t n, const TileRows& t,
                       bool fetch) {
  tile_outputs<Two>(p, n, t, [&] { tile_steps<Two>(t, w, 0, p.in_dim, fetch); });
}

// The same from codes, a few steps of them at a time.
template <bool Two>
inline void coded_panel(const LinearParams& p, const uint8_t* w, int64_t n, const TileRows& t) {
  alignas(64) uint16_t tiles[kStepsTogether * 1024];
  const CodeForm form(p.code_form);
  tile_outputs<Two>(p, n, t, [&] {
    for (int64_t d = 0; d < p.in_dim; d += 32 * kStepsTogether) {
      const int64_t end = least(p.in_dim, d + 32 * kStepsTogether);
      expand_steps(form, w + d / 32 * form.step_bytes(), (end - d) / 32, tiles, true);
      tile_steps<Two>(t, tiles, d, end, false);
    }
  });
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

// Rows [first, last) of one panel; `tiles`: room for a panel where there are many rows.
inline void coded_block(const LinearParams& p, const uint16_t* rest, uint16_t* tiles,
                        int64_t panel, int64_t first, int64_t last) {
  const CodeForm form(p.code_form);
  const int64_t steps = p.in_dim / 32;
  const uint8_t* w = static_cast<const uint8_t*>(p.weight) + panel * steps * form.step_bytes();
  if (last - first > 32) {
    expand_steps(form, w, steps, tiles, true);
    tile_block(p, rest, tiles, panel, first, last, false);
    return;
  }
  const TileRows t = tile_rows(p, rest, first, last);
  if (t.count > 16)
    coded_panel<true>(p, w, panel * 32, t);
  else
    coded_panel<false>(p, w, panel * 32, t);
}

inline int linear_tiles(const LinearParams& p, void* workspace) {
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
        if (coded) {
          coded_block(p, rest, expanded + thread * p.in_dim * 32, i, first, last);
        } else {
          const uint16_t* w = static_cast<const uint16_t*>(p.weight) + i * p.in_dim * 32;
          tile_block(p, rest, w, i, first, last, first == 0);
        }
      }
      close_tiles();
    });
  }
  return kOk;
}
