// Rows as they travel between ranks: FP32, BF16, or E4M3 codes with a scale per 128 channels; and the weighted sum of
// returned rows. Independent of ranks. Every loop here is plain and branch-free, so that the compiler vectorises it for
// any instruction set, and bit-equal to its torch twin (reference/codec.py).
//
// An FP8 row is D codes, padded with zeros to a multiple of 4, then ceil(D / 128) FP32 scales.
#pragma once
#include <algorithm>

#include "simd.h"

namespace hadal {

enum RowFormat { kRowFp32 = 0, kRowFp8 = 1, kRowFp8Pow2 = 2, kRowBf16 = 3 };
constexpr int kScaleGroup = 128;
constexpr float kE4m3Max = 448.0f;

HADAL_INLINE uint32_t bits_of(float a) {
    uint32_t b;
    std::memcpy(&b, &a, sizeof b);
    return b;
}

HADAL_INLINE float float_of(uint32_t b) {
    float a;
    std::memcpy(&a, &b, sizeof a);
    return a;
}

// Nearest E4M3 code, ties to even. |y| <= 448, or NaN.
HADAL_INLINE uint8_t e4m3_code(float y) {
    const uint32_t bits = bits_of(y), sign = (bits >> 24) & 0x80u, b = bits & 0x7FFFFFFFu;
    // Below 2^-6 the codes are multiples of 2^-9, the spacing of floats at 2^14: the addition rounds.
    const uint32_t small = bits_of(float_of(b) + 16384.0f) - 0x46800000u;
    const uint32_t normal = (b - (120u << 23) + 0x7FFFFu + ((b >> 20) & 1u)) >> 20;
    const uint32_t code = b < (121u << 23) ? small : normal;
    return uint8_t((b > 0x7F800000u ? 0x7Fu : code) | sign);
}

// Exact, without subnormal floats in between; the two NaN codes give +-480.
HADAL_INLINE float e4m3_value(uint8_t code) {
    const uint32_t low = code & 0x7Fu, sign = uint32_t(code & 0x80u) << 24;
    const float small = float_of((121u << 23) + (low << 20)) - 0.015625f;
    const float normal = float_of((120u << 23) + (low << 20));
    return float_of(bits_of(low < 8u ? small : normal) | sign);
}

HADAL_INLINE uint16_t bf16_bits(float a) {
    const uint32_t b = bits_of(a);
    const uint32_t rounded = (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16;
    return uint16_t((b & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

inline int padded_codes(int D) { return (D + 3) / 4 * 4; }

inline void encode_fp8(const float* x, int D, bool is_pow2, uint8_t* row) {
    const int codes = padded_codes(D);
    for (int g = 0; g * kScaleGroup < D; g++) {
        const int begin = g * kScaleGroup, n = std::min(kScaleGroup, D - begin);
        const float* from = x + begin;
        uint32_t largest = 0;  // bits are ordered like magnitudes, with NaN above all, so that NaN reaches the caller
        for (int i = 0; i < n; i++) largest = std::max(largest, bits_of(from[i]) & 0x7FFFFFFFu);
        const float amax = float_of(largest);
        float scale = (amax < 1e-4f ? 1e-4f : amax) / kE4m3Max;
        if (is_pow2 && largest < 0x7F800000u) {
            const uint32_t b = bits_of(scale);
            scale = float_of((b + 0x7FFFFFu) & 0xFF800000u);
        }
        uint8_t* to = row + begin;
        for (int i = 0; i < n; i++) {
            float y = from[i] / scale;
            y = y > kE4m3Max ? kE4m3Max : y;
            y = y < -kE4m3Max ? -kE4m3Max : y;
            to[i] = e4m3_code(y);
        }
        std::memcpy(row + codes + g * long(sizeof scale), &scale, sizeof scale);
    }
    for (int i = D; i < codes; i++) row[i] = 0;
}

inline void decode_fp8(const uint8_t* row, int D, float* y) {
    const int codes = padded_codes(D);
    for (int g = 0; g * kScaleGroup < D; g++) {
        const int begin = g * kScaleGroup, n = std::min(kScaleGroup, D - begin);
        float scale;
        std::memcpy(&scale, row + codes + g * long(sizeof scale), sizeof scale);
        for (int i = 0; i < n; i++) y[begin + i] = e4m3_value(row[begin + i]) * scale;
    }
}

inline void encode_row(const float* x, int D, int format, uint8_t* row) {
    if (format == kRowFp32) {
        std::memcpy(row, x, size_t(D) * sizeof(float));
    } else if (format == kRowBf16) {
        uint16_t* to = reinterpret_cast<uint16_t*>(row);
        for (int i = 0; i < D; i++) to[i] = bf16_bits(x[i]);
    } else {
        encode_fp8(x, D, format == kRowFp8Pow2, row);
    }
}

inline void decode_row(const uint8_t* row, int D, int format, float* y) {
    if (format == kRowFp32) {
        std::memcpy(y, row, size_t(D) * sizeof(float));
    } else if (format == kRowBf16) {
        const uint16_t* from = reinterpret_cast<const uint16_t*>(row);
        for (int i = 0; i < D; i++) y[i] = float_of(uint32_t(from[i]) << 16);
    } else {
        decode_fp8(row, D, y);
    }
}

// y = sum of weight * row over a token's K rows, one fused multiply-add each, in the order given.
inline void sum_rows(const uint8_t* const* rows, const float* weights, int K, int D, bool is_bf16, float* y) {
    constexpr int kPiece = 256;  // stays in L1 while the K rows are added
    float sum[kPiece];
    for (int begin = 0; begin < D; begin += kPiece) {
        const int n = std::min(kPiece, D - begin);
        for (int i = 0; i < n; i++) sum[i] = 0.0f;
        for (int k = 0; k < K; k++) {
            const float weight = weights[k];
            if (is_bf16) {
                const uint16_t* from = reinterpret_cast<const uint16_t*>(rows[k]) + begin;
                for (int i = 0; i < n; i++)
                    sum[i] = __builtin_fmaf(weight, float_of(uint32_t(from[i]) << 16), sum[i]);
            } else {
                const float* from = reinterpret_cast<const float*>(rows[k]) + begin;
                for (int i = 0; i < n; i++) sum[i] = __builtin_fmaf(weight, from[i], sum[i]);
            }
        }
        std::memcpy(y + begin, sum, size_t(n) * sizeof(float));
    }
}

}  // namespace hadal
