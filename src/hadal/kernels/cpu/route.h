// Rank and expert slot of every (token, choice) pair, grouped by rank. Independent of bytes.
#pragma once
#include <cstdint>
#include <cstring>

namespace hadal {

struct RouteShape {
    int T, K, E, M, num_slots, num_ranks, shift;
};

// slots [E, M] and counts [E]: an expert's replicas as expert slot ids of the whole unit. Pair (t, k) uses replica (t +
// shift) % counts[id]. Output, grouped by rank, within a rank by t and k: token, row (index among the rank's distinct
// tokens) and slot of every pair; token_of_row; at [T, K]: index of each pair. Returns false if an id is out of range
// or has no replica.
inline bool route(const RouteShape& s, const int64_t* ids, const int32_t* slots, const int32_t* counts,
                  int32_t* scratch_TK, int32_t* pairs_R, int32_t* rows_R, int32_t* token_P, int32_t* row_P,
                  int32_t* slot_P, int32_t* token_of_row, int32_t* at_TK, int32_t* last_R) {
    const int R = s.num_ranks;
    for (int r = 0; r < R; r++) pairs_R[r] = rows_R[r] = 0, last_R[r] = -1;
    for (int t = 0; t < s.T; t++)
        for (int k = 0; k < s.K; k++) {
            const long i = long(t) * s.K + k;
            const int64_t id = ids[i];
            if (id < 0 || id >= s.E || counts[id] < 1) return false;
            const int32_t slot = slots[id * s.M + (t + s.shift) % counts[id]];
            const int rank = slot / s.num_slots;
            scratch_TK[i] = slot;
            pairs_R[rank]++;
            if (last_R[rank] != t) rows_R[rank]++, last_R[rank] = t;
        }
    // Next pair and row of every rank, in the memory after last_R.
    int32_t *next_pair = last_R + R, *next_row = next_pair + R, *first_row = next_row + R;
    int32_t pair = 0, row = 0;
    for (int r = 0; r < R; r++) {
        next_pair[r] = pair, next_row[r] = first_row[r] = row, last_R[r] = -1;
        pair += pairs_R[r], row += rows_R[r];
    }
    for (int t = 0; t < s.T; t++)
        for (int k = 0; k < s.K; k++) {
            const long i = long(t) * s.K + k;
            const int rank = scratch_TK[i] / s.num_slots;
            if (last_R[rank] != t) token_of_row[next_row[rank]++] = t, last_R[rank] = t;
            const int32_t p = next_pair[rank]++;
            token_P[p] = t;
            row_P[p] = next_row[rank] - 1 - first_row[rank];
            slot_P[p] = scratch_TK[i] % s.num_slots;
            at_TK[i] = p;
        }
    return true;
}

}  // namespace hadal
