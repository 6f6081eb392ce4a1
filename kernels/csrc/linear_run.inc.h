// Chooses the path of a linear layer: by how the weights are packed, never by the number of rows.

inline int linear(const LinearParams& p, void* workspace) {
  if (p.packing != kRowMajor) {
#ifdef SW_AMX
    if (linear_fits_tiles(p)) return linear_tiles(p, workspace);
#endif
    return kUnsupported;
  }
  (void)workspace;
  switch (p.dtype) {
    case kF32: return linear_direct<F32, false>(p);
    case kBF16: return linear_direct<BF16, kHasDot>(p);
    case kF16: return linear_direct<F16, false>(p);
    default: return kUnsupported;
  }
}

inline int64_t linear_workspace_bytes(const LinearParams& p) {
#ifdef SW_AMX
  if (linear_fits_tiles(p)) return tile_workspace_bytes(p);
#endif
  (void)p;
  return 0;
}
