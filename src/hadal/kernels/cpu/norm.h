// RMS norm, layer norm, SwiGLU's activation and the two rotations, one token at a time.
#pragma once
#include "gemm.h"

namespace hadal {

// y = g * (x / sqrt(mean(x^2) + eps)), n values.
inline void rms_norm(const float* x, const float* g, int n, float eps, float* y) {
    V sum[4] = {v_zero(), v_zero(), v_zero(), v_zero()};  // four chains hide the latency of the addition
    int i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
        for (int j = 0; j < 4; j++) {
            const V v = v_load(x + i + j * W);
            sum[j] = v_fma(v, v, sum[j]);
        }
    for (; i < n; i += W) {
        const V v = v_load_tail(x + i, n - i);
        sum[0] = v_fma(v, v, sum[0]);
    }
    const Quad q = v_sum4(sum[0], sum[1], sum[2], sum[3]);
    const float scale = 1.0f / std::sqrt(((q.at[0] + q.at[1]) + (q.at[2] + q.at[3])) / float(n) + eps);
    for (i = 0; i < n; i += W) {
        const int left = n - i;
        v_store_tail(y + i, v_load_tail(g + i, left) * (v_load_tail(x + i, left) * v_set(scale)), left);
    }
}

// y = g * (x - mean) / sqrt(variance + eps) + bias, n values.
inline void layer_norm(const float* x, const float* g, const float* bias, int n, float eps, float* y) {
    V sum = v_zero(), square = v_zero();
    for (int i = 0; i < n; i += W) sum = sum + v_load_tail(x + i, n - i);
    const V mean = v_set(v_sum(sum) / float(n));
    for (int i = 0; i < n; i += W) {
        const V off = v_keep(v_load_tail(x + i, n - i) - mean, v_bits(n - i));
        square = v_fma(off, off, square);
    }
    const V scale = v_set(1.0f / std::sqrt(v_sum(square) / float(n) + eps));
    for (int i = 0; i < n; i += W) {
        const int left = n - i;
        const V off = v_load_tail(x + i, left) - mean;
        v_store_tail(y + i, v_fma(v_load_tail(g + i, left), off * scale, v_load_tail(bias + i, left)), left);
    }
}

// y = silu(gate) * up; y may be gate.
inline void silu_mul(const float* gate, const float* up, int n, float* y) {
    for (int i = 0; i < n; i += W) {
        const V g = v_load_tail(gate + i, n - i);
        v_store_tail(y + i, g * v_sigmoid(g) * v_load_tail(up + i, n - i), n - i);
    }
}

// DeepSeek's rotation: pair i is (x[2i], x[2i+1]) and keeps its position. cos_sin: R/2 cosines, then R/2 sines.
inline void rope(const float* x, const float* cos_sin, int R, float* y) {
    const int half = R / 2;
    for (int i = 0; i < half; i++) {
        const float a = x[2 * i], b = x[2 * i + 1], c = cos_sin[i], s = cos_sin[half + i];
        y[2 * i] = a * c - b * s;
        y[2 * i + 1] = a * s + b * c;
    }
}

// The indexer's rotation, in place: pair i is (x[i], x[R/2 + i]).
inline void rope_halves(float* x, const float* cos_sin, int R) {
    const int half = R / 2;
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i], c = cos_sin[i], s = cos_sin[half + i];
        x[i] = a * c - b * s;
        x[half + i] = a * s + b * c;
    }
}

}  // namespace hadal
