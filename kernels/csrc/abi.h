// The C ABI between Python (ctypes) and the native kernels: one pointer to a parameter struct.
//
// Plain structs of pointers, 64-bit integers and floats; no torch, no Python. `kernels/abi.py`
// mirrors every struct field by field, and a test compares the sizes.
//
// This file does not say how anything is computed.
#pragma once

#include <stdint.h>

namespace sw {

constexpr int32_t kAbiVersion = 6;

enum DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

enum Status : int32_t {
  kOk = 0,
  kBadBlock = 1,     // a page table names a block outside the pool; see `bad_block`
  kNoMemory = 2,     // scratch memory could not be allocated
  kUnsupported = 3,  // a dtype or size that no kernel takes
  kBadPosition = 4,  // a position outside the rotary tables
};

// T packed tokens, R rows, Hq/Hkv heads, D head dim, P page size, B blocks of a pool
// [B, 2, Hkv, P, D]. Strides are in elements.
struct AttentionParams {
  const void* q;             // [T, Hq, D], token stride q_stride
  void* out;                 // [T, Hq, D] contiguous, dtype of q
  void* kv;                  // [B, 2, Hkv, P, D], block stride kv_stride
  const void* k;             // append: [T, Hkv, D], token stride k_stride
  const void* v;             // append: [T, Hkv, D], token stride v_stride
  const float* sinks;        // [Hq] or null
  const int32_t* query_starts;    // [R + 1]
  const int32_t* context_lens;    // [R]
  const int32_t* context_starts;  // [R]
  const int32_t* page_table;      // [R, table_stride]
  const uint8_t* write_mask;      // [R]
  int64_t num_rows;
  int64_t num_q_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t page_size;
  int64_t table_stride;
  int64_t num_blocks;
  int64_t kv_stride;
  int64_t q_stride;
  int64_t k_stride;
  int64_t v_stride;
  int64_t window;          // 0: none
  int64_t checked_blocks;  // num_blocks for which the page table was last checked; 0: never
  int64_t bad_block;       // out
  int32_t q_dtype;
  int32_t kv_dtype;
  int32_t new_dtype;  // of k and v
  float scale;
  float soft_cap;  // 0: none
};

struct NormParams {
  const void* x;         // [rows, dim], row stride x_stride
  const void* residual;  // [rows, dim] contiguous, or null
  const void* weight;    // [dim]
  void* sum;             // [rows, dim]: x + residual; unused without residual
  void* out;             // [rows, dim]
  int64_t rows;
  int64_t dim;
  int64_t x_stride;
  int32_t dtype;
  int32_t weight_dtype;
  float eps;
  float offset;
};

struct RopeParams {
  void* q;  // [T, Hq, D], token stride q_stride; rotated in place
  void* k;  // [T, Hkv, D], token stride k_stride
  const float* cos;  // [max_positions, half]
  const float* sin;
  const int64_t* positions;  // [T]
  int64_t num_tokens;
  int64_t num_q_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t half;           // pairs (i, i + half)
  int64_t max_positions;  // rows of cos and sin
  int64_t q_stride;
  int64_t k_stride;
  int32_t dtype;
};

enum Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

struct ActParams {
  const void* gate_up;  // [rows, 2 * dim], row stride x_stride
  void* out;            // [rows, dim]
  int64_t rows;
  int64_t dim;
  int64_t x_stride;
  int32_t dtype;
  int32_t kind;
};

enum Packing : int32_t { kRowMajor = 0, kTiles = 1, kCoded = 2 };  // see tiles.h, coded.h

struct LinearParams {
  const void* x;       // [rows, in], row stride x_stride
  const void* weight;  // [out_dim, in] contiguous, or packed
  const void* bias;    // [out_dim] of the same dtype, or null
  void* out;           // [rows, out_dim]
  int64_t rows;
  int64_t in_dim;
  int64_t out_dim;
  int64_t x_stride;
  int32_t dtype;  // of everything
  int32_t packing;  // of the weight
  int32_t code_form;  // of a coded one
  int32_t wide;       // 1: `out` is float32, of numbers that were rounded to `dtype`
};

// The layers of a dense decoder in one call: what is fixed when the model is loaded ...
struct LayerMatrix {
  const void* weight;  // as in LinearParams
  const void* bias;    // or null
  int64_t in_dim;
  int64_t out_dim;
  int32_t packing;
  int32_t code_form;
};

struct LayerWeights {
  LayerMatrix qkv, output, gate_up, down;
  const void* input_norm;
  const void* q_norm;          // or null, like k_norm
  const void* k_norm;
  const void* attention_norm;  // of what attention adds, or null
  const void* mlp_norm;
  const void* output_norm;     // of what the MLP adds, or null
  const float* sinks;          // or null
  const float* cos;            // as in RopeParams
  const float* sin;
  int64_t half;
  int64_t max_positions;
};

// ... where a layer's keys and values lie, as long as pools do not move ...
struct LayerPool {
  void* kv;
  int64_t num_blocks;
  int64_t kv_stride;
  int32_t group;   // of the step's plans
  int32_t writes;  // 0: the layer reads what another has written
};

// ... and one step. Everything is of one dtype but pools and sinks.
struct LayersParams {
  const LayerWeights* layers;
  const LayerPool* pools;         // of each layer
  AttentionParams* const* plans;  // of each group; only those that layers name are looked at
  const void* final_norm;         // or null: `out` and `residual` are still to be added
  const int64_t* positions;       // [T]
  void* residual;                 // [T, hidden]: in, embeddings; out, the residual stream
  void* out;                      // [T, hidden]
  void* arena;                    // `sw_layers_arena` bytes
  int64_t num_layers;
  int64_t num_tokens;
  int64_t hidden;
  int64_t inner;
  int64_t num_q_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t failed_layer;  // out: where the status comes from
  int32_t dtype;
  int32_t activation;
  float eps;
  float offset;
};

// Packing [out_dim, in] bfloat16 weights into tiles, and unpacking some rows of them.
struct TileParams {
  const void* weight;   // pack: [out_dim, in] contiguous
  void* tiles;          // [round_up(out_dim, 32) * in]
  const int64_t* rows;  // unpack: [num_rows] numbers below out_dim
  void* out;            // unpack: [num_rows, in]
  int64_t in_dim;       // a multiple of 32
  int64_t out_dim;
  int64_t num_rows;
};

// The same for weights kept as codes; see coded.h.
struct CodedParams {
  const int8_t* codes;   // pack: [out_dim, in]
  const void* scales;    // pack: [out_dim, in / 32 * subs] float16 or float32
  const void* offsets;   // pack: the same, or null
  void* coded;           // `coded_bytes`
  const int64_t* rows;   // unpack: [num_rows] numbers below out_dim
  void* out;             // unpack: [num_rows, in] bfloat16
  int64_t in_dim;        // a multiple of 32
  int64_t out_dim;
  int64_t num_rows;
  int32_t code_form;
  int32_t reserved;
};

struct DigestParams {
  const uint8_t* base;
  const int32_t* blocks;  // [num_blocks] rows of base
  uint64_t* out;          // [num_blocks]
  int64_t num_blocks;
  int64_t block_stride;  // bytes
  int64_t block_bytes;
};

enum BlockCopy : int32_t {
  kToRows = 0,
  kToBlocks = 1,
  kToBlocksAndHandBack = 2,  // rows that a medium will be read into again, soon
};

// Blocks of all layers of a group, copied out to rows or back. A row holds a block's layers one
// after the other.
struct BlockRowsParams {
  uint8_t* const* layers;  // [num_layers] pools
  const int32_t* blocks;   // [num_blocks]
  uint8_t* const* rows;    // [num_blocks]
  uint64_t* out;           // [num_blocks, num_layers] digests of what was copied
  int64_t num_layers;
  int64_t num_blocks;
  int64_t block_stride;  // bytes, the same in all layers
  int64_t layer_bytes;   // of one block
  int32_t direction;     // BlockCopy
};

// Neighbouring records of a file, read piece by piece and copied into blocks of all layers of a
// group. A record is a head and a row (see `BlockRowsParams`), padded at its end.
struct ReadRecordsParams {
  uint8_t* const* layers;  // [num_layers] pools
  const int32_t* blocks;   // [num_records]
  uint8_t* buffer;         // of one piece; aligned as the file wants it
  uint8_t* heads;          // [num_records, head_bytes] out
  uint64_t* out;           // [num_records, num_layers] digests of what was copied
  int64_t num_layers;
  int64_t num_records;
  int64_t block_stride;  // bytes, the same in all layers
  int64_t layer_bytes;   // of one block
  int64_t offset;        // in the file
  int64_t record_bytes;
  int64_t head_bytes;
  int64_t buffer_bytes;  // at least record_bytes
  int64_t num_read;      // out: records that are in their blocks
  int32_t fd;
  int32_t error;  // out: errno of the read that failed, or 0
};

enum Quantised : int32_t { kInt8 = 0, kE4M3 = 1 };

// Layers of vectors, to or from a copy: scales [vectors] float32, numbers [vectors, dim] of one
// byte, zeros up to copy_bytes.
struct QuantiseParams {
  void* payload;       // [num_layers, vectors, dim] of dtype
  uint8_t* copy;       // [num_layers, copy_bytes]
  int64_t num_layers;
  int64_t vectors;     // of a layer
  int64_t dim;
  int64_t copy_bytes;  // of a layer
  int32_t dtype;
  int32_t kind;        // Quantised
  int32_t back;        // 1: the copy into the payload
};

// A group of entries in one step: one vector [dim] for `ratio` tokens.
struct EntryGroup {
  const void* pool;           // [B, entries_per_page, dim], block stride block_stride; or null
  const int32_t* page_table;  // [R, table_stride]
  int64_t num_blocks;
  int64_t block_stride;
  int64_t table_stride;
  int64_t entries_per_page;
  int64_t dim;
  int64_t ratio;
  int64_t window;  // 0: none
};

struct SparseParams {
  EntryGroup window;
  EntryGroup entries;
  const void* q;            // [T, H, dim] contiguous
  void* out;                // [T, H, value_dim], dtype of q
  const float* sinks;       // [H] or null
  const int32_t* selected;  // [T, top_k] ascending, -1 at the end; or null: all visible
  const int32_t* query_starts;    // [R + 1]
  const int32_t* context_lens;    // [R]
  const int32_t* context_starts;  // [R], of the window
  int64_t num_rows;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t dim;
  int64_t value_dim;
  int64_t top_k;
  int64_t bad_block;  // out
  int32_t q_dtype;
  int32_t kv_dtype;
  float scale;
};

struct SelectParams {
  EntryGroup entries;
  const void* q;         // [T, H, dim], token stride q_stride
  const float* weights;  // [T, H]
  int32_t* out;          // [T, top_k]
  const int32_t* query_starts;
  const int32_t* context_lens;
  int64_t num_rows;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t q_stride;
  int64_t top_k;
  int64_t bad_block;  // out
  int32_t q_dtype;
  int32_t kv_dtype;
};

constexpr int64_t kScoreQueries = 4;  // queries of one item of scoring

// Scores of a row's `count` queries from `token` (at `position`) on for entries [first, last).
// Score s of the first query goes to scores[at + s]; as many as it sees, then the next query's.
struct ScoreItem {
  int64_t token, row, position, count;
  int64_t first, last;
  int64_t at;
};

struct WindowsParams {
  const float* values;  // [rows, size, dim]
  const float* gates;
  float* out;  // [rows, dim]
  int64_t rows;
  int64_t size;
  int64_t dim;
};

struct DeltaParams {
  const float* q;      // [T, H, key_dim], normalised and scaled
  const float* k;      // [T, H, key_dim], normalised
  const float* v;      // [T, H, value_dim]
  const float* decay;  // [T, H] factors
  const float* beta;   // [T, H]
  float* states;       // [R, H, key_dim, value_dim], moved on
  float* out;          // [T, H, value_dim]
  const int64_t* starts;  // [R + 1]
  int64_t num_rows;
  int64_t num_heads;
  int64_t key_dim;
  int64_t value_dim;
};

struct ConvParams {
  const float* x;       // [T, channels]
  const float* states;  // [R, size - 1, channels] the tokens before
  const float* weight;  // [size, channels]
  float* out;           // [T, channels]
  float* kept;          // [R, size - 1, channels] the last tokens
  const int64_t* starts;  // [R + 1]
  int64_t num_rows;
  int64_t channels;
  int64_t size;
};

struct SinkhornParams {
  const float* x;  // [rows, n, n]
  float* out;
  int64_t rows;
  int64_t n;
  int64_t iterations;
  float eps;
};

}  // namespace sw
