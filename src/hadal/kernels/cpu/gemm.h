// y[m][n] = sum_k x[m][k] * w[n][k] with both operands K-contiguous, as in nn.Linear: nothing is packed or copied.
//
// The tile: MT tokens by 4 weight rows of accumulators, each a vector of partial sums along K. A step loads MT + 4
// vectors and does 4 * MT fused multiply-adds (6 x 4: 24 for 10 loads, so the arithmetic units and not the load ports
// are the limit). At the end of K the lanes are summed, four rows at once (simd.h, v_sum4: 13 instructions for four).
// The usual packed outer product does not pay: packing needs a pass over W that a decode step (1-64 tokens) never earns
// back. MT only decides how many tokens share the loads; the order of additions of one result is fixed by K alone
// (lanes, then K blocks). So a token's result is bit-equal for any batch, tile and thread.
//
// A weight that is not FP32 is widened: in registers for a few tokens, block by block into a thread's own memory for
// many. The order of additions is the same, so results equal the dequantised FP32 matrix's bit by bit. Processors with
// tile units multiply such weights in their stored form (amx.h).
#pragma once
#include "amx.h"

namespace hadal {

constexpr int kTokenTile = W == 16 ? 6 : 3;  // 24 accumulators of 32 registers, or 12 of 16
constexpr int kWideTile = 8;                 // tokens per tile with two rows of W: 16 accumulators
constexpr int kDepthBlock = 1024;            // a 6-token tile of x is 24 KiB and stays in L1
// Most token tiles, by weight type, that each widen W in registers. More tiles share rows widened in memory.
constexpr int kStoredTiles[] = {0, W == 16 ? 1 << 20 : 8, W == 16 ? 3 : 1};
constexpr int kWidenBytes = 16 << 10;        // widened rows of W for a few tokens; they fit into L1 with the tokens

// One step along K: acc[m][r] += x[m] * w[r] for a vector (or, at the end of K, a part of one) of the K axis.
template <int MT, int NR, class Load>
HADAL_INLINE void dot_step(V (&acc)[MT][NR], const float* const* x, long k, const float* w, long ldw,
                           const Load& load) {
    V xv[MT];
#pragma GCC unroll 8
    for (int m = 0; m < MT; m++) {
        xv[m] = load(x[m] + k);
        HADAL_PIN(xv[m]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < NR; r++) {
        V wv = load(w + r * ldw);
        if (MT > 1) HADAL_PIN(wv);
#pragma GCC unroll 8
        for (int m = 0; m < MT; m++) acc[m][r] = v_fma(xv[m], wv, acc[m][r]);
    }
}

// Lines to prefetch. Row quad q starts at first + q * quad; each step fetches PF lines, `lane` floats apart, then moves
// `advance` on. Addresses at or past `end` are moved by `jump` floats, to the weights needed next.
struct Ahead {
    const float* first;
    long lane, advance, quad;
    const float* end = nullptr;
    long jump = 0;
};

// Return sums over K of MT tokens by NR rows. PF: lines to prefetch on each step; into L1 if all four rows are fetched
// (they are needed next), into L2 if the token tiles of a block share the work.
template <int MT, int NR, int PF>
HADAL_INLINE void dot_tile(const float* const* x_at, const float* w, long ldw, int K, const float* fetch, long lane,
                           long advance, Quad* out) {
    V acc[MT][NR];
    const float* x[MT];
#pragma GCC unroll 8
    for (int m = 0; m < MT; m++) {
        x[m] = x_at[m];
#pragma GCC unroll 4
        for (int r = 0; r < NR; r++) acc[m][r] = v_zero();
    }
    long k = 0;
    for (; k + W <= K; k += W, w += W) {
#pragma GCC unroll 4
        for (int i = 0; i < PF; i++) __builtin_prefetch(fetch + i * lane, 0, PF == NR ? 3 : 2);
        if (PF) fetch += advance;
        dot_step<MT, NR>(acc, x, k, w, ldw, [](const float* p) { return v_load(p); });
    }
    const int left = int(K - k);
    if (left) dot_step<MT, NR>(acc, x, k, w, ldw, [left](const float* p) { return v_load_part(p, left); });
#pragma GCC unroll 8
    for (int m = 0; m < MT; m++) out[m] = v_sums(acc[m]);
}

// Rows of W that a tile of MT tokens takes at a time.
constexpr int tile_rows(int MT) { return MT > kTokenTile ? 2 : 4; }

// 7, 8 or 14-16 tokens use tiles of 7 and 8, which saves a pass over W (8 tokens in two tiles ran at 60 % of memory
// bandwidth).
inline int count_tiles(int M) {
    if (W == 16 && (M == 7 || M == 8)) return 1;
    if (W == 16 && M >= 14 && M <= 16) return 2;
    return (M + kTokenTile - 1) / kTokenTile;
}

// Multiply one token tile by rows [n0, n1) of W, one K block. emit(token, row, sums, num_rows, is_first_block).
template <int MT, int PF, class Row, class Emit>
inline void token_tile(const Row& row, int m0, const float* w, long ldw, int k0, int K, int n0, int n1,
                       const Ahead& ahead, const Emit& emit) {
    constexpr int rows = tile_rows(MT);
    const float* x[MT];
    for (int m = 0; m < MT; m++) x[m] = row(m0 + m) + k0;
    Quad out[MT];
    int n = n0;
    const float* fetch = ahead.first;
    for (; n + rows <= n1; n += rows, fetch += ahead.quad) {
        const float* from = ahead.end && fetch >= ahead.end ? fetch + ahead.jump : fetch;
        dot_tile<MT, rows, PF>(x, w + n * ldw + k0, ldw, K, from, ahead.lane, ahead.advance, out);
        for (int m = 0; m < MT; m++) emit(m0 + m, n, out[m], rows, k0 == 0);
    }
    for (; n < n1; n++) {
        dot_tile<MT, 1, 0>(x, w + n * ldw + k0, ldw, K, nullptr, 0, 0, out);
        for (int m = 0; m < MT; m++) emit(m0 + m, n, out[m], 1, k0 == 0);
    }
}

template <int MT, class Row, class Emit>
inline void token_tile(int pf, const Row& row, int m0, const float* w, long ldw, int k0, int K, int n0, int n1,
                       const Ahead& ahead, const Emit& emit) {
    if constexpr (MT <= kTokenTile || W == 16) {
        switch (pf) {
            case 0: return token_tile<MT, 0>(row, m0, w, ldw, k0, K, n0, n1, ahead, emit);
            case 1: return token_tile<MT, 1>(row, m0, w, ldw, k0, K, n0, n1, ahead, emit);
            case 2: return token_tile<MT, 2>(row, m0, w, ldw, k0, K, n0, n1, ahead, emit);
            default: return token_tile<MT, 4>(row, m0, w, ldw, k0, K, n0, n1, ahead, emit);
        }
    }
}

template <class Row, class Emit>
inline void any_token_tile(int mt, int pf, const Row& row, int m0, const float* w, long ldw, int k0, int K, int n0,
                           int n1, const Ahead& ahead, const Emit& emit) {
    switch (mt) {
        case 1: return token_tile<1>(pf, row, m0, w, ldw, k0, K, n0, n1, ahead, emit);
        case 2: return token_tile<2>(pf, row, m0, w, ldw, k0, K, n0, n1, ahead, emit);
        case 3: return token_tile<3>(pf, row, m0, w, ldw, k0, K, n0, n1, ahead, emit);
        case 4: return token_tile<4>(pf, row, m0, w, ldw, k0, K, n0, n1, ahead, emit);
        case 5: return token_tile<5>(pf, row, m0, w, ldw, k0, K, n0, n1, ahead, emit);
        case 6: return token_tile<6>(pf, row, m0, w, ldw, k0, K, n0, n1, ahead, emit);
        case 7: return token_tile<7>(pf, row, m0, w, ldw, k0, K, n0, n1, ahead, emit);
        case 8: return token_tile<8>(pf, row, m0, w, ldw, k0, K, n0, n1, ahead, emit);
    }
}

// Multiply rows [n0, n1) of W by M tokens. `row(m)` is the m-th token's vector, so tokens may lie anywhere; `emit`
// receives every sum once per K block, first block first.
//
// W is processed in blocks that stay in L2 over all token tiles. While a block is multiplied, the next is prefetched,
// in the order of addresses, evenly over the tiles' steps (a burst between tiles would fill the miss buffers and
// stall). The first block has no predecessor, so its first tile prefetches for itself, kPrefetchBytes ahead. `after`:
// the weights that this thread multiplies next, so that a tiny expert (12-48 KB of weights) does not start cold.
template <class Row, class Emit>
inline void gemm(const Row& row, int M, const float* w, long ldw, int K, int n0, int n1, const Emit& emit,
                 const float* after = nullptr) {
    if (M <= 0 || n1 <= n0) return;
    const float* end = w + n1 * ldw;
    if (!after) after = end;
    const int num_tiles = count_tiles(M), lines = tile_rows((M + num_tiles - 1) / num_tiles);  // lines of W per step
    const int depth = K <= kDepthBlock + kDepthBlock / 2 ? K : kDepthBlock;
    // Larger blocks for many tokens, since x does not stay in cache then.
    const int block_bytes = M <= 64 ? kRowBlockBytes : 4 * kRowBlockBytes;
    const int rows =
        num_tiles == 1 && depth == K ? 1 << 30 : max_int(4, block_bytes / int(sizeof(float)) / depth / 4 * 4);
    bool is_warm = false;
    for (int r0 = n0; r0 < n1; r0 = r0 + min_int(rows, n1 - r0)) {
        const int r1 = r0 + min_int(rows, n1 - r0);
        for (int k0 = 0; k0 < K; k0 += depth) {
            const int kb = min_int(depth, K - k0);
            const float* block = w + r0 * ldw + k0;
            const bool is_last_depth = k0 + kb >= K;
            const float* next = !is_last_depth ? block + kb : r1 < n1 ? w + r1 * ldw : after;
            int lines_left = lines;  // lines of the next block, per step
            for (int tile = 0, m0 = 0; tile < num_tiles; tile++) {
                const int mt = (M - m0) / (num_tiles - tile);  // sizes differ by at most one
                if (tile == 0 && !is_warm) {
                    const long near = kPrefetchBytes / int(sizeof(float));
                    // Contiguous rows are prefetched in the order of addresses, others row by row.
                    const Ahead ahead = ldw == kb ? Ahead{block + near, 16, 16 * lines, lines * ldw, end, after - end}
                                                  : Ahead{block + max_int(1, int(near / (lines * kb))) * lines * ldw,
                                                          ldw, 16, lines * ldw};
                    any_token_tile(mt, lines, row, m0, w, ldw, k0, kb, r0, r1, ahead, emit);
                } else {
                    const int share = lines_left > num_tiles - tile ? 2 : lines_left > 0 ? 1 : 0;
                    const Ahead ahead{next + (lines - lines_left) * ldw, ldw, 16, lines * ldw};
                    any_token_tile(mt, share, row, m0, w, ldw, k0, kb, r0, r1, ahead, emit);
                    lines_left -= share;
                }
                m0 += mt;
            }
            is_warm = num_tiles > 1;
        }
    }
}

// Rows of dense tokens.
struct RowAt {
    const float* x;
    long ld;
    HADAL_INLINE const float* operator()(int m) const { return x + m * ld; }
};

// out += weight * q, four at once if there are four. (Plain additions use it with weight 1, which is exact.)
HADAL_INLINE void add_quad(float* out, const Quad& q, int count, float weight) {
    typedef float Four __attribute__((vector_size(16)));
    if (count == 4) {
        Four a, b;
        std::memcpy(&a, out, sizeof a);
        std::memcpy(&b, q.at, sizeof b);
        a = a + b * weight;
        std::memcpy(out, &a, sizeof a);
    } else {
        for (int i = 0; i < count; i++) out[i] = out[i] + q.at[i] * weight;
    }
}

// y[m][n] (= or +=) sums; K blocks after the first always add.
template <bool ADD>
struct Store {
    float* y;
    long ld;
    HADAL_INLINE void operator()(int m, int n, const Quad& q, int count, bool is_first) const {
        float* out = y + m * ld + n;
        if (ADD || !is_first) add_quad(out, q, count, 1.0f);
        else if (count == 4) std::memcpy(out, q.at, sizeof q.at);
        else std::memcpy(out, q.at, size_t(count) * sizeof(float));
    }
};

// Return tokens rounded to E4M3 and back, 1x128, for weights that require it; valid until the thread's next call.
template <class Row>
inline const float* round_rows(const Row& row, int M, int K) {
    static thread_local OwnMemory memory;
    float* rounded = memory.take<float>(size_t(M) * size_t(K) + 256);
    uint8_t* codes = reinterpret_cast<uint8_t*>(rounded + size_t(M) * size_t(K));
    for (int m = 0; m < M; m++)
        for (int k = 0; k < K; k += kScaleGroup) {
            const int n = min_int(kScaleGroup, K - k);
            encode_fp8(row(m) + k, n, false, codes);
            decode_fp8(codes, n, rounded + long(m) * K + k);
        }
    return rounded;
}

// Like dot_tile, but widens FP8 or BF16 rows [n, n + NR) of W in registers, K values from k0 on. The order of
// additions, and so every bit, is that of dot_tile. `fetch`: start of the NR rows that are needed next.
template <int MT, int NR, bool IS_FP8>
HADAL_INLINE void stored_tile(const float* const* x_at, const Matrix& w, int n, int k0, int K, const char* fetch,
                              Quad* out) {
    constexpr int value_bytes = IS_FP8 ? 1 : 2;
    V acc[MT][NR], scale[NR];
    const float *x[MT], *scale_at[NR];
    const char* row[NR];
    const long row_bytes = long(w.columns) * value_bytes;
#pragma GCC unroll 4
    for (int r = 0; r < NR; r++) {
        row[r] = w.row(n + r) + long(k0) * value_bytes;
        scale_at[r] = IS_FP8 ? w.scales_of(n + r) + k0 / kScaleBlock : nullptr;
        scale[r] = v_zero();
#pragma GCC unroll 8
        for (int m = 0; m < MT; m++) acc[m][r] = v_zero();
    }
#pragma GCC unroll 8
    for (int m = 0; m < MT; m++) x[m] = x_at[m];
    const auto multiply = [&](const V(&xv)[MT], int r, V wv) {
        if (MT > 1) HADAL_PIN(wv);
#pragma GCC unroll 8
        for (int m = 0; m < MT; m++) acc[m][r] = v_fma(xv[m], wv, acc[m][r]);
    };
    V xv[MT];
    // A piece of K begins at a column block: kDepthBlock is whole blocks, or all of K is one piece.
    int k = 0;
    while (k < K) {
        const int stop = IS_FP8 ? min_int(K, k + kScaleBlock) : K;
        if (IS_FP8)
#pragma GCC unroll 4
            for (int r = 0; r < NR; r++) scale[r] = v_set(*scale_at[r]++ * kFp8Lift);
        for (; k + W <= stop; k += W) {
            if (k % (64 / value_bytes) == 0)
#pragma GCC unroll 4
                for (int r = 0; r < NR; r++) __builtin_prefetch(fetch + r * row_bytes + k * value_bytes, 0, 2);
#pragma GCC unroll 8
            for (int m = 0; m < MT; m++) {
                xv[m] = v_load(x[m] + k);
                HADAL_PIN(xv[m]);
            }
#pragma GCC unroll 4
            for (int r = 0; r < NR; r++) {
                const char* at = row[r] + k * value_bytes;
                multiply(xv, r, IS_FP8 ? v_of_fp8(reinterpret_cast<const uint8_t*>(at)) * scale[r]
                                       : v_of_bf16(reinterpret_cast<const uint16_t*>(at)));
            }
        }
        if (k < stop) {
            for (int m = 0; m < MT; m++) xv[m] = v_load_part(x[m] + k, stop - k);
#pragma GCC unroll 4
            for (int r = 0; r < NR; r++) {
                float wide[W] = {};
                widen_row(w, n + r, k0 + k, stop - k, wide);
                multiply(xv, r, v_load(wide));
            }
            k = stop;
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < MT; m++) out[m] = v_sums(acc[m]);
}

// Prefetch target while a row is multiplied: the row `rows` further on, in W up to `end`, then in `after`.
struct StoredAhead {
    int rows, end;
    const char* after;
    const char* operator()(const Matrix& w, int n, int k0) const {
        const char* from = n + rows < end || !after ? w.row(n + rows) : after + (w.row(n + rows) - w.row(end));
        return from + long(k0) * kWeightBytes[w.type];
    }
};

// Rows after the last whole quad. They are rare, so this is not inlined, which would be slow to compile.
template <int MT, bool IS_FP8>
__attribute__((noinline)) void stored_row(const float* const* x, const Matrix& w, int n, int k0, int kb,
                                          const char* fetch, Quad* out) {
    stored_tile<MT, 1, IS_FP8>(x, w, n, k0, kb, fetch, out);
}

// Multiply MT tokens, with vectors from k0 on, by rows [n0, n1).
template <int MT, bool IS_FP8, class Emit>
inline void stored_rows(const float* const* x, int m0, const Matrix& w, int k0, int kb, int n0, int n1,
                        const StoredAhead& ahead, const Emit& emit) {
    Quad out[MT];
    int n = n0;
    for (; n + 4 <= n1; n += 4) {
        stored_tile<MT, 4, IS_FP8>(x, w, n, k0, kb, ahead(w, n, k0), out);
        for (int m = 0; m < MT; m++) emit(m0 + m, n, out[m], 4, k0 == 0);
    }
    for (; n < n1; n++) {
        stored_row<MT, IS_FP8>(x, w, n, k0, kb, ahead(w, n, k0), out);
        for (int m = 0; m < MT; m++) emit(m0 + m, n, out[m], 1, k0 == 0);
    }
}

// Rows of W are processed in blocks that stay in cache over all token tiles.
template <bool IS_FP8, class Row, class Emit>
inline void stored_gemm(const Row& row, int M, const Matrix& w, int n0, int n1, const Emit& emit, const char* after) {
    const int K = w.columns, depth = K <= kDepthBlock + kDepthBlock / 2 ? K : kDepthBlock;
    const int num_tiles = (M + kTokenTile - 1) / kTokenTile, block_bytes = M <= 64 ? kRowBlockBytes : 4 * kRowBlockBytes;
    const int rows = num_tiles == 1 ? n1 - n0 : max_int(4, block_bytes / (IS_FP8 ? 1 : 2) / depth / 4 * 4);
    const StoredAhead ahead{max_int(4, kPrefetchBytes / (depth * kWeightBytes[w.type]) / 4 * 4), n1, after};
    const float* x[kTokenTile];
    for (int k0 = 0; k0 < K; k0 += depth) {
        const int kb = min_int(depth, K - k0);
        for (int r0 = n0; r0 < n1; r0 += rows) {
            const int r1 = min_int(n1, r0 + rows);
            for (int tile = 0, m0 = 0; tile < num_tiles; tile++) {
                const int mt = (M - m0) / (num_tiles - tile);
                for (int m = 0; m < mt; m++) x[m] = row(m0 + m) + k0;
                switch (mt) {
                    case 1: stored_rows<1, IS_FP8>(x, m0, w, k0, kb, r0, r1, ahead, emit); break;
                    case 2: stored_rows<2, IS_FP8>(x, m0, w, k0, kb, r0, r1, ahead, emit); break;
                    case 3: stored_rows<3, IS_FP8>(x, m0, w, k0, kb, r0, r1, ahead, emit); break;
                    default:
                        if constexpr (kTokenTile == 6) switch (mt) {
                            case 4: stored_rows<4, IS_FP8>(x, m0, w, k0, kb, r0, r1, ahead, emit); break;
                            case 5: stored_rows<5, IS_FP8>(x, m0, w, k0, kb, r0, r1, ahead, emit); break;
                            default: stored_rows<6, IS_FP8>(x, m0, w, k0, kb, r0, r1, ahead, emit);
                        }
                }
                m0 += mt;
            }
        }
    }
}

// Like `stored_gemm`, but widens W in the thread's own memory. Blocks of K, and so every sum, are those of `gemm`.
template <class Row, class Emit>
inline void widened_gemm(const Row& row, int M, const Matrix& w, int n0, int n1, const Emit& emit) {
    static thread_local OwnMemory memory;
    const int K = w.columns, depth = K <= kDepthBlock + kDepthBlock / 2 ? K : kDepthBlock;
    const int num_tiles = count_tiles(M), bytes = num_tiles == 1 ? kWidenBytes : kRowBlockBytes;
    const int rows = max_int(4, bytes / int(sizeof(float)) / depth / 4 * 4);
    float* block = memory.take<float>(size_t(rows) * size_t(depth));
    const long row_bytes = long(K) * kWeightBytes[w.type];
    for (int r0 = n0; r0 < n1; r0 += rows) {
        const int r1 = min_int(n1, r0 + rows);
        for (int k0 = 0; k0 < K; k0 += depth) {
            const int kb = min_int(depth, K - k0);
            for (int r = r0; r < r1; r++) {
                prefetch_bytes(w.row(r) + kPrefetchBytes, row_bytes * kb / K);
                widen_row(w, r, k0, kb, block + long(r - r0) * kb);
            }
            for (int tile = 0, m0 = 0; tile < num_tiles; tile++) {
                const int mt = (M - m0) / (num_tiles - tile);
                const auto emit_at = [&](int m, int n, const Quad& q, int count, bool) {
                    emit(m, r0 + n, q, count, k0 == 0);
                };
                const auto part = [&](int m) { return row(m) + k0; };
                any_token_tile(mt, 0, part, m0, block, kb, 0, kb, 0, r1 - r0, Ahead{}, emit_at);
                m0 += mt;
            }
        }
    }
}

// Multiply rows [n0, n1) of W, of any type, by M tokens.
template <class Row, class Emit>
inline void gemm(const Row& row, int M, const Matrix& w, int n0, int n1, const Emit& emit,
                 const char* after = nullptr) {
    if (M <= 0 || n1 <= n0) return;
#if defined(HADAL_AMX)
    if (kHasTiles && w.is_tiled) return tile_gemm<1>(row, M, {&w}, n0, n1, {emit});
#endif
#if defined(HADAL_BF16)
    if (multiplies_codes(w)) return rounded_gemm<1>(row, M, {&w}, n0, n1, {emit});
#endif
    if (w.is_rounding_inputs) {
        Matrix plain = w;
        plain.is_rounding_inputs = 0;
        return gemm(RowAt{round_rows(row, M, w.columns), w.columns}, M, plain, n0, n1, emit, after);
    }
    if (w.type != kWeightFp32) {
        if ((M + kTokenTile - 1) / kTokenTile > kStoredTiles[w.type]) return widened_gemm(row, M, w, n0, n1, emit);
        if (w.type == kWeightFp8) return stored_gemm<true>(row, M, w, n0, n1, emit, after);
        return stored_gemm<false>(row, M, w, n0, n1, emit, after);
    }
    const float* at = reinterpret_cast<const float*>(w.data);
    gemm(row, M, at, w.columns, w.columns, n0, n1, emit, reinterpret_cast<const float*>(after));
}

inline void linear(const float* x, long ldx, int M, const Matrix& w, int n0, int n1, float* y, long ldy,
                   const char* after = nullptr) {
    gemm(RowAt{x, ldx}, M, w, n0, n1, Store<false>{y, ldy}, after);
}

// y[m][c] = sum_n a[m][n] * b[n][c], columns [c0, c1): b is streamed once for up to kTokenTile rows of a. With ADD,
// y[m][c] is first multiplied by scale[m] (online softmax). Additions run over n in order, for every tile shape.
template <int MT, int CV, bool ADD>
HADAL_INLINE void outer_tile(const float* a, long lda, int N, const float* b, long ldb, int c0, int tail,
                             const float* scale, float* y, long ldy) {
    V acc[MT][CV];
#pragma GCC unroll 8
    for (int m = 0; m < MT; m++)
#pragma GCC unroll 4
        for (int v = 0; v < CV; v++) {
            const float* at = y + m * ldy + c0 + v * W;
            if (ADD)
                acc[m][v] = v_set(scale[m]) * (v == CV - 1 ? v_load_tail(at, tail) : v_load(at));
            else
                acc[m][v] = v_zero();
        }
    for (int n = 0; n < N; n++) {
        const float* bn = b + n * ldb + c0;
        V bv[CV];
#pragma GCC unroll 4
        for (int v = 0; v < CV; v++) bv[v] = v == CV - 1 ? v_load_tail(bn + v * W, tail) : v_load(bn + v * W);
#pragma GCC unroll 8
        for (int m = 0; m < MT; m++) {
            const V am = v_set(a[m * lda + n]);
#pragma GCC unroll 4
            for (int v = 0; v < CV; v++) acc[m][v] = v_fma(am, bv[v], acc[m][v]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < MT; m++)
#pragma GCC unroll 4
        for (int v = 0; v < CV; v++) {
            float* at = y + m * ldy + c0 + v * W;
            if (v == CV - 1)
                v_store_tail(at, acc[m][v], tail);
            else
                v_store(at, acc[m][v]);
        }
}

template <int MT, bool ADD>
inline void outer_columns(const float* a, long lda, int N, const float* b, long ldb, int c0, int c1, const float* scale,
                          float* y, long ldy) {
    for (int c = c0; c < c1; c += 4 * W) {
        const int left = min_int(c1 - c, 4 * W), vectors = (left + W - 1) / W, tail = left - (vectors - 1) * W;
        switch (vectors) {
            case 4: outer_tile<MT, 4, ADD>(a, lda, N, b, ldb, c, tail, scale, y, ldy); break;
            case 3: outer_tile<MT, 3, ADD>(a, lda, N, b, ldb, c, tail, scale, y, ldy); break;
            case 2: outer_tile<MT, 2, ADD>(a, lda, N, b, ldb, c, tail, scale, y, ldy); break;
            default: outer_tile<MT, 1, ADD>(a, lda, N, b, ldb, c, tail, scale, y, ldy);
        }
    }
}

template <bool ADD>
inline void outer(const float* a, long lda, int M, int N, const float* b, long ldb, int c0, int c1, const float* scale,
                  float* y, long ldy) {
    const int num_tiles = (M + kTokenTile - 1) / kTokenTile;
    for (int tile = 0, m0 = 0; tile < num_tiles; tile++) {
        const int mt = (M - m0) / (num_tiles - tile);
        const float *am = a + m0 * lda, *sm = ADD ? scale + m0 : scale;
        float* ym = y + m0 * ldy;
        switch (mt) {
            case 1: outer_columns<1, ADD>(am, lda, N, b, ldb, c0, c1, sm, ym, ldy); break;
            case 2: outer_columns<2, ADD>(am, lda, N, b, ldb, c0, c1, sm, ym, ldy); break;
            case 3: outer_columns<3, ADD>(am, lda, N, b, ldb, c0, c1, sm, ym, ldy); break;
            case 4:
                if constexpr (kTokenTile >= 4) outer_columns<4, ADD>(am, lda, N, b, ldb, c0, c1, sm, ym, ldy);
                break;
            case 5:
                if constexpr (kTokenTile >= 5) outer_columns<5, ADD>(am, lda, N, b, ldb, c0, c1, sm, ym, ldy);
                break;
            case 6:
                if constexpr (kTokenTile >= 6) outer_columns<6, ADD>(am, lda, N, b, ldb, c0, c1, sm, ym, ldy);
                break;
        }
        m0 += mt;
    }
}

constexpr int kOuterColumns = 4 * W;  // columns of b per tile of `outer`

// y[m][c] = sum_n a[m][n] * w[n][c] over w's first N rows, columns [c0, c1).
inline void outer(const float* a, long lda, int M, int N, const Matrix& w, int c0, int c1, float* y, long ldy) {
    if (w.type == kWeightFp32) {
        const float* at = reinterpret_cast<const float*>(w.data);
        return outer<false>(a, lda, M, N, at, w.columns, c0, c1, nullptr, y, ldy);
    }
    static thread_local OwnMemory memory;
    float* block = memory.take<float>(size_t(N) * kOuterColumns);
    for (int c = c0; c < c1; c += kOuterColumns) {
        const int n = min_int(kOuterColumns, c1 - c);
        widen(w, 0, N, c, n, block, kOuterColumns);
        outer<false>(a, lda, M, N, block, kOuterColumns, 0, n, nullptr, y + c, ldy);
    }
}

}  // namespace hadal
