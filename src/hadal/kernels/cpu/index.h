// Lightning indexer (arXiv 2512.02556, eq. 1): selects the top_k visible positions that a row attends to.
//
// A position's score is the sum over index heads, in their order, of weight * relu(query . key): a small GEMM over all
// heads and 64 keys at a time, then one vector of positions per head's term. So a score depends only on the row and the
// position, and the selection only on the scores: the top_k largest, among equal scores the lower positions. Positions
// before the attention's `first` are never selected. Shapes: B rows, J index heads, X index key. A position's key is in
// its cache entry, `key_at` values from its start.
#pragma once
#include "attention.h"

namespace hadal {

constexpr int kScoreRange = 512;  // positions that a member scores at a time

// A float as an integer of the same order. Scores are never -0: their sums begin with 0.
HADAL_INLINE uint32_t ordered(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Selection {
    int J, X, top_k, key_at;
    // Work list, shared by all layers of a step:
    const Attention* attention;  // owner of these rows and cache
    const int64_t* lengths;
    std::vector<int> rows;  // rows with more than top_k visible positions
    long longest;
    std::atomic<int> next{0};

    // Plan rows [begin, end).
    void plan(const Attention& of, const int64_t* lengths_B, int begin, int end) {
        attention = &of, lengths = lengths_B, longest = 0;
        rows.clear();
        for (int b = begin; b < end; b++)
            if (lengths[b] > top_k) {
                rows.push_back(b);
                longest = std::max(longest, long(lengths[b]));
            }
        next.store(0, std::memory_order_relaxed);
    }

    const float* keys_at(int b, int position, int layer) const {
        return attention->block_at(b, position, layer) + key_at;
    }

    // Number of scores of the planned rows.
    size_t num_keys() const { return rows.size() * size_t(longest); }
    static size_t scratch_floats(int J) { return size_t(J + 1) * kBlock; }

    // q [B, J, X], weights [B, J] with rows `ldw` apart; keys [planned rows, longest]: the scores, as `ordered`.
    // Members take ranges of positions as they become free.
    void score(const float* q, const float* weights, long ldw, uint32_t* keys, float* scratch, int layer) {
        const int ranges = int((longest + kScoreRange - 1) / kScoreRange), num_items = int(rows.size()) * ranges;
        for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_items;) {
            const int row = i / ranges, b = rows[size_t(row)], begin = i % ranges * kScoreRange;
            const int end = int(std::min(long(begin + kScoreRange), long(lengths[b])));
            score_range(b, begin, end, q + long(b) * J * X, weights + b * ldw, keys + row * longest, scratch, layer);
        }
    }

    void score_range(int b, int begin, int end, const float* q, const float* weights, uint32_t* keys, float* dots,
                     int layer) const {
        float* sums = dots + long(J) * kBlock;
        for (int p = begin; p < end; p += kBlock) {
            const int n = min_int(kBlock, end - p);
            // Blocks of keys are not contiguous, so hardware does not prefetch them: prefetch the next block here.
            const float* after = p + kBlock < lengths[b] ? keys_at(b, p + kBlock, layer) : nullptr;
            gemm(RowAt{q, X}, J, keys_at(b, p, layer), attention->width, X, 0, n, Store<false>{dots, kBlock}, after);
            for (int i = 0; i < n; i += W) {
                V sum = v_zero();
                for (int j = 0; j < J; j++)
                    sum = v_fma(v_set(weights[j]), v_max(v_load_tail(dots + j * kBlock + i, n - i), v_zero()), sum);
                v_store(sums + i, sum);
            }
            for (int i = 0; i < n; i++) keys[p + i] = ordered(sums[i]);
        }
    }

    // Select positions for this member's share of the planned rows. selected [B, top_k]: ascending.
    void select_share(const Member& me, const uint32_t* keys, int32_t* selected) const {
        int begin, end;
        me.share(int(rows.size()), 1, begin, end);
        for (int row = begin; row < end; row++) {
            const int b = rows[size_t(row)];
            select(keys + row * longest, long(lengths[b]), selected + long(b) * top_k);
        }
    }

    // Select from positions `first` on: there are at least top_k, because the row sees over top_k positions and `first`
    // is at most 1. Find the top_k-th largest key eight bits at a time: count the next eight bits of keys with the
    // prefix found so far. This reads the keys four times, without sorting.
    void select(const uint32_t* keys, long n, int32_t* selected) const {
        uint32_t least = 0, known = 0;
        int left = top_k;  // still to be taken from keys with prefix `least`
        for (int shift = 24; shift >= 0; shift -= 8) {
            int count[256] = {};
            for (long i = attention->first; i < n; i++) count[keys[i] >> shift & 255] += ((keys[i] ^ least) & known) == 0;
            int digit = 255;
            while (count[digit] < left) left -= count[digit--];
            least |= uint32_t(digit) << shift;
            known |= 255u << shift;
        }
        for (long i = attention->first, taken = 0; taken < top_k; i++)
            if (keys[i] > least || (keys[i] == least && left-- > 0)) selected[taken++] = int32_t(i);
    }
};

}  // namespace hadal
