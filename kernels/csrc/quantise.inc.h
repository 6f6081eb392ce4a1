// Vectors at one byte a number, with a float32 scale each: to such a copy, and back.
//
// On the calling thread alone, as copies of blocks are. Back is one product and one rounding, so
// every instruction set reads the same bytes; the way out rounds to nearest, ties to even.

typedef int8_t vb __attribute__((vector_size(SW_WIDTH)));

constexpr float kSmallest = 1e-30f;  // a vector without a larger number is kept as zeros

// Whole numbers by magnitude below 2^22, to nearest.
inline vf whole_of(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23
  return (x + magic) - magic;
}

struct Int8 {
  static constexpr float kTop = 127.0f;
  static vi encode(vf x) { return __builtin_convertvector(whole_of(x), vi); }
  static vf decode(vi x) { return __builtin_convertvector(x, vf); }
};

// e4m3: sign, 4 bits of exponent with bias 7, 3 bits of fraction; 0x7f and 0xff are no numbers.
struct E4M3 {
  static constexpr float kTop = 448.0f;
  static vi encode(vf x) {
    const vu bits = as_bits(x);
    const vu size = bits & 0x7fffffffu;
    const vu normal = ((size + 0x7ffffu + ((size >> 20) & 1u)) >> 20) - (120u << 3);
    // Below 2^-6 numbers are multiples of 2^-9, which is the last bit of a float near 2^14.
    const vf raised = as_float(size) + 16384.0f;
    const vu small = as_bits(raised) - 0x46800000u;
    const vu number = size < 0x3c800000u ? small : normal;
    return (vi)(number | ((bits >> 24) & 0x80u));
  }
  static vf decode(vi x) {
    const vu byte = (vu)x & 0xffu;
    const vu size = byte & 0x7fu;
    const vf small = __builtin_convertvector((vi)size, vf) * 0.001953125f;  // 2^-9
    const vf normal = as_float((size << 20) + (120u << 23));
    vf out = size < 8u ? small : normal;
    out = size == 0x7fu ? as_float(vu{} + 0x7fc00000u) : out;
    return as_float(as_bits(out) | ((byte & 0x80u) << 24));
  }
};

inline void store_bytes(uint8_t* p, vi x, int64_t count) {
  const vb bytes = __builtin_convertvector(x, vb);
  __builtin_memcpy(p, &bytes, (size_t)least<int64_t>(count, W));
}
inline vi load_bytes(const uint8_t* p, int64_t count) {
  vb bytes = {};
  __builtin_memcpy(&bytes, p, (size_t)least<int64_t>(count, W));
  return __builtin_convertvector(bytes, vi);
}

// Scale of a vector; NaN where it holds anything that is not finite.
template <typename D, typename Q>
float scale_of(const typename D::T* x, int64_t dim) {
  vf top = vf{}, rest = vf{};
  for (int64_t d = 0; d < dim; d += W) {
    const vf v = load_of<D>(x, d, dim);
    top = max_of(top, v < 0.0f ? -v : v);
    rest += v * 0.0f;
  }
  const float sum = sum_of(rest), largest = max_in(top);
  if (sum != sum) return sum;
  return largest < kSmallest ? 1.0f : largest / Q::kTop;
}

template <typename D, typename Q>
void quantise_layer(const QuantiseParams& p, const typename D::T* x, uint8_t* copy) {
  uint8_t* numbers = copy + 4 * p.vectors;
  for (int64_t v = 0; v < p.vectors; ++v, x += p.dim, numbers += p.dim) {
    const float scale = scale_of<D, Q>(x, p.dim);
    __builtin_memcpy(copy + 4 * v, &scale, 4);
    for (int64_t d = 0; d < p.dim; d += W) {
      vf y = load_of<D>(x, d, p.dim) / scale;
      y = y > Q::kTop ? splat(Q::kTop) : y;
      y = y < -Q::kTop ? splat(-Q::kTop) : y;
      store_bytes(numbers + d, Q::encode(y), p.dim - d);
    }
  }
  for (; numbers < copy + p.copy_bytes; ++numbers) *numbers = 0;
}

template <typename D, typename Q>
void dequantise_layer(const QuantiseParams& p, typename D::T* x, const uint8_t* copy) {
  const uint8_t* numbers = copy + 4 * p.vectors;
  for (int64_t v = 0; v < p.vectors; ++v, x += p.dim, numbers += p.dim) {
    float scale;
    __builtin_memcpy(&scale, copy + 4 * v, 4);
    for (int64_t d = 0; d < p.dim; d += W) {
      store_of<D>(x, d, p.dim, Q::decode(load_bytes(numbers + d, p.dim - d)) * scale);
    }
  }
}

template <typename D, typename Q>
int quantise_layers(const QuantiseParams& p) {
  using T = typename D::T;
  for (int64_t layer = 0; layer < p.num_layers; ++layer) {
    T* x = static_cast<T*>(p.payload) + layer * p.vectors * p.dim;
    uint8_t* copy = p.copy + layer * p.copy_bytes;
    if (p.back)
      dequantise_layer<D, Q>(p, x, copy);
    else
      quantise_layer<D, Q>(p, x, copy);
  }
  return kOk;
}

template <typename D>
int quantise_as(const QuantiseParams& p) {
  switch (p.kind) {
    case kInt8: return quantise_layers<D, Int8>(p);
    case kE4M3: return quantise_layers<D, E4M3>(p);
    default: return kUnsupported;
  }
}

inline int quantise(const QuantiseParams& p) {
  switch (p.dtype) {
    case kF32: return quantise_as<F32>(p);
    case kBF16: return quantise_as<BF16>(p);
    case kF16: return quantise_as<F16>(p);
    default: return kUnsupported;
  }
}
