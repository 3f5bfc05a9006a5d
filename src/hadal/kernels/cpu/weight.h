// Weight matrix in its stored form, and conversion of its values to floats: FP32, BF16 (the upper half of one), or E4M3
// codes with an FP32 scale per block. Independent of products.
//
// An E4M3 weight's value is code * scale, rounded to FP32 once, equal to the matrix dequantised to FP32.
#pragma once
#include "codec.h"

namespace hadal {

HADAL_INLINE int min_int(int a, int b) { return a < b ? a : b; }
HADAL_INLINE int max_int(int a, int b) { return a > b ? a : b; }

enum WeightType { kWeightFp32 = 0, kWeightBf16 = 1, kWeightFp8 = 2 };
constexpr int kWeightBytes[] = {4, 2, 1};  // bytes per value, by type
constexpr int kScaleBlock = 128;           // rows, and columns, that share a scale (core/model_config, SCALE_BLOCK)

struct Matrix {  // filled by Python, field for field
    const char* data;     // rows of `columns` values, without gaps
    const float* scales;  // [blocks of 128 rows, blocks of 128 columns]; FP8 only
    int32_t type;
    int32_t columns;
    int32_t first_row;           // first row of this view in the whole matrix, for its scales
    int32_t is_tiled;            // true: multiplied by tile units, if there are any (amx.h); never FP32
    int32_t is_rounding_inputs;  // true: inputs are rounded to E4M3, 1x128, as for dispatch

    explicit operator bool() const { return data != nullptr; }
    const char* row(long n) const { return data + n * columns * kWeightBytes[type]; }
    Matrix from(int n) const {  // return a view without the first n rows
        Matrix rest = *this;
        rest.data = row(n);
        rest.first_row += n;
        return rest;
    }
    // Row n's scales, one per block of columns.
    const float* scales_of(int n) const {
        return scales + long((first_row + n) / kScaleBlock) * ((columns + kScaleBlock - 1) / kScaleBlock);
    }
};

HADAL_INLINE V v_of_bf16(const uint16_t* p) {
#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
#elif defined(__AVX2__) && defined(__FMA__)
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
#else
    V a;
    for (int i = 0; i < W; i++) a[i] = float_of(uint32_t(p[i]) << 16);
    return a;
#endif
}

// E4M3 to FP16 is a shift that leaves the value 2^8 times too small, and FP16 to FP32 is exact, subnormals included. So
// the scale is multiplied by kFp8Lift, exactly.
#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && defined(__AVX512BW__)
constexpr float kFp8Lift = 256.0f;
HADAL_INLINE V v_of_fp8(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
    return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(int16_t(0xBFFF))));
}
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
constexpr float kFp8Lift = 256.0f;
HADAL_INLINE V v_of_fp8(const uint8_t* p) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
    return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(int16_t(0xBFFF))));
}
#else
constexpr float kFp8Lift = 1.0f;
HADAL_INLINE V v_of_fp8(const uint8_t* p) {
    alignas(64) float a[W];
    for (int i = 0; i < W; i++) a[i] = e4m3_value(p[i]);
    return v_load(a);
}
#endif

// Widen n values of row `row` from column k on.
inline void widen_row(const Matrix& w, int row, int k, int n, float* to) {
    const char* from = w.row(row) + long(k) * kWeightBytes[w.type];
    if (w.type == kWeightFp32) {
        std::memcpy(to, from, size_t(n) * sizeof(float));
    } else if (w.type == kWeightBf16) {
        const uint16_t* at = reinterpret_cast<const uint16_t*>(from);
        int i = 0;
        for (; i + W <= n; i += W) v_store(to + i, v_of_bf16(at + i));
        for (; i < n; i++) to[i] = float_of(uint32_t(at[i]) << 16);
    } else {
        const uint8_t* at = reinterpret_cast<const uint8_t*>(from);
        const float* scale_at = w.scales_of(row) + k / kScaleBlock;
        for (int i = 0, end = kScaleBlock - k % kScaleBlock; i < n; end += kScaleBlock) {
            const float scale = *scale_at++;
            const V lifted = v_set(scale * kFp8Lift);
            end = min_int(n, end);
            for (; i + W <= end; i += W) v_store(to + i, v_of_fp8(at + i) * lifted);
            for (; i < end; i++) to[i] = e4m3_value(at[i]) * scale;
        }
    }
}

// Widen rows [n0, n1), n columns from k on, into rows of `ld` floats.
inline void widen(const Matrix& w, int n0, int n1, int k, int n, float* to, long ld) {
    for (int row = n0; row < n1; row++) widen_row(w, row, k, n, to + (row - n0) * ld);
}

constexpr int kRowBlockBytes = 64 << 10;     // block of W rows that stays in L2 over all token tiles
constexpr int kPrefetchBytes = 12 << 10;     // prefetch distance of the first pass over W

HADAL_INLINE void prefetch_bytes(const char* from, long count) {
    for (long i = 0; i < count; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// Memory of one thread that only grows. A later request may overwrite it.
struct OwnMemory {
    char* at = nullptr;
    size_t size = 0;
    ~OwnMemory() { std::free(at); }
    template <class T>
    T* take(size_t count) {
        const size_t bytes = (count * sizeof(T) + 127) / 64 * 64;
        if (bytes > size) {
            std::free(at);
            size = 0;
            at = static_cast<char*>(std::aligned_alloc(64, bytes));
            if (!at) throw std::bad_alloc();
            size = bytes;
        }
        return reinterpret_cast<T*>(at);
    }
};

}  // namespace hadal
