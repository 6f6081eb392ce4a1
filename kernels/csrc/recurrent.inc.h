// The gated delta rule, short causal convolutions, and doubly stochastic matrices.
//
// A column of a head's state S [dk, dv] never meets another: W columns stay in the cache while a
// row's tokens pass, one after the other. How a row is cut into steps changes no bit.

// ---- gated delta rule ---------------------------------------------------------------------------

// Columns [c, c + W) of one head of one row; `column` is [dk] vectors.
inline void delta_columns(const DeltaParams& p, int64_t row, int64_t head, int64_t c, vf* column) {
  const int64_t dk = p.key_dim, dv = p.value_dim;
  float* state = p.states + (row * p.num_heads + head) * dk * dv;
  for (int64_t k = 0; k < dk; ++k) column[k] = load_of<F32>(state + k * dv, c, dv);
  for (int64_t t = p.starts[row]; t < p.starts[row + 1]; ++t) {
    const int64_t at = t * p.num_heads + head;
    const float* key = p.k + at * dk;
    const float* query = p.q + at * dk;
    const float decay = p.decay[at];
    vf seen = vf{};
    for (int64_t k = 0; k < dk; ++k) {
      column[k] *= decay;
      seen += column[k] * key[k];
    }
    const vf change = (load_of<F32>(p.v + at * dv, c, dv) - seen) * p.beta[at];
    vf out = vf{};
    for (int64_t k = 0; k < dk; ++k) {
      column[k] += change * key[k];
      out += column[k] * query[k];
    }
    store_of<F32>(p.out + at * dv, c, dv, out);
  }
  for (int64_t k = 0; k < dk; ++k) store_of<F32>(state + k * dv, c, dv, column[k]);
}

inline int64_t delta_scratch_floats(int64_t key_dim) { return key_dim * W; }

inline int delta_rule(const DeltaParams& p, float* scratch) {
  const int64_t groups = (p.value_dim + W - 1) / W;
  const int64_t floats = delta_scratch_floats(p.key_dim);
  parallel_for(p.num_rows * p.num_heads * groups, [&](int64_t item, int thread) {
    const int64_t head = item / groups % p.num_heads;
    vf* column = reinterpret_cast<vf*>(scratch + thread * floats);
    delta_columns(p, item / groups / p.num_heads, head, item % groups * W, column);
  });
  return kOk;
}

// ---- causal convolution -------------------------------------------------------------------------

// Input of channel c at place i of a row: the tokens before, then its own.
inline vf conv_input(const ConvParams& p, int64_t row, int64_t i, int64_t c) {
  const int64_t before = p.size - 1;
  if (i < before) return load_of<F32>(p.states + (row * before + i) * p.channels, c, p.channels);
  return load_of<F32>(p.x + (p.starts[row] + i - before) * p.channels, c, p.channels);
}

inline void conv_row(const ConvParams& p, int64_t row, int64_t c) {
  const int64_t before = p.size - 1, count = p.starts[row + 1] - p.starts[row];
  for (int64_t i = 0; i < count; ++i) {
    vf acc = vf{};
    for (int64_t k = 0; k < p.size; ++k) {
      acc += conv_input(p, row, i + k, c) * load_of<F32>(p.weight + k * p.channels, c, p.channels);
    }
    store_of<F32>(p.out + (p.starts[row] + i) * p.channels, c, p.channels, activate(acc, kSilu));
  }
  for (int64_t k = 0; k < before; ++k) {
    const vf kept = conv_input(p, row, count + k, c);
    store_of<F32>(p.kept + (row * before + k) * p.channels, c, p.channels, kept);
  }
}

inline int causal_conv(const ConvParams& p) {
  const int64_t groups = (p.channels + W - 1) / W;
  const int64_t per_group = 2 * W * p.size * (p.starts[p.num_rows] + p.num_rows * p.size);
  over_rows(groups, per_group, [&](int64_t first, int64_t last) {
    for (int64_t g = first; g < last; ++g) {
      for (int64_t row = 0; row < p.num_rows; ++row) conv_row(p, row, g * W);
    }
  });
  return kOk;
}

// ---- doubly stochastic matrices -----------------------------------------------------------------

inline void divide_rows(float* m, int64_t n, float eps) {
  for (int64_t i = 0; i < n; ++i) {
    float sum = 0.0f;
    for (int64_t j = 0; j < n; ++j) sum += m[i * n + j];
    for (int64_t j = 0; j < n; ++j) m[i * n + j] /= sum + eps;
  }
}

inline void divide_columns(float* m, int64_t n, float eps) {
  for (int64_t j = 0; j < n; ++j) {
    float sum = 0.0f;
    for (int64_t i = 0; i < n; ++i) sum += m[i * n + j];
    for (int64_t i = 0; i < n; ++i) m[i * n + j] /= sum + eps;
  }
}

inline void softmax_rows(const float* x, float* m, int64_t n, float eps) {
  for (int64_t i = 0; i < n; ++i) {
    float top = x[i * n];
    for (int64_t j = 1; j < n; ++j) top = max_of(x[i * n + j], top);
    float sum = 0.0f;
    for (int64_t j = 0; j < n; ++j) sum += m[i * n + j] = exp_of(x[i * n + j] - top);
    for (int64_t j = 0; j < n; ++j) m[i * n + j] = m[i * n + j] / sum + eps;
  }
}

inline int sinkhorn(const SinkhornParams& p) {
  const int64_t size = p.n * p.n;
  over_rows(p.rows, 8 * size * p.iterations, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      float* m = p.out + r * size;
      softmax_rows(p.x + r * size, m, p.n, p.eps);
      divide_columns(m, p.n, p.eps);
      for (int64_t i = 1; i < p.iterations; ++i) {
        divide_rows(m, p.n, p.eps);
        divide_columns(m, p.n, p.eps);
      }
    }
  });
  return kOk;
}
