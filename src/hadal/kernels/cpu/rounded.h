// Products of E4M3 weights with tokens that are also rounded to E4M3 (`compute = "fp8"`), on AVX512-BF16.
//
// A code is exactly a BF16, so an instruction multiplies 32 pairs and adds in FP32, at twice the rate of FP32's own
// units. A sum over 128 of K is multiplied by both scales and added to the result in FP32, as in DeepSeek-V3 (arXiv
// 2412.19437, 3.3.2). The order of additions of one result is fixed by K alone. Unrounded activations would take three
// BF16s each; without tile units (amx.h) three products are slower than one in FP32.
#pragma once
#include "weight.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define HADAL_BF16 1
#endif

namespace hadal {

#if defined(HADAL_BF16)

// E4M3 codes become BF16s by a shift: sign, exponent and mantissa are unchanged, smaller by 2^8 (kFp8Lift corrects
// this). Subnormal codes (and zero) have no leading one and are looked up. They are rare: the largest code is 448.
alignas(64) inline constexpr uint16_t kSubnormals[32] = {0, 0x3700, 0x3780, 0x37C0, 0x3800, 0x3820, 0x3840, 0x3860};

HADAL_INLINE __m512i bf16_of_fp8(__m256i codes, __mmask32 is_subnormal) {
    const __m512i wide = _mm512_cvtepi8_epi16(codes), kept = _mm512_set1_epi16(int16_t(0x87F0));
    const __m512i normal = _mm512_ternarylogic_epi32(_mm512_slli_epi16(wide, 4), kept, _mm512_set1_epi16(0x3800),
                                                     0xEA);  // a & b | c
    if (__builtin_expect(is_subnormal == 0, 1)) return normal;
    const __m512i small = _mm512_permutexvar_epi16(wide, _mm512_load_si512(kSubnormals));
    const __m512i sign = _mm512_and_si512(wide, _mm512_set1_epi16(int16_t(0x8000)));
    return _mm512_mask_blend_epi16(is_subnormal, normal, _mm512_or_si512(small, sign));
}

// A matrix with scales in other blocks is in memory as FP32, but its inputs are rounded, too.
HADAL_INLINE bool multiplies_codes(const Matrix& w) { return w.is_rounding_inputs && w.type == kWeightFp8; }

constexpr int kRoundedTile = 3;    // tokens by 4 rows: 12 sums, and 12 of the current block
constexpr int kRoundedDepth = 32;  // values of K per instruction

// Tokens as BF16s, K rounded up to whole blocks, and their scales.
struct RoundedTokens {
    int num_blocks;
    uint16_t* values;  // [M, 128 * num_blocks]
    float* scales;     // [M, num_blocks]
    const uint16_t* token(int m) const { return values + long(m) * num_blocks * kScaleBlock; }
    const float* scales_of(int m) const { return scales + long(m) * num_blocks; }
};

template <class Row>
inline RoundedTokens round_tokens(const Row& row, int M, int K) {
    static thread_local OwnMemory memory;
    const int num_blocks = (K + kScaleBlock - 1) / kScaleBlock;
    const size_t num_scales = size_t(M) * size_t(num_blocks);
    float* scales = memory.take<float>(num_scales + num_scales * kScaleBlock / 2 + 16);
    uint16_t* values = reinterpret_cast<uint16_t*>(scales + (num_scales + 15) / 16 * 16);
    uint8_t encoded[kScaleBlock + sizeof(float)];
    for (int m = 0; m < M; m++)
        for (int b = 0; b < num_blocks; b++) {
            const long at = long(m) * num_blocks + b;
            const int n = min_int(kScaleBlock, K - b * kScaleBlock);
            encode_fp8(row(m) + b * kScaleBlock, n, false, encoded);
            std::memcpy(scales + at, encoded + padded_codes(n), sizeof(float));
            uint16_t* to = values + at * kScaleBlock;
            for (int i = 0; i < n; i++) to[i] = uint16_t(bits_of(e4m3_value(encoded[i])) >> 16);
            for (int i = n; i < kScaleBlock; i++) to[i] = 0;
        }
    return {num_blocks, values, scales};
}

// Source of rows of W as BF16s for a tile, which widens them in registers.
struct RoundedCodes {
    const Matrix& w;
    int n, ahead;  // first row, and prefetch distance in rows
    HADAL_INLINE __m512bh operator()(int r, int k) const {
        const char* from = w.row(n + r) + k;
        if (k % 64 == 0) __builtin_prefetch(from + long(ahead) * w.columns, 0, 2);
        const int left = w.columns - k;
        const __m256i codes = __builtin_expect(left >= kRoundedDepth, 1)
                                  ? _mm256_loadu_si256((const __m256i*)from)
                                  : _mm256_maskz_loadu_epi8((__mmask32(1) << left) - 1, from);
        return (__m512bh)bf16_of_fp8(codes, _mm256_testn_epi8_mask(codes, _mm256_set1_epi8(0x78)));
    }
};

// Source of rows of W as BF16s, widened once for many tokens, with zeros up to whole blocks.
struct RoundedBlock {
    const uint16_t* at;
    long ld;
    HADAL_INLINE __m512bh operator()(int r, int k) const { return (__m512bh)_mm512_loadu_si512(at + r * ld + k); }
    static void widen(const Matrix& w, int n0, int n1, int ahead, uint16_t* to, long ld) {
        for (int n = n0; n < n1; n++, to += ld)
            for (int k = 0; k < ld; k += kRoundedDepth)
                if (k < w.columns)
                    _mm512_storeu_si512(to + k, (__m512i)RoundedCodes{w, n, ahead}(0, k));
                else
                    _mm512_storeu_si512(to + k, _mm512_setzero_si512());
    }
};

// Return sums over K of MT tokens by NR rows of W from n on.
template <int MT, int NR, class Load>
HADAL_INLINE void rounded_tile(const RoundedTokens& tokens, int m0, const Matrix& w, int n, const Load& load, Quad* out) {
    V acc[MT][NR];
    const uint16_t* x[MT];
    const float* scale[NR];
#pragma GCC unroll 4
    for (int r = 0; r < NR; r++) {
        scale[r] = w.scales_of(n + r);
#pragma GCC unroll 4
        for (int m = 0; m < MT; m++) acc[m][r] = v_zero();
    }
#pragma GCC unroll 4
    for (int m = 0; m < MT; m++) x[m] = tokens.token(m0 + m);
    for (int b = 0, k = 0; b < tokens.num_blocks; b++) {
        V sum[MT][NR];
#pragma GCC unroll 4
        for (int m = 0; m < MT; m++)
#pragma GCC unroll 4
            for (int r = 0; r < NR; r++) sum[m][r] = v_zero();
        for (const int end = min_int(w.columns, k + kScaleBlock); k < end; k += kRoundedDepth) {
            __m512bh xv[MT];
#pragma GCC unroll 4
            for (int m = 0; m < MT; m++) {
                xv[m] = (__m512bh)_mm512_loadu_si512(x[m] + k);
                HADAL_PIN(xv[m]);
            }
#pragma GCC unroll 4
            for (int r = 0; r < NR; r++) {
                __m512bh wv = load(r, k);
                HADAL_PIN(wv);
#pragma GCC unroll 4
                for (int m = 0; m < MT; m++) sum[m][r] = _mm512_dpbf16_ps(sum[m][r], xv[m], wv);
            }
        }
#pragma GCC unroll 4
        for (int m = 0; m < MT; m++) {
            const float by_token = tokens.scales_of(m0 + m)[b] * kFp8Lift;
#pragma GCC unroll 4
            for (int r = 0; r < NR; r++) acc[m][r] = v_fma(sum[m][r], v_set(by_token * scale[r][b]), acc[m][r]);
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < MT; m++) out[m] = v_sums(acc[m]);
}

template <int NR, class Load>
__attribute__((noinline)) void rounded_tile(int count, const RoundedTokens& tokens, int m0, const Matrix& w, int n,
                                            const Load& load, Quad* out) {
    switch (count) {
        case 1: return rounded_tile<1, NR>(tokens, m0, w, n, load, out);
        case 2: return rounded_tile<2, NR>(tokens, m0, w, n, load, out);
        default: return rounded_tile<3, NR>(tokens, m0, w, n, load, out);
    }
}

// Multiply all tokens, tile after tile, by rows [n0, n1). load_at(n): loader of the tile at row n.
template <class LoadAt, class Emit>
inline void rounded_rows(const RoundedTokens& tokens, int M, const Matrix& w, int n0, int n1, const LoadAt& load_at,
                         const Emit& emit) {
    Quad out[kRoundedTile];
    for (int m = 0; m < M; m += kRoundedTile) {
        const int count = min_int(kRoundedTile, M - m);
        for (int n = n0, rows; n < n1; n += rows) {
            rows = n1 - n >= 4 ? 4 : 1;
            if (rows == 4)
                rounded_tile<4>(count, tokens, m, w, n, load_at(n), out);
            else
                rounded_tile<1>(count, tokens, m, w, n, load_at(n), out);
            for (int t = 0; t < count; t++) emit(m + t, n, out[t], rows, true);
        }
    }
}

// Like `gemm` (gemm.h) for C matrices of one shape; tokens are rounded once. Calls emit[i](token, row, four sums,
// count, true) for rows [n0, n1) of w[i].
template <int C, class Row, class Emit>
inline void rounded_gemm(const Row& row, int M, const Matrix* const (&w)[C], int n0, int n1, const Emit (&emit)[C]) {
    static thread_local OwnMemory memory;
    const int K = w[0]->columns, ahead = max_int(4, kPrefetchBytes / K / 4 * 4);
    const RoundedTokens tokens = round_tokens(row, M, K);
    const long ld = long(tokens.num_blocks) * kScaleBlock;
    const int block_rows = max_int(4, int(kRowBlockBytes / 2 / ld) / 4 * 4);
    for (int i = 0; i < C; i++) {
        if (M <= kRoundedTile) {
            const auto codes_at = [&](int n) { return RoundedCodes{*w[i], n, ahead}; };
            rounded_rows(tokens, M, *w[i], n0, n1, codes_at, emit[i]);
            continue;
        }
        uint16_t* block = memory.take<uint16_t>(size_t(block_rows) * size_t(ld));
        for (int r0 = n0; r0 < n1; r0 += block_rows) {
            const int r1 = min_int(n1, r0 + block_rows);
            RoundedBlock::widen(*w[i], r0, r1, ahead, block, ld);
            const auto block_at = [&](int n) { return RoundedBlock{block + (n - r0) * ld, ld}; };
            rounded_rows(tokens, M, *w[i], r0, r1, block_at, emit[i]);
        }
    }
}

#endif

}  // namespace hadal
