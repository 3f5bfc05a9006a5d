// SwiGLU feed-forwards over tokens: the routed experts (each on its own tokens) and, in the same phases, dense ones
// (the shared expert on all tokens). y[t] += sum over its experts of weight * down(silu(gate x) * up x).
//
// A "job" is one feed-forward with its tokens. Two phases with a barrier between:
//   up    members split the jobs' I axis (whole jobs where there are many), so the activation follows in the same
//         thread;
//   down  members split the D axis and each walks all jobs in order, so every y[t][d] has one writer: no atomics, and a
//         token's experts are added in the order of their ids whatever the batch and the number of threads.
// Shapes: T tokens, D model, E experts, I expert width, K experts per token.
#pragma once
#include "norm.h"
#include "team.h"

namespace hadal {

struct Job {
    const float* gate_up;  // [2I, D]
    const float* down;     // [D, I]
    int I;
    int num_tokens;
    const int* pairs;  // sorted routing: t * K + k per token of this job; null: all tokens 0..num_tokens, weight 1
    float* gate;       // [num_tokens, I], then the activation
    float* up;         // [num_tokens, I]
};

// One member's own copy of the routing, sorted by expert. Sorting is repeated by every member: cheaper than a barrier.
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
    for (int e = E; e > 0; e--) s.offset_E1[e] = s.offset_E1[e - 1];  // the fill moved every start to its end
    s.offset_E1[0] = 0;
}

// Appends a job for every expert that has tokens. gate/up: [T * K, I] for all of them.
inline void add_routed_jobs(Sorted& s, const float* gate_up_E, const float* down_E, int E, int I, int D, float* gate,
                            float* up) {
    for (int e = 0; e < E; e++) {
        const int begin = s.offset_E1[e], count = s.offset_E1[e + 1] - begin;
        if (count == 0) continue;
        s.jobs[s.num_jobs++] =
            Job{gate_up_E + long(e) * 2 * I * D, down_E + long(e) * D * I, I, count, s.pair_TK + begin,
                gate + long(begin) * I,          up + long(begin) * I};
    }
}

struct JobTokens {
    const float* x;
    long ld;
    const int* pairs;
    int K;
    HADAL_INLINE const float* operator()(int m) const { return x + (pairs ? pairs[m] / K : m) * ld; }
};

// Rows [i0, i1) of a job's gate and up, and the activation of that stripe. `after`: see gemm.
inline void run_up(const Job& job, const float* x, int D, int K, int i0, int i1, const float* after) {
    const JobTokens row{x, D, job.pairs, K};
    // Stripes of gate and up in turn, so that the activation finds both in cache.
    const int stripe = max_int(32, kRowBlockBytes / int(sizeof(float)) / D / 16 * 16);
    for (int a = i0; a < i1; a += stripe) {
        const int b = min_int(i1, a + stripe);
        const float* up = job.gate_up + long(job.I) * D;
        gemm(row, job.num_tokens, job.gate_up, D, D, a, b, Store<false>{job.gate, job.I}, up + long(a) * D);
        gemm(row, job.num_tokens, up, D, D, a, b, Store<false>{job.up, job.I},
             b < i1 ? job.gate_up + long(b) * D : after);
        for (int m = 0; m < job.num_tokens; m++) {
            float* g = job.gate + long(m) * job.I + a;
            silu_mul(g, job.up + long(m) * job.I + a, b - a, g);
        }
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

// Columns [d0, d1) of y += this job.
inline void run_down(const Job& job, int D, int K, const float* weights_TK, int d0, int d1, float* y,
                     const float* after) {
    gemm(RowAt{job.gate, job.I}, job.num_tokens, job.down, job.I, job.I, d0, d1,
         AddWeighted{y, D, job.pairs, K, weights_TK}, after);
}

// A job's cost per unit of I, in tokens: reading a weight row from memory costs as much as multiplying it by about 8
// tokens.
HADAL_INLINE long job_cost(const Job& job) { return job.num_tokens + 8; }

// The member's share of all jobs' I axes, equal in cost; borders on multiples of 16 so that activations are whole
// vectors. `after`: what this member multiplies when the jobs are done.
inline void run_up_share(const Member& me, const Job* jobs, int num_jobs, const float* x, int D, int K,
                         const float* after) {
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
        if (i0 < i1) run_up(job, x, D, K, i0, i1, is_last ? after : jobs[j + 1].gate_up);
        start += length;
    }
}

inline void run_down_share(const Member& me, const Job* jobs, int num_jobs, int D, int K, const float* weights_TK,
                           float* y, const float* after) {
    int d0, d1;
    me.share(D, 4, d0, d1);
    for (int j = 0; j < num_jobs; j++)
        run_down(jobs[j], D, K, weights_TK, d0, d1, y,
                 j + 1 < num_jobs ? jobs[j + 1].down + long(d0) * jobs[j + 1].I : after);
}

// The first row of this member's share of a weight: what to fetch ahead of a phase that multiplies it.
inline const float* share_of(const Member& me, const float* w, int rows, int K) {
    int begin, end;
    me.share(rows, 4, begin, end);
    return w + long(begin) * K;
}

}  // namespace hadal
