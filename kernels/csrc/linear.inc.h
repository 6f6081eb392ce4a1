// y[rows, out] = x[rows, in] . weight[out, in]^T (+ bias), over row-major weights.
//
// Every output is a sum in lanes over `in`, then over the lanes: one fixed order, whatever the
// number of rows. Rows are taken four at a time where there are four, because they share each
// vector of weights loaded; a row that is left over does the same sums alone.

constexpr int64_t kItemBytes = 1 << 16;  // weights of one work item, at most about
constexpr int64_t kThreadItems = 6;      // items of a thread, where there are panels for them
constexpr int kRowsTogether = W >= 8 ? W / 4 : 2;

// Sums in lanes of R rows of x with N rows of weights.
template <typename D, bool Dot, int R, int N>
inline void lane_sums(const typename D::T* const* x, const typename D::T* const* rows,
                      int64_t in_dim, const typename D::T* fetch, vf (&acc)[R * N]) {
#pragma GCC unroll 32
  for (int i = 0; i < R * N; ++i) acc[i] = vf{};
  int64_t d = 0;
  if constexpr (Dot) {
    for (; d + 32 <= in_dim; d += 32) {
#pragma GCC unroll 32
      for (int i = 0; i < R * N; ++i) {
        acc[i] = dot_pairs(acc[i], (const uint16_t*)x[i / N] + d, (const uint16_t*)rows[i % N] + d);
      }
      // One line of the next weights per line read.
      if (fetch != nullptr) {
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) __builtin_prefetch(fetch + (d / 32 * N + i) * 32, 0, 2);
      }
    }
  }
  for (; d + W <= in_dim; d += W) {
    vf a[R];
    for (int r = 0; r < R; ++r) a[r] = load<D>(x[r] + d);
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      const vf w = load<D>(rows[n] + d);
      for (int r = 0; r < R; ++r) acc[r * N + n] += a[r] * w;
    }
  }
  if (d < in_dim) {
    for (int n = 0; n < N; ++n) {
      const vf w = load_part<D>(rows[n] + d, in_dim - d);
      for (int r = 0; r < R; ++r) acc[r * N + n] += load_part<D>(x[r] + d, in_dim - d) * w;
    }
  }
}

template <typename D>
inline vf bias_of(const LinearParams& p, int64_t n) {
  if (p.bias == nullptr) return vf{};
  return load_of<D>(static_cast<const typename D::T*>(p.bias), n, p.out_dim);
}

// Outputs n .. n+W-1 of one row.
template <typename D>
inline void put_outputs(const LinearParams& p, int64_t row, int64_t n, vf y) {
  using T = typename D::T;
  if (p.wide) {
    T rounded[W];
    store<D>(rounded, y);
    store_of<F32>(static_cast<float*>(p.out) + row * p.out_dim, n, p.out_dim, load<D>(rounded));
  } else {
    store_of<D>(static_cast<T*>(p.out) + row * p.out_dim, n, p.out_dim, y);
  }
}

template <typename D>
struct Panel {
  const typename D::T* rows[W];   // weights of W outputs; the last one again beyond the end
  const typename D::T* fetch;     // the weights after them, or null
};

template <typename D>
inline Panel<D> panel_at(const LinearParams& p, int64_t n) {
  Panel<D> panel;
  const typename D::T* weight = static_cast<const typename D::T*>(p.weight);
  for (int i = 0; i < W; ++i) panel.rows[i] = weight + least(n + i, p.out_dim - 1) * p.in_dim;
  panel.fetch = n + 2 * W <= p.out_dim ? weight + (n + W) * p.in_dim : nullptr;
  return panel;
}

template <typename D, bool Dot>
inline void one_row(const LinearParams& p, const Panel<D>& panel, int64_t n, int64_t row) {
  using T = typename D::T;
  const T* x[1] = {static_cast<const T*>(p.x) + row * p.x_stride};
  vf acc[W];
  lane_sums<D, Dot, 1, W>(x, panel.rows, p.in_dim, row == 0 ? panel.fetch : nullptr, acc);
  const vf y = sums_of<W>(acc) + bias_of<D>(p, n);
  put_outputs<D>(p, row, n, y);
}

// Rows row .. row + kRowsTogether - 1, four outputs at a time.
template <typename D, bool Dot>
inline void some_rows(const LinearParams& p, const Panel<D>& panel, int64_t n, int64_t row) {
  using T = typename D::T;
  constexpr int R = kRowsTogether;
  const T* x[R];
  for (int r = 0; r < R; ++r) x[r] = static_cast<const T*>(p.x) + (row + r) * p.x_stride;
  float y[R][W];
  for (int i = 0; i < W; i += 4) {
    vf acc[R * 4];
    lane_sums<D, Dot, R, 4>(x, panel.rows + i, p.in_dim, nullptr, acc);
    for (int part = 0; part < R * 4; part += W) {
      const vf sums = sums_of<W>(acc + part);
      for (int j = 0; j < W; ++j) y[(part + j) / 4][i + (part + j) % 4] = sums[j];
    }
  }
  const vf bias = bias_of<D>(p, n);
  for (int r = 0; r < R; ++r) put_outputs<D>(p, row + r, n, loadf(y[r]) + bias);
}

template <typename D, bool Dot>
void linear_panel(const LinearParams& p, int64_t n) {
  const Panel<D> panel = panel_at<D>(p, n);
  int64_t row = 0;
  for (; row + kRowsTogether <= p.rows; row += kRowsTogether) some_rows<D, Dot>(p, panel, n, row);
  for (; row < p.rows; ++row) one_row<D, Dot>(p, panel, n, row);
}

// run(first, last, thread) over [0, panels) in items of up to kItemBytes of weights; small ones of
// small matrices, so that no thread waits long for another's last.
template <typename F>
void over_panels(int64_t panels, int64_t panel_bytes, const F& run) {
  const int64_t step = most<int64_t>(1, kItemBytes / panel_bytes);
  if (panels <= step) {
    run((int64_t)0, panels, 0);
    return;
  }
  const int64_t share = most<int64_t>(1, panels / (pool_num_threads() * kThreadItems));
  const int64_t count = least(step, share);
  parallel_for((panels + count - 1) / count, [&](int64_t i, int thread) {
    run(i * count, least(panels, (i + 1) * count), thread);
  });
}

template <typename D, bool Dot>
int linear_direct(const LinearParams& p) {
  const int64_t panels = (p.out_dim + W - 1) / W;
  over_panels(panels, W * p.in_dim * (int64_t)sizeof(typename D::T),
              [&](int64_t first, int64_t last, int) {
                for (int64_t i = first; i < last; ++i) linear_panel<D, Dot>(p, i * W);
              });
  return kOk;
}
