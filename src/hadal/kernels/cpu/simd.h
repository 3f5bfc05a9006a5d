// One float vector type V of W lanes, the same code for AVX-512 (16 lanes), AVX2+FMA (8) and anything else (8, by GCC
// vector extensions). Independent of matrices.
//
// No -ffast-math: every sum below is written in its order of execution, because a token's result must not depend on the
// tile or thread that computed it (batch invariance). Reassociation would break that, and softmax needs infinities.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define HADAL_INLINE inline __attribute__((always_inline))

// Keep a value in a register: otherwise GCC folds a load into each FMA that uses it (28 loads a step, not 10), and the
// load ports become the limit: 214 GFLOP/s became 257 on one Zen 5 core, 180 became 260 for 4 tokens.
#if defined(__AVX2__)
#define HADAL_PIN(value) asm("" : "+v"(value))
#else
#define HADAL_PIN(value)
#endif

namespace hadal {

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

constexpr int W = 16;
constexpr const char* kIsa = "avx512";
using V = __m512;
HADAL_INLINE V v_zero() { return _mm512_setzero_ps(); }
HADAL_INLINE V v_set(float a) { return _mm512_set1_ps(a); }
HADAL_INLINE V v_load(const float* p) { return _mm512_loadu_ps(p); }
HADAL_INLINE void v_store(float* p, V a) { _mm512_storeu_ps(p, a); }
HADAL_INLINE __mmask16 v_mask(int n) { return (__mmask16)((1u << n) - 1u); }
HADAL_INLINE V v_load_part(const float* p, int n) { return _mm512_maskz_loadu_ps(v_mask(n), p); }
HADAL_INLINE void v_store_part(float* p, V a, int n) { _mm512_mask_storeu_ps(p, v_mask(n), a); }
HADAL_INLINE V v_fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
HADAL_INLINE V v_max(V a, V b) { return _mm512_max_ps(a, b); }
HADAL_INLINE V v_min(V a, V b) { return _mm512_min_ps(a, b); }
// a * 2^n for integral n, exact down to denormals.
HADAL_INLINE V v_scale2(V a, V n) { return _mm512_scalef_ps(a, n); }
HADAL_INLINE V v_round(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
HADAL_INLINE uint32_t v_gt_bits(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
HADAL_INLINE uint32_t v_ge_bits(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
HADAL_INLINE V v_keep(V a, uint32_t bits) { return _mm512_maskz_mov_ps((__mmask16)bits, a); }
HADAL_INLINE int v_compress(float* to, V a, uint32_t bits) {
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps((__mmask16)bits, a));
    return __builtin_popcount(bits);
}
struct Sums {
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    HADAL_INLINE void add(V a) {
        low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(a)));
        high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1)));
    }
    double total() const { return _mm512_reduce_add_pd(_mm512_add_pd(low, high)); }
};

#elif defined(__AVX2__) && defined(__FMA__)

constexpr int W = 8;
constexpr const char* kIsa = "avx2";
using V = __m256;
alignas(32) static const int32_t kMaskBits[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
HADAL_INLINE V v_zero() { return _mm256_setzero_ps(); }
HADAL_INLINE V v_set(float a) { return _mm256_set1_ps(a); }
HADAL_INLINE V v_load(const float* p) { return _mm256_loadu_ps(p); }
HADAL_INLINE void v_store(float* p, V a) { _mm256_storeu_ps(p, a); }
HADAL_INLINE __m256i v_mask(int n) { return _mm256_loadu_si256((const __m256i*)(kMaskBits + 8 - n)); }
HADAL_INLINE V v_load_part(const float* p, int n) { return _mm256_maskload_ps(p, v_mask(n)); }
HADAL_INLINE void v_store_part(float* p, V a, int n) { _mm256_maskstore_ps(p, v_mask(n), a); }
HADAL_INLINE V v_fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
HADAL_INLINE V v_max(V a, V b) { return _mm256_max_ps(a, b); }
HADAL_INLINE V v_min(V a, V b) { return _mm256_min_ps(a, b); }
HADAL_INLINE V v_scale2(V a, V n) {  // n in [-126, 127]: built in the exponent field
    return a *
           _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
HADAL_INLINE V v_round(V a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
HADAL_INLINE uint32_t v_gt_bits(V a, V b) { return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ))); }
HADAL_INLINE uint32_t v_ge_bits(V a, V b) { return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ))); }
HADAL_INLINE V v_keep(V a, uint32_t bits) {
    const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_and_si256(_mm256_set1_epi32(int(bits)), lanes);
    return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lanes)));
}
HADAL_INLINE int v_compress(float* to, V a, uint32_t bits) {
    float at[W];
    _mm256_storeu_ps(at, a);
    int n = 0;
    for (; bits; bits &= bits - 1) to[n++] = at[__builtin_ctz(bits)];
    return n;
}
struct Sums {
    __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
    HADAL_INLINE void add(V a) {
        low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(a)));
        high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)));
    }
    double total() const {
        const __m256d sum = _mm256_add_pd(low, high);
        return (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
};

#else

constexpr int W = 8;
constexpr const char* kIsa = "generic";
typedef float V __attribute__((vector_size(32)));
typedef int32_t VI __attribute__((vector_size(32)));
HADAL_INLINE V v_zero() { return V{}; }
HADAL_INLINE V v_set(float a) { return V{a, a, a, a, a, a, a, a}; }
HADAL_INLINE V v_load(const float* p) {
    V a;
    std::memcpy(&a, p, sizeof a);
    return a;
}
HADAL_INLINE void v_store(float* p, V a) { std::memcpy(p, &a, sizeof a); }
HADAL_INLINE V v_load_part(const float* p, int n) {
    V a{};
    for (int i = 0; i < n; i++) a[i] = p[i];
    return a;
}
HADAL_INLINE void v_store_part(float* p, V a, int n) {
    for (int i = 0; i < n; i++) p[i] = a[i];
}
HADAL_INLINE V v_fma(V a, V b, V c) { return a * b + c; }
HADAL_INLINE V v_max(V a, V b) { return a > b ? a : b; }
HADAL_INLINE V v_min(V a, V b) { return a < b ? a : b; }
HADAL_INLINE V v_scale2(V a, V n) {
    VI i = (__builtin_convertvector(n, VI) + 127) << 23;
    V s;
    std::memcpy(&s, &i, sizeof s);
    return a * s;
}
HADAL_INLINE V v_round(V a) {
    for (int i = 0; i < W; i++) a[i] = std::nearbyint(a[i]);
    return a;
}
HADAL_INLINE uint32_t v_gt_bits(V a, V b) {
    uint32_t bits = 0;
    for (int i = 0; i < W; i++) bits |= uint32_t(a[i] > b[i]) << i;
    return bits;
}
HADAL_INLINE uint32_t v_ge_bits(V a, V b) {
    uint32_t bits = 0;
    for (int i = 0; i < W; i++) bits |= uint32_t(a[i] >= b[i]) << i;
    return bits;
}
HADAL_INLINE V v_keep(V a, uint32_t bits) {
    for (int i = 0; i < W; i++) a[i] = bits >> i & 1 ? a[i] : 0.0f;
    return a;
}
HADAL_INLINE int v_compress(float* to, V a, uint32_t bits) {
    int n = 0;
    for (; bits; bits &= bits - 1) to[n++] = a[__builtin_ctz(bits)];
    return n;
}
struct Sums {
    double at[W] = {};
    HADAL_INLINE void add(V a) {
        for (int i = 0; i < W; i++) at[i] += double(a[i]);
    }
    double total() const { return ((at[0] + at[1]) + (at[2] + at[3])) + ((at[4] + at[5]) + (at[6] + at[7])); }
};

#endif

// A set of lanes is an integer bit mask. v_gt_bits and v_ge_bits: lanes where a is larger than b, or at least b; not
// set if either is NaN. v_keep: a in the lanes of the set, 0 elsewhere. v_compress writes these lanes contiguously and
// returns their number, but may write W values. Sums adds in FP64, separately per lane.
HADAL_INLINE uint32_t v_bits(int n) { return n >= W ? (1u << W) - 1u : (1u << n) - 1u; }  // the first n lanes

// Load up to W values at p, the rest `fill`; for the end of a row.
HADAL_INLINE V v_load_or(const float* p, int n, float fill) {
    if (n >= W) return v_load(p);
    float at[W];
    for (int i = 0; i < W; i++) at[i] = i < n ? p[i] : fill;
    return v_load(at);
}

// Load up to W values at p, the rest zero; n may be larger than W.
HADAL_INLINE V v_load_tail(const float* p, int n) { return n >= W ? v_load(p) : v_load_part(p, n); }
HADAL_INLINE void v_store_tail(float* p, V a, int n) {
    if (n >= W)
        v_store(p, a);
    else
        v_store_part(p, a, n);
}

// Four lanes: the sums of four accumulators, one per weight row.
struct Quad {
    float at[4];
};

// Return the lane sums of a, b, c, d. The tree is the same for each of the four, so a row's sum does not depend on its
// neighbours.
HADAL_INLINE Quad v_sum4(V a, V b, V c, V d) {
    Quad q;
#if defined(__AVX2__) && defined(__FMA__)
#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
    const V ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const V cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const V abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
#else
    const V ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const V cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    const __m256 half = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
#endif
    _mm_storeu_ps(q.at, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
    const V all[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) {
        const V x = all[i];
        q.at[i] = ((x[0] + x[2]) + (x[1] + x[3])) + ((x[4] + x[6]) + (x[5] + x[7]));
    }
#endif
    return q;
}

// Return the sums of a tile's accumulators for one token; there may be fewer than four.
template <int NR>
HADAL_INLINE Quad v_sums(const V (&a)[NR]) {
    constexpr int r1 = NR > 1 ? 1 : 0, r2 = NR > 2 ? 2 : 0, r3 = NR > 3 ? 3 : 0;
    return v_sum4(a[0], NR > 1 ? a[r1] : v_zero(), NR > 2 ? a[r2] : v_zero(), NR > 3 ? a[r3] : v_zero());
}

HADAL_INLINE float v_sum(V a) { return v_sum4(a, v_zero(), v_zero(), v_zero()).at[0]; }

HADAL_INLINE float v_max_lane(V a) {
#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
    return _mm512_reduce_max_ps(a);
#else
    float m = a[0];
    for (int i = 1; i < W; i++) m = a[i] > m ? a[i] : m;
    return m;
#endif
}

// e^x. Cody-Waite reduction by ln 2 in two parts, then the degree-5 polynomial of Cephes' expf (about 1 ulp on [-ln2/2,
// ln2/2]). Inputs below -87 count as -87 (at most 1.6e-38): -inf gives a value too small for any FP32 sum, never a NaN.
// The upper clamp keeps 2^n finite. A NaN stays NaN on AVX (max/min return the second operand).
HADAL_INLINE V v_exp(V x) {
    x = v_min(v_set(88.0f), v_max(v_set(-87.0f), x));
    const V n = v_round(x * v_set(1.44269504088896341f));
    V r = v_fma(n, v_set(-0.693359375f), x);
    r = v_fma(n, v_set(2.12194440e-4f), r);
    V p = v_set(1.9875691500e-4f);
    p = v_fma(p, r, v_set(1.3981999507e-3f));
    p = v_fma(p, r, v_set(8.3334519073e-3f));
    p = v_fma(p, r, v_set(4.1665795894e-2f));
    p = v_fma(p, r, v_set(1.6666665459e-1f));
    p = v_fma(p, r, v_set(5.0000001201e-1f));
    return v_scale2(v_fma(p, r * r, r + v_set(1.0f)), n);
}

// Same function for one value: the sum of W equal lanes is exactly W times the value.
inline float exp1(float x) { return v_sum(v_exp(v_set(x))) / float(W); }

HADAL_INLINE V v_sigmoid(V x) { return v_set(1.0f) / (v_set(1.0f) + v_exp(v_zero() - x)); }

inline float sigmoid1(float x) { return v_sum(v_sigmoid(v_set(x))) / float(W); }

}  // namespace hadal
