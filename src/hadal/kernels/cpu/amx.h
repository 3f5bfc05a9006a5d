// Products of BF16 and E4M3 weights on AMX's tile units, without rounding the activations.
//
// A tile instruction multiplies BF16 by BF16 and adds in FP32. A weight in BF16 or E4M3 is exactly a BF16; an FP32
// activation is the sum of three (8 + 8 + 8 bits of its 24). So three tile products are one exact FP32 product, at five
// times the rate of FP32's own units. Weights are the left operand, with rows in their stored layout; tokens are packed
// on the right, two values of a token side by side:
//
//     C [16 rows of W, 16 tokens] += A [16 rows, 32 of K] x B [16 pairs of K, 16 tokens]
//
// Up to four C tiles (64 rows) share each B. A sum over 128 of K is multiplied by its block's scale and added to the
// result in FP32, as in DeepSeek-V3 (arXiv 2412.19437, 3.3.2). The order of additions of one result is fixed by K
// alone, so it depends neither on the batch, nor on its place in a tile, nor on the thread.
//
// If a weight requires rounded inputs, tokens are E4M3 codes, one BF16 each, with a scale per 128.
#pragma once
#include "rounded.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define HADAL_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hadal {

#if defined(HADAL_AMX)

// The kernel grants tile registers to a process on one request; a container may refuse.
inline bool ask_for_tiles() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
inline const bool kHasTiles = ask_for_tiles();

constexpr int kTileRows = 16, kTileDepth = 32;
constexpr int kTilesHigh = 4;                          // C tiles that share a B
constexpr int kRowsHigh = kTilesHigh * kTileRows;
constexpr int kTileValues = kTileRows * kTileDepth;    // values of a BF16 tile, 1 KiB
constexpr int kAhead = 2 * kScaleBlock;                // prefetch distance of W, along K
constexpr int kMostParts = 3;                          // BF16s that make an FP32
constexpr long kPanelBytes = 1 << 20;                  // packed tokens of a panel, which stay in L2 while W is streamed
constexpr int kMostPanelTokens = 256;

// Write n <= 128 values of a row of W as BF16, padded with zeros, to its lines in tiles `tile_stride` values apart.
HADAL_INLINE void widen_tile_row(const Matrix& w, const char* from, int n, uint16_t* to, long tile_stride) {
    if (w.type == kWeightBf16) {
        for (int k = 0; k < n; k += kTileDepth, to += tile_stride) {
            const int left = n - k;
            const __mmask32 mask = left >= kTileDepth ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
            _mm512_store_si512(to, _mm512_maskz_loadu_epi16(mask, from + 2 * k));
        }
        return;
    }
    for (int k = 0; k < n; k += 2 * kTileDepth, to += 2 * tile_stride) {
        const int left = n - k;
        const __mmask64 mask = left >= 64 ? ~__mmask64(0) : (__mmask64(1) << left) - 1;
        const __m512i codes = _mm512_maskz_loadu_epi8(mask, from + k);
        const __mmask64 is_subnormal = _mm512_testn_epi8_mask(codes, _mm512_set1_epi8(0x78));
        _mm512_store_si512(to, bf16_of_fp8(_mm512_castsi512_si256(codes), __mmask32(is_subnormal)));
        if (left > kTileDepth)
            _mm512_store_si512(to + tile_stride,
                               bf16_of_fp8(_mm512_extracti64x4_epi64(codes, 1), __mmask32(is_subnormal >> 32)));
    }
}

// Transpose 16 rows of 16 dwords.
HADAL_INLINE void transpose16(__m512i (&r)[16]) {
    __m512i t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
    }
}

// Return 32 floats as the nearest BF16s; a and b receive the remainders.
HADAL_INLINE __m512i take_bf16(__m512& a, __m512& b) {
    const __m512i near = (__m512i)_mm512_cvtne2ps_pbh(b, a);
    const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(near));
    const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(near, 1));
    a = _mm512_sub_ps(a, _mm512_castsi512_ps(_mm512_slli_epi32(low, 16)));
    b = _mm512_sub_ps(b, _mm512_castsi512_ps(_mm512_slli_epi32(high, 16)));
    return near;
}

// Tokens of one panel, packed as right operands: by tile of 16 tokens, by 32 of K, by part (the BF16s of a value).
struct Panel {
    int num_tokens, num_parts, num_steps;  // steps of 32 along K
    uint16_t* values;
    float* scales;  // [blocks of 128 along K, num_tokens rounded up to 16]; for rounded tokens
    int padded() const { return (num_tokens + 15) / 16 * 16; }
    int tile_columns(int m) const { return min_int(16, num_tokens - m); }
    // A tile with fewer tokens is packed only as wide as they are: one token takes a sixteenth of the memory. Its lines
    // are still read 16 tokens wide; values after a line's end produce columns that are never used.
    long tile_size(int columns) const { return long(num_steps) * num_parts * 16 * columns * 2; }
    uint16_t* tile(int m) const { return values + m / 16 * tile_size(16); }
    float* scales_of(int block) const { return scales + long(block) * padded(); }
};

// Pack 32 values of K, from k on, of `columns` tokens.
template <class Load>
HADAL_INLINE void pack_step(const Load& load, int columns, int num_parts, uint16_t* to) {
    __m512 a[16], b[16];
    for (int m = 0; m < columns; m++) load(m, a[m], b[m]);
    for (int part = 0; part < num_parts; part++, to += 16 * columns * 2) {
        if (columns == 1) {
            _mm512_storeu_si512(to, take_bf16(a[0], b[0]));
            continue;
        }
        __m512i pairs[16];
        for (int m = 0; m < columns; m++) pairs[m] = take_bf16(a[m], b[m]);
        for (int m = columns; m < 16; m++) pairs[m] = _mm512_setzero_si512();
        transpose16(pairs);
        const __mmask16 mask = __mmask16((1u << columns) - 1);
        for (int pair = 0; pair < 16; pair++) _mm512_mask_storeu_epi32(to + pair * columns * 2, mask, pairs[pair]);
    }
}

HADAL_INLINE __m512 load_part(const float* from, int left) {
    return left >= 16 ? _mm512_loadu_ps(from) : left > 0 ? v_load_part(from, left) : _mm512_setzero_ps();
}

template <class Row>
inline void pack(const Row& row, int m0, int K, const Panel& panel) {
    for (int m = 0; m < panel.num_tokens; m += 16) {
        const int columns = panel.tile_columns(m);
        uint16_t* to = panel.tile(m);
        const float* x[16];
        for (int i = 0; i < columns; i++) x[i] = row(m0 + m + i);
        for (int step = 0; step < panel.num_steps; step++, to += panel.num_parts * 16 * columns * 2) {
            const int k = step * kTileDepth;
            pack_step(
                [&](int i, __m512& a, __m512& b) {
                    a = load_part(x[i] + k, K - k);
                    b = load_part(x[i] + k + 16, K - k - 16);
                },
                columns, panel.num_parts, to);
        }
    }
}

// Pack rounded tokens: every E4M3 code is exactly a BF16.
template <class Row>
inline void pack_rounded(const Row& row, int m0, int K, const Panel& panel) {
    alignas(64) float codes[16][kScaleBlock];
    uint8_t encoded[kScaleBlock + sizeof(float)];
    for (int m = 0; m < panel.num_tokens; m += 16) {
        const int columns = panel.tile_columns(m);
        uint16_t* to = panel.tile(m);
        for (int k = 0; k < K; k += kScaleBlock) {
            const int n = min_int(kScaleBlock, K - k);
            for (int i = 0; i < columns; i++) {
                encode_fp8(row(m0 + m + i) + k, n, false, encoded);
                std::memcpy(panel.scales_of(k / kScaleBlock) + m + i, encoded + padded_codes(n), sizeof(float));
                for (int j = 0; j < n; j++) codes[i][j] = e4m3_value(encoded[j]);
                for (int j = n; j < kScaleBlock; j++) codes[i][j] = 0.0f;
            }
            for (int at = 0; at < n; at += kTileDepth, to += 16 * columns * 2)
                pack_step(
                    [&](int i, __m512& a, __m512& b) {
                        a = _mm512_load_ps(codes[i] + at);
                        b = _mm512_load_ps(codes[i] + at + 16);
                    },
                    columns, 1, to);
        }
    }
}

// Conversion of weights into tiles: chunks of 64 rows by 128 of K, one after the other, widened row by row into two
// alternating buffers. While the tile units multiply one chunk, the vector units widen the next.
struct Widener {
    const Matrix* const* matrices;
    int num_matrices, n0, n1;  // rows [n0, n1) of each
    uint16_t* buffers[2];      // [4 steps of 32 along K, 4 tiles, 16 rows, 32]
    int matrix = 0, n, k = 0, row = 0, filling = 0;

    void widen(int num_rows) {
        if (matrix == num_matrices) return;
        const Matrix& w = *matrices[matrix];
        const int value_bytes = kWeightBytes[w.type], depth = min_int(kScaleBlock, w.columns - k);
        const int end = min_int(row + num_rows, min_int(kRowsHigh, n1 - n)), ahead = k + kAhead - w.columns;
        for (; row < end; row++) {
            const char* from = w.row(n + row) + long(k) * value_bytes;
            prefetch_bytes(ahead < 0 ? from + kAhead * value_bytes : w.row(n + row + kRowsHigh) + ahead * value_bytes,
                           long(kScaleBlock) * value_bytes);
            uint16_t* to = buffers[filling] + row / kTileRows * kTileValues + row % kTileRows * kTileDepth;
            widen_tile_row(w, from, depth, to, kTilesHigh * kTileValues);
        }
    }

    // Complete the chunk and return it. Later calls widen the next one.
    const uint16_t* finish() {
        widen(kRowsHigh);
        const uint16_t* whole = buffers[filling];
        filling ^= 1, row = 0, k += kScaleBlock;
        if (k >= matrices[matrix]->columns) k = 0, n += kRowsHigh;
        if (n >= n1) n = n0, matrix++;
        return whole;
    }
};

// Multiply C tiles 0 .. T-1 over `steps` of K: a[step][4 tiles], b[step][parts], lines of b `stride` bytes apart.
template <int T, class Between>
HADAL_INLINE void multiply_tiles(const uint16_t* a, const uint16_t* b, int steps, int num_parts, long stride, float* c,
                                 const Between& between) {
    _tile_zero(0);
    if constexpr (T > 1) _tile_zero(1);
    if constexpr (T > 2) _tile_zero(2);
    if constexpr (T > 3) _tile_zero(3);
    for (int step = 0; step < steps; step++, a += kTilesHigh * kTileValues) {
        asm volatile("" ::: "memory");  // GCC does not know that a tile load reads memory
        for (int part = 0; part < num_parts; part++, b += 4 * stride * 2) {
            _tile_loadd(7, b, stride);
            _tile_loadd(4, a, 64);
            _tile_dpbf16ps(0, 4, 7);
            if constexpr (T > 1) {
                _tile_loadd(5, a + kTileValues, 64);
                _tile_dpbf16ps(1, 5, 7);
            }
            if constexpr (T > 2) {
                _tile_loadd(6, a + 2 * kTileValues, 64);
                _tile_dpbf16ps(2, 6, 7);
            }
            if constexpr (T > 3) {
                _tile_loadd(4, a + 3 * kTileValues, 64);
                _tile_dpbf16ps(3, 4, 7);
            }
        }
        between();
    }
    _tile_stored(0, c, 64);
    if constexpr (T > 1) _tile_stored(1, c + 256, 64);
    if constexpr (T > 2) _tile_stored(2, c + 512, 64);
    if constexpr (T > 3) _tile_stored(3, c + 768, 64);
}

template <class Between>
inline void run_tiles(int num_tiles, const uint16_t* a, const uint16_t* b, int steps, int num_parts, long stride,
                      float* c, const Between& between) {
    switch (num_tiles) {
        case 1: return multiply_tiles<1>(a, b, steps, num_parts, stride, c, between);
        case 2: return multiply_tiles<2>(a, b, steps, num_parts, stride, c, between);
        case 3: return multiply_tiles<3>(a, b, steps, num_parts, stride, c, between);
        default: return multiply_tiles<4>(a, b, steps, num_parts, stride, c, between);
    }
}

struct TileConfig {
    alignas(64) uint8_t palette = 1;
    uint8_t start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
inline constexpr TileConfig kTileConfig{};  // constant: the compiler does not see that the instruction reads it

// Sums that a run of tiles has stored, to be scaled and added one run later: a tile's stores can be read only after
// they leave the store buffer, and meanwhile the tile units compute the next run.
struct Pending {
    const float* sums;  // [rows, 16]
    float* out;         // rows `out_stride` apart
    int out_stride, num_rows = 0, row = 0;
    bool is_first;
    const float* row_scale;  // [rows]
    __m512 token_scale;

    void add(int count) {
        for (const int end = min_int(row + count, num_rows); row < end; row++) {
            float* to = out + long(row) * out_stride;
            const __m512 factor = _mm512_mul_ps(token_scale, _mm512_set1_ps(row_scale[row]));
            const __m512 before = is_first ? _mm512_setzero_ps() : _mm512_load_ps(to);
            _mm512_store_ps(to, _mm512_fmadd_ps(factor, _mm512_load_ps(sums + row * 16), before));
        }
    }
};

// Multiply rows [n, n + rows) of W, the widener's current ones, by a packed panel; total [64, padded tokens] receives
// the sums. c: two buffers of [64, 16].
inline void multiply_panel(Widener& widener, const Matrix& w, int n, int rows, const Panel& panel, float* c,
                           float* total) {
    const int K = w.columns, padded = panel.padded(), num_tiles = (rows + kTileRows - 1) / kTileRows;
    const float* scales[kRowsHigh];
    for (int r = 0; w.scales && r < rows; r++) scales[r] = w.scales_of(n + r);
    float scale[2][kRowsHigh];
    Pending pending{};
    int run = 0;
    for (int k = 0, chunk = 0; k < K; k += kScaleBlock, chunk ^= 1) {
        const int steps = (min_int(kScaleBlock, K - k) + kTileDepth - 1) / kTileDepth;
        const uint16_t* a = widener.finish();
        for (int r = 0; r < rows; r++) scale[chunk][r] = w.scales ? scales[r][k / kScaleBlock] * kFp8Lift : 1.0f;
        const float* token_scale = panel.scales ? panel.scales_of(k / kScaleBlock) : nullptr;
        const int share = (kRowsHigh * 16 + steps * padded - 1) / (steps * padded);  // next chunk's rows to widen
        const int sums_share = (kRowsHigh + steps - 1) / steps;
        for (int m = 0; m < panel.num_tokens; m += 16, run ^= 1) {
            const int columns = panel.tile_columns(m);
            const uint16_t* b = panel.tile(m) + long(k / kTileDepth) * panel.num_parts * 16 * columns * 2;
            float* sums = c + run * kRowsHigh * 16;
            run_tiles(num_tiles, a, b, steps, panel.num_parts, 4 * columns, sums, [&] {
                widener.widen(share);
                pending.add(sums_share);
            });
            pending.add(kRowsHigh);
            const __m512 by_token = token_scale ? _mm512_loadu_ps(token_scale + m) : _mm512_set1_ps(1.0f);
            pending = Pending{sums, total + m, padded, rows, 0, k == 0, scale[chunk], by_token};
        }
    }
    pending.add(kRowsHigh);
}

// Emit sums token by token, four rows of W at a time. `total` has them row by row.
template <class Emit>
inline void emit_panel(const float* total, int padded, int rows, int num_tokens, int m0, int n, const Emit& emit) {
    for (int r = 0; r < rows; r += 4, total += 4 * padded) {
        const int count = min_int(4, rows - r);
        for (int m = 0; m < num_tokens; m += 4) {
            __m128 q[4];
            for (int i = 0; i < 4; i++) q[i] = _mm_load_ps(total + i * padded + m);
            _MM_TRANSPOSE4_PS(q[0], q[1], q[2], q[3]);
            for (int i = 0; i < min_int(4, num_tokens - m); i++) {
                Quad sums;
                _mm_storeu_ps(sums.at, q[i]);
                emit(m0 + m + i, n + r, sums, count, true);
            }
        }
    }
}

// Like `gemm` (gemm.h) for C matrices of one shape; tokens are packed once. Calls emit[i](token, row, four sums, count,
// true) for rows [n0, n1) of w[i].
template <int C, class Row, class Emit>
inline void tile_gemm(const Row& row, int M, const Matrix* const (&w)[C], int n0, int n1, const Emit (&emit)[C]) {
    static thread_local OwnMemory packed_memory, work_memory;
    const int K = w[0]->columns, num_steps = (K + kTileDepth - 1) / kTileDepth;
    const bool is_rounded = w[0]->is_rounding_inputs;
    const int num_parts = is_rounded ? 1 : kMostParts, num_blocks = (K + kScaleBlock - 1) / kScaleBlock;
    const long token_values = long(num_steps) * kTileDepth * num_parts;
    const int most = max_int(16, min_int(kMostPanelTokens, int(kPanelBytes / (2 * token_values)) / 16 * 16));
    _tile_loadconfig(&kTileConfig);
    for (int m0 = 0; m0 < M; m0 += most) {
        Panel panel{min_int(most, M - m0), num_parts, num_steps, nullptr, nullptr};
        const int padded = panel.padded();
        const size_t values = size_t(padded) * size_t(token_values) + 32;  // lines are read past the last token
        panel.values = packed_memory.take<uint16_t>(values + (is_rounded ? size_t(2 * num_blocks * padded) : 0));
        if (is_rounded) {
            panel.scales = reinterpret_cast<float*>(panel.values + values);
            pack_rounded(row, m0, K, panel);
        } else {
            pack(row, m0, K, panel);
        }
        constexpr int chunk_values = kRowsHigh * kScaleBlock;
        float* total = work_memory.take<float>(size_t(kRowsHigh) * size_t(padded + 32) + chunk_values);
        float* c = total + kRowsHigh * padded;
        uint16_t* chunks = reinterpret_cast<uint16_t*>(c + kRowsHigh * 32);
        Widener widener{w, C, n0, n1, {chunks, chunks + chunk_values}, 0, n0};
        for (int i = 0; i < C; i++)
            for (int n = n0; n < n1; n += kRowsHigh) {
                const int rows = min_int(kRowsHigh, n1 - n);
                multiply_panel(widener, *w[i], n, rows, panel, c, total);
                emit_panel(total, padded, rows, panel.num_tokens, m0, n, emit[i]);
            }
    }
    _tile_release();
}

#else

constexpr bool kHasTiles = false;

#endif

}  // namespace hadal
