// y[rows, out] = x[rows, in] . weight[out, in]^T (+ bias) for few rows: bound by reading weights.
//
// Weights stay row-major as torch has them (large row counts go to torch's own matmul on the same
// memory). A panel of W output rows is read once from memory and reused from cache by every x row.

constexpr int64_t kItemBytes = 1 << 16;  // weights of one work item, about

// Dot products of one x row with W weight rows.
template <typename D, bool Dot>
inline vf panel_dots(const typename D::T* x, const typename D::T* const* rows, int64_t in_dim,
                     const typename D::T* fetch) {
  vf acc[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) acc[i] = vf{};
  int64_t d = 0;
  if constexpr (Dot) {
    for (; d + 32 <= in_dim; d += 32) {
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) {
        acc[i] = dot_pairs(acc[i], (const uint16_t*)x + d, (const uint16_t*)rows[i] + d);
      }
      // One line of the next panel per line read.
      if (fetch != nullptr) {
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) __builtin_prefetch(fetch + (d / 32 * W + i) * 32, 0, 2);
      }
    }
  }
  for (; d + W <= in_dim; d += W) {
    const vf a = load<D>(x + d);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) acc[i] += a * load<D>(rows[i] + d);
  }
  if (d < in_dim) {
    const vf a = load_part<D>(x + d, in_dim - d);
    for (int i = 0; i < W; ++i) acc[i] += a * load_part<D>(rows[i] + d, in_dim - d);
  }
  return sums_of<W>(acc);
}

template <typename D>
inline vf bias_of(const LinearParams& p, int64_t n) {
  if (p.bias == nullptr) return vf{};
  return load_of<D>(static_cast<const typename D::T*>(p.bias), n, p.out_dim);
}

template <typename D, bool Dot>
void linear_panel(const LinearParams& p, int64_t n) {
  using T = typename D::T;
  const T* weight = static_cast<const T*>(p.weight);
  const T* rows[W];
  for (int i = 0; i < W; ++i) rows[i] = weight + least(n + i, p.out_dim - 1) * p.in_dim;
  const vf bias = bias_of<D>(p, n);
  const T* fetch = n + 2 * W <= p.out_dim ? weight + (n + W) * p.in_dim : nullptr;
  for (int64_t r = 0; r < p.rows; ++r) {
    const T* x = static_cast<const T*>(p.x) + r * p.x_stride;
    const vf y = panel_dots<D, Dot>(x, rows, p.in_dim, r == 0 ? fetch : nullptr) + bias;
    store_of<D>(static_cast<T*>(p.out) + r * p.out_dim, n, p.out_dim, y);
  }
}

// run(first, last) over [0, panels) in items of about kItemBytes of weights.
template <typename F>
void over_panels(int64_t panels, int64_t panel_bytes, const F& run) {
  const int64_t step = most<int64_t>(1, kItemBytes / panel_bytes);
  if (panels <= step) {
    run((int64_t)0, panels);
    return;
  }
  parallel_for((panels + step - 1) / step, [&](int64_t i, int) {
    run(i * step, least(panels, (i + 1) * step));
  });
}

template <typename D, bool Dot>
int linear_direct(const LinearParams& p) {
  const int64_t panels = (p.out_dim + W - 1) / W;
  over_panels(panels, W * p.in_dim * (int64_t)sizeof(typename D::T),
              [&](int64_t first, int64_t last) {
                for (int64_t i = first; i < last; ++i) linear_panel<D, Dot>(p, i * W);
              });
  return kOk;
}
