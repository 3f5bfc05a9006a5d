// Draws the next token of a row of logits, with log-probabilities. `hadal/reference/sampling.py` documents the fields
// of a slot; this draws the same tokens without sorting a row.
//
// A row is read by whole vectors: once for its best value, once for the sum of its probabilities. Top-k and top-p keep
// all values from a threshold on, which `find_edge` finds like quickselect, among the few possible values. The
// threshold is a logit, because two equal logits stay equal, whereas e^x is rounded. Sums are in FP64 and in an order
// fixed by the row alone, so a draw depends neither on other rows nor on the number of threads.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include "simd.h"
#include "team.h"

namespace hadal {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kPiece = 256;        // values per partial sum: `pick` reads only one such piece value by value
constexpr int kGroupVectors = 32;  // vectors per group of `find_kth`
constexpr int kSeenAtOnce = 32;    // tokens checked at a time for any in the text: most stretches have none
constexpr int kSorted = 64;        // this many values or fewer are sorted, which costs about a round
constexpr int kRounds = 64;        // twice the halvings of 2^31 values; after that many rounds, sort

enum RowStatus { kDrawn = 0, kNotFinite = 1, kNothingLeft = 2 };

// Same layout as SLOT in reference/sampling.py.
struct SamplingSlot {
    double top_p;
    uint64_t seed;
    int64_t index;
    float temperature, min_p, presence, frequency, repetition;
    int32_t top_k, num_logprobs, bias_begin, num_bias, num_forbidden, min_tokens;

    bool has_penalty() const { return presence != 0.0f || frequency != 0.0f || repetition != 1.0f; }
    int num_adjusted() const { return num_bias + (index < min_tokens ? num_forbidden : 0); }
};

struct TokenValue {  // same layout as TOKEN_VALUE in reference/sampling.py
    int32_t token;
    float value;
};

struct SampledRow {  // same layout as ROW in reference/sampling.py
    int64_t token;
    float logprob;
    int32_t status;
};

// B slots with num_B[b] adjacent rows each of V logits, rows `stride` apart; R rows in all. The input token of row r is
// fed_R[r]: the slot's last token, then its drafted ones. Bias and history are indexed by slot. Row r may draw the
// tokens with bits set in mask mask_R[r]; any token if that is -1. N: the largest number of log-probabilities of a
// slot.
struct SampleCall {
    const float* logits_RV;
    long stride;
    int B, V, N;
    const int64_t *slots_B, *num_B, *fed_R;
    SamplingSlot* slots_S;
    const TokenValue* bias;
    int32_t* counts_SV;
    uint8_t* seen_SV;
    const uint32_t* bits_MW;
    const int64_t* mask_R;
    int64_t* num_drawn_B;
    SampledRow* rows_R;
    TokenValue* best_RN;

    const uint32_t* mask_of(long row) const {
        if (!bits_MW || mask_R[row] < 0) return nullptr;
        return bits_MW + mask_R[row] * ((V + 31) / 32);
    }
};

struct SampleScratch {
    float *adjusted, *values, *other, *groups;
    double* sums;

    void carve(Carver& c, int V) {
        const size_t padded = size_t(V) + W;  // v_compress writes whole vectors
        adjusted = c.take<float>(padded);
        values = c.take<float>(padded);
        other = c.take<float>(padded);
        groups = c.take<float>(size_t(V) / kGroupVectors + W);
        sums = c.take<double>(size_t(V) / kPiece + 1);
    }
};

// Return a number in [0, 1) that depends on (seed, index) alone: splitmix64 at counter `index`, of the mixed seed.
inline double uniform(uint64_t seed, uint64_t index) {
    const auto mix = [](uint64_t z) {
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return z ^ (z >> 31);
    };
    constexpr uint64_t kStep = 0x9E3779B97F4A7C15u;
    return double(mix(mix(seed + kStep) + (index + 1) * kStep) >> 11) * 0x1p-53;
}

// Probabilities relative to the best token's; 0 for excluded tokens and below e^-87, because v_exp treats all smaller
// exponents as -87, and -inf must give 0.
struct Probabilities {
    V best, inverse_temperature, threshold, min_p;
    Probabilities(float best_, float temperature)
        : best(v_set(best_)),
          inverse_temperature(v_set(1.0f / temperature)),
          threshold(v_set(best_ - 87.0f * temperature)),
          min_p(v_zero()) {}
    HADAL_INLINE V operator()(V logits) const {
        const uint32_t stays = v_ge_bits(logits, threshold);
        if (!stays) return v_zero();
        const V p = v_exp((logits - best) * inverse_temperature);
        return v_keep(p, stays & v_ge_bits(p, min_p));
    }
};

// Return the largest value; NaN if any value is NaN or +inf.
inline float find_best(const float* x, int n) {
    const V lowest = v_set(std::numeric_limits<float>::lowest());
    V best[4], spoilt[4];
    for (int j = 0; j < 4; j++) best[j] = v_set(-kInfinity), spoilt[j] = v_zero();
    // v_max returns its second argument if one is NaN: the best stays clean, but the value multiplied by 0 does not.
    const auto look = [&](int j, V value) {
        best[j] = v_max(value, best[j]);
        spoilt[j] = v_fma(v_max(lowest, value), v_zero(), spoilt[j]);
    };
    int i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
        for (int j = 0; j < 4; j++) look(j, v_load(x + i + j * W));
    for (; i < n; i += W) look(0, v_load_or(x + i, n - i, -kInfinity));
    return v_max_lane(v_max(v_max(best[0], best[1]), v_max(best[2], best[3]))) +
           v_sum((spoilt[0] + spoilt[1]) + (spoilt[2] + spoilt[3]));
}

inline int find_first(const float* x, int n, float least) {
    for (int i = 0; i < n; i += W)
        if (const uint32_t bits = v_ge_bits(v_load_or(x + i, n - i, -kInfinity), v_set(least)))
            return i + __builtin_ctz(bits);
    return 0;
}

inline double mass(const float* x, int n, const Probabilities& p) {
    Sums sums;
    for (int i = 0; i < n; i += W) sums.add(p(v_load_or(x + i, n - i, -kInfinity)));
    return sums.total();
}

// Copy the values of at least `floor`, contiguously, to `to`; return their number.
inline int keep_from(const float* x, int n, float floor, float* to) {
    int count = 0;
    for (int i = 0; i < n; i += W) {
        const V value = v_load_tail(x + i, n - i);
        if (const uint32_t bits = v_ge_bits(value, v_set(floor)) & v_bits(n - i))
            count += v_compress(to + count, value, bits);
    }
    return count;
}

// Return one of the n values, near the middle.
inline float choose_pivot(const float* x, int n) {
    float some[15];
    for (int i = 0; i < 15; i++) some[i] = x[long(n) * i / 15];
    std::nth_element(some, some + 7, some + 15);
    return some[7];
}

// Return the largest value that weighs at least `wanted` together with all larger ones; the smallest if none does.
// Reorders the n values; `other`: memory for n values.
template <class Weight>
float find_edge(float* values, int n, float* other, double wanted, const Weight& weight) {
    double larger = 0.0;  // weight of all values larger than the n left
    for (int round = 0; n > kSorted && round < kRounds; round++) {
        const float pivot = choose_pivot(values, n);
        Sums sums;
        int num_above = 0, num_below = 0;
        for (int i = 0; i < n; i += W) {
            const V value = v_load_tail(values + i, n - i);
            const uint32_t above = v_gt_bits(value, v_set(pivot)) & v_bits(n - i);
            const uint32_t below = v_gt_bits(v_set(pivot), value) & v_bits(n - i);
            if (above) sums.add(v_keep(weight(value), above));
            num_above += v_compress(values + num_above, value, above);  // never past the values already read
            num_below += v_compress(other + num_below, value, below);
        }
        const double above_weight = larger + sums.total();
        const double pivot_weight = above_weight + double(n - num_above - num_below) * double(weight(v_set(pivot))[0]);
        if (num_above && above_weight >= wanted) {
            n = num_above;
        } else if (pivot_weight >= wanted || !num_below) {
            return pivot;
        } else {
            larger = pivot_weight;
            n = num_below;
            std::swap(values, other);
        }
    }
    std::sort(values, values + n, std::greater<float>());
    for (int i = 0; i < n; i += W) {
        const V weights = weight(v_load_tail(values + i, n - i));
        for (int j = i; j < std::min(i + W, n); j++)
            if ((larger += double(weights[j - i])) >= wanted) return values[j];
    }
    return values[n - 1];
}

// Return the k-th largest of n values, k <= n. It is at least the k-th largest of the groups' bests, since k groups
// have such a value; so only the few values of at least that size are examined.
inline float find_kth(const float* x, int n, int k, const SampleScratch& at) {
    const auto count = [](V) { return v_set(1.0f); };
    int num_groups = 0;
    for (int i = 0; i + kGroupVectors * W <= n; i += kGroupVectors * W, num_groups += W) {
        V best = v_load(x + i);
        for (int j = 1; j < kGroupVectors; j++) best = v_max(best, v_load(x + i + j * W));
        v_store(at.groups + num_groups, best);
    }
    const float floor = num_groups < k ? -kInfinity : find_edge(at.groups, num_groups, at.other, k, count);
    return find_edge(at.values, keep_from(x, n, floor, at.values), at.other, k, count);
}

// Return the smallest logit kept by top-k, then by top-p of what top-k keeps; equal logits are kept, too.
inline float find_threshold(const SamplingSlot& slot, const float* x, int n, float best, const Probabilities& p,
                            const SampleScratch& at) {
    int count;
    double total;
    if (slot.top_k > 0) {
        const int k = std::min(slot.top_k, n);
        const float kth = find_kth(x, n, k, at);
        if (slot.top_p >= 1.0) return kth;
        count = keep_from(x, n, std::nextafter(kth, kInfinity), at.values);
        std::fill(at.values + count, at.values + k, kth);  // copies of the k-th, so that there are k
        count = k;
        total = mass(at.values, count, p);
    } else {
        total = mass(x, n, p);
        // Tokens below this floor together weigh less than top-p excludes; it is slightly lower, for rounding.
        const double least = std::log((1.0 - slot.top_p) * total / n) - 1e-3;
        const float floor = float(double(best) + double(slot.temperature) * least);
        count = keep_from(x, n, std::nextafter(floor, -kInfinity), at.values);
    }
    return find_edge(at.values, count, at.other, slot.top_p * total, p);
}

// Invert the cumulative distribution at u. A token of probability 0 is never picked.
inline int pick(const float* x, int n, const Probabilities& p, double u, double* sums) {
    double total = 0.0;
    for (int i = 0; i < n; i += kPiece) total += sums[i / kPiece] = mass(x + i, std::min(kPiece, n - i), p);
    const double target = u * total;
    // Rounding may put the target on the total: then pick the last token of non-zero probability.
    double before = 0.0, sum = 0.0;
    int begin = 0;
    for (int i = 0; i < n && sum <= target; i += kPiece) {
        if (sums[i / kPiece] <= 0.0) continue;
        begin = i;
        before = sum;
        sum += sums[i / kPiece];
    }
    int token = begin;
    for (int i = begin; i < std::min(begin + kPiece, n); i += W) {
        const V weights = p(v_load_or(x + i, n - i, -kInfinity));
        for (int j = 0; j < W; j++) {
            if (weights[j] <= 0.0f) continue;
            token = i + j;
            if ((before += double(weights[j])) > target) return token;
        }
    }
    return token;
}

// Write the row's logits after its slot's bias and penalties to at.adjusted.
inline void adjust(const SampleCall& call, const SamplingSlot& slot, long slot_index, const float* x, float* y) {
    std::copy(x, x + call.V, y);
    for (int i = slot.bias_begin; i < slot.bias_begin + slot.num_adjusted(); i++) y[call.bias[i].token] += call.bias[i].value;
    if (!slot.has_penalty()) return;
    const int32_t* counts = call.counts_SV + slot_index * call.V;
    const uint8_t* seen = call.seen_SV + slot_index * call.V;
    const float repetition = slot.repetition;  // copies, which y cannot alias, so that the loop vectorises
    const double frequency = slot.frequency, presence = slot.presence;
    for (int first = 0; first < call.V; first += kSeenAtOnce) {
        const int end = std::min(first + kSeenAtOnce, call.V);
        if (!std::memchr(seen + first, 1, size_t(end - first))) continue;
        for (int v = first; v < end; v++) {
            const float repeated = y[v] > 0.0f ? y[v] / repetition : y[v] * repetition;
            // In FP64 the product is exact, so a fused multiply-add changes nothing.
            const double counted = double(repeated) - frequency * counts[v];
            const double once = counts[v] > 0 ? presence : 0.0;
            y[v] = seen[v] ? float(counted - once) : y[v];
        }
    }
}

// Set -inf for all tokens without a set bit.
inline void forbid(const uint32_t* mask, int n, float* y) {
    for (int i = 0; i < n; i += 32) {
        const uint32_t bits = mask[i / 32];
        const int end = std::min(32, n - i);
        if (bits == ~0u) continue;
        if (end == 32 && bits == 0) {
            std::fill(y + i, y + i + 32, -kInfinity);
            continue;
        }
        for (int j = 0; j < end; j++) y[i + j] = bits >> j & 1 ? y[i + j] : -kInfinity;
    }
}

// Find the n best tokens and their logits, best first, the lower id first among equals.
inline void find_best_tokens(const float* x, int size, int n, const SampleScratch& at, TokenValue* best) {
    const V last = v_set(find_kth(x, size, n, at));
    int count = 0;
    for (const bool is_tie : {false, true}) {
        for (int i = 0; i < size && count < n; i += W) {
            const V value = v_load_tail(x + i, size - i);
            const uint32_t above = v_gt_bits(value, last);
            uint32_t bits = (is_tie ? v_ge_bits(value, last) & ~above : above) & v_bits(size - i);
            for (; bits && count < n; bits &= bits - 1) {
                const int token = i + __builtin_ctz(bits);
                best[count++] = {token, x[token]};
            }
        }
        const auto is_better = [](const TokenValue& a, const TokenValue& b) {
            return a.value > b.value || (a.value == b.value && a.token < b.token);
        };
        if (!is_tie) std::sort(best, best + count, is_better);
    }
}

// Write log-probabilities of the model's own distribution: before bias, penalties, masks and temperature.
inline void write_logprobs(const SampleCall& call, long row, const float* x, float best, int num_best,
                           const SampleScratch& at) {
    const double log_total = std::log(mass(x, call.V, Probabilities(best, 1.0f)));
    const auto logprob = [&](float logit) { return float(double(logit) - double(best) - log_total); };
    call.rows_R[row].logprob = logprob(x[call.rows_R[row].token]);
    if (!num_best) return;
    TokenValue* best_N = call.best_RN + row * call.N;
    find_best_tokens(x, call.V, num_best, at, best_N);
    for (int i = 0; i < num_best; i++) best_N[i].value = logprob(best_N[i].value);
}

inline RowStatus sample_row(const SampleCall& call, long slot_index, long row, const SampleScratch& at) {
    const SamplingSlot& slot = call.slots_S[slot_index];
    const float* x = call.logits_RV + row * call.stride;
    const float raw_best = find_best(x, call.V);
    call.rows_R[row].token = 0;
    if (!std::isfinite(raw_best)) return kNotFinite;
    const float* y = x;
    float best = raw_best;
    const uint32_t* mask = call.mask_of(row);
    if (mask || slot.num_adjusted() || slot.has_penalty()) {
        adjust(call, slot, slot_index, x, at.adjusted);
        if (mask) forbid(mask, call.V, at.adjusted);
        y = at.adjusted;
        best = find_best(y, call.V);
        if (!std::isfinite(best)) return kNothingLeft;
    }
    if (slot.temperature > 0.0f) {
        Probabilities p(best, slot.temperature);
        if (slot.top_k > 0 || slot.top_p < 1.0)
            p.threshold = v_max(p.threshold, v_set(find_threshold(slot, y, call.V, best, p, at)));
        p.min_p = v_set(slot.min_p);
        call.rows_R[row].token = pick(y, call.V, p, uniform(slot.seed, uint64_t(slot.index)), at.sums);
    } else {
        call.rows_R[row].token = find_first(y, call.V, best);
    }
    if (slot.num_logprobs >= 0) write_logprobs(call, row, x, raw_best, slot.num_logprobs, at);
    return kDrawn;
}

// Sample slot b's rows from `first` on, as long as the drawn token equals the next row's input token. Returns the
// number drawn; the last of them may have failed.
inline int64_t sample_slot(const SampleCall& call, int b, long first, const SampleScratch& at) {
    const int64_t s = call.slots_B[b];
    for (int64_t i = 0;; i++) {
        SampledRow& row = call.rows_R[first + i];
        row.status = sample_row(call, s, first + i, at);
        if (row.status != kDrawn) return i + 1;
        call.slots_S[s].index++;
        if (call.counts_SV) {  // counted for slots without a penalty, too, but never read there
            call.counts_SV[s * call.V + row.token]++;
            call.seen_SV[s * call.V + row.token] = 1;
        }
        if (i + 1 == call.num_B[b] || row.token != call.fed_R[first + i + 1]) return i + 1;
    }
}

}  // namespace hadal
