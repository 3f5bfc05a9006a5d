// SwiGLU feed-forwards over tokens: the routed experts (each on its own tokens) and, in the same phases, dense networks
// (such as the shared expert) on all tokens. y[t] += sum over its experts of weight * down(silu(gate x) * up x).
//
// A "job" is one feed-forward with its tokens. There are two phases with a barrier between them:
//   up    members split the jobs' I axis (whole jobs where there are many); each also computes the activation;
//   down  members split the D axis and each walks all jobs in order, so every y[t][d] has one writer: no atomics, and a
//         token's experts are added in the order of their ids for any batch and number of threads.
// Shapes: T tokens, D model, E experts, I expert width, K experts per token.
#pragma once
#include "norm.h"
#include "team.h"

namespace hadal {

struct MlpMatrices {  // filled by Python, field for field
    Matrix gate, up;  // [I, D]
    Matrix down;      // [D, I]
};

struct Job {
    const MlpMatrices* w;
    int I;
    int num_tokens;
    const int* pairs;  // t * K + k per token of this job; null: tokens 0 .. num_tokens - 1, weight 1
    float* gate;       // [num_tokens, I], then the activation
    float* up;         // [num_tokens, I]
};

// Routing sorted by expert. Every member sorts its own copy, which is cheaper than a barrier.
struct Sorted {
    int* offset_E1;  // [E + 1]
    int* pair_TK;    // [T * K], grouped by expert, tokens ascending
    Job* jobs;       // [E + 1]
    int num_jobs;
};

inline void sort_pairs(const int* ids_TK, int num_pairs, int E, Sorted& s) {
    for (int e = 0; e <= E; e++) s.offset_E1[e] = 0;
    for (int i = 0; i < num_pairs; i++) s.offset_E1[ids_TK[i] + 1]++;
    for (int e = 0; e < E; e++) s.offset_E1[e + 1] += s.offset_E1[e];
    for (int i = 0; i < num_pairs; i++) s.pair_TK[s.offset_E1[ids_TK[i]]++] = i;
    for (int e = E; e > 0; e--) s.offset_E1[e] = s.offset_E1[e - 1];  // filling moved each start to its end
    s.offset_E1[0] = 0;
}

// Append a job for every expert that has tokens. gate, up: memory of all jobs, [T * K, I].
inline void add_routed_jobs(Sorted& s, const MlpMatrices* w_E, int E, int I, float* gate, float* up) {
    for (int e = 0; e < E; e++) {
        const int begin = s.offset_E1[e], count = s.offset_E1[e + 1] - begin;
        if (count == 0) continue;
        s.jobs[s.num_jobs++] =
            Job{w_E + e, I, count, s.pair_TK + begin, gate + long(begin) * I, up + long(begin) * I};
    }
}

struct JobTokens {
    const float* x;
    long ld;
    const int* pairs;
    int K;
    HADAL_INLINE const float* operator()(int m) const { return x + (pairs ? pairs[m] / K : m) * ld; }
};

// Compute rows [i0, i1) of a job's gate and up, and the activation of that stripe. `after`: see gemm.
inline void run_up(const Job& job, const float* x, int D, int K, int i0, int i1, const char* after) {
    const JobTokens row{x, D, job.pairs, K};
    const Matrix &gate = job.w->gate, &up = job.w->up;
    const Store<false> to_gate{job.gate, job.I}, to_up{job.up, job.I};
    const auto activate = [&](int a, int b) {
        for (int m = 0; m < job.num_tokens; m++) {
            float* g = job.gate + long(m) * job.I + a;
            silu_mul(g, job.up + long(m) * job.I + a, b - a, g);
        }
    };
#if defined(HADAL_AMX)
    if (kHasTiles && gate.is_tiled && up.is_tiled && gate.is_rounding_inputs == up.is_rounding_inputs) {
        tile_gemm<2>(row, job.num_tokens, {&gate, &up}, i0, i1, {to_gate, to_up});
        return activate(i0, i1);
    }
#endif
#if defined(HADAL_BF16)
    if (multiplies_codes(gate) && multiplies_codes(up)) {
        rounded_gemm<2>(row, job.num_tokens, {&gate, &up}, i0, i1, {to_gate, to_up});
        return activate(i0, i1);
    }
#endif
    // Stripes of gate and up alternate, so that the activation finds both in cache.
    const int stripe = max_int(32, kRowBlockBytes / int(sizeof(float)) / D / 16 * 16);
    for (int a = i0; a < i1; a += stripe) {
        const int b = min_int(i1, a + stripe);
        gemm(row, job.num_tokens, gate, a, b, to_gate, up.row(a));
        gemm(row, job.num_tokens, up, a, b, to_up, b < i1 ? gate.row(b) : after);
        activate(a, b);
    }
}

// y[token][n] += weight * sum.
struct AddWeighted {
    float* y;
    long ld;
    const int* pairs;
    int K;
    const float* weights;
    HADAL_INLINE void operator()(int m, int n, const Quad& q, int count, bool) const {
        const float weight = pairs ? weights[pairs[m]] : 1.0f;
        float* out = y + (pairs ? pairs[m] / K : m) * ld + n;
        add_quad(out, q, count, weight);
    }
};

// Compute columns [d0, d1) of y += this job.
inline void run_down(const Job& job, int D, int K, const float* weights_TK, int d0, int d1, float* y,
                     const char* after) {
    gemm(RowAt{job.gate, job.I}, job.num_tokens, job.w->down, d0, d1, AddWeighted{y, D, job.pairs, K, weights_TK},
         after);
}

// A job's cost per unit of I, in tokens: reading a weight row from memory costs as much as multiplying it by about 8
// tokens.
HADAL_INLINE long job_cost(const Job& job) { return job.num_tokens + 8; }

// Compute the member's share of all jobs' I axes, equal in cost; borders are multiples of 16, so that activations are
// whole vectors. `after`: the weights that this member multiplies next.
inline void run_up_share(const Member& me, const Job* jobs, int num_jobs, const float* x, int D, int K,
                         const char* after) {
    long total = 0;
    for (int j = 0; j < num_jobs; j++) total += job_cost(jobs[j]) * jobs[j].I;
    const long from = total * me.index / me.count, to = total * (me.index + 1) / me.count;
    long start = 0;
    for (int j = 0; j < num_jobs; j++) {
        const Job& job = jobs[j];
        const long cost = job_cost(job), length = cost * job.I;
        const auto border = [&](long at) {
            if (at <= start) return 0;
            if (at >= start + length) return job.I;
            return int((at - start) / cost / 16 * 16);
        };
        const int i0 = border(from), i1 = border(to);
        const bool is_last = j + 1 == num_jobs || to <= start + length;
        if (i0 < i1) run_up(job, x, D, K, i0, i1, is_last ? after : jobs[j + 1].w->gate.data);
        start += length;
    }
}

inline void run_down_share(const Member& me, const Job* jobs, int num_jobs, int D, int K, const float* weights_TK,
                           float* y, const char* after) {
    int d0, d1;
    me.share(D, 4, d0, d1);
    for (int j = 0; j < num_jobs; j++)
        run_down(jobs[j], D, K, weights_TK, d0, d1, y, j + 1 < num_jobs ? jobs[j + 1].w->down.row(d0) : after);
}

// Return the first row of this member's share of a weight, to prefetch before the phase that multiplies it.
inline const char* share_of(const Member& me, const Matrix& w, int rows) {
    int begin, end;
    me.share(rows, 4, begin, end);
    return w.row(begin);
}

}  // namespace hadal
