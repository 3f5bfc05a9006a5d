// Choice of experts for one token (arXiv 2412.19437 eq. 12-16; DeepSeek-V3's Gate). s = sigmoid(logits) plus the bias
// decides: a group's score is the sum of its two best experts; the best K experts of the best topk_group groups are
// chosen. Their weights are s without bias, normalised if is_normed, times the scale. Ties go to the lower index.
#pragma once
#include "norm.h"

namespace hadal {

struct GateShape {
    int E, K, num_groups, topk_group;
    int is_normed;
    float scale;
};

// Insert a value into the n largest, largest first, lower index first on ties; top_index receives their indices.
// Callers pass all values in one pass: nearly every value fails against the smallest kept value.
inline void insert_top(float value, int index, int n, int& kept, float* top_value, int* top_index) {
    if (kept == n && !(value > top_value[n - 1])) return;
    int at = kept < n ? kept++ : n - 1;
    for (; at > 0 && value > top_value[at - 1]; at--) {
        top_value[at] = top_value[at - 1];
        top_index[at] = top_index[at - 1];
    }
    top_value[at] = value;
    top_index[at] = index;
}

// scratch: E + max(K, groups) floats; int_scratch: groups.
inline void choose_experts(const GateShape& g, const float* logits_E, const float* bias_E, float* scratch,
                           int* int_scratch, int* ids_K, float* weights_K) {
    float* choice_E = scratch;
    float* top = scratch + g.E;
    for (int i = 0; i < g.E; i += W) {
        const V s = v_sigmoid(v_load_tail(logits_E + i, g.E - i));
        v_store_tail(choice_E + i, s + v_load_tail(bias_E + i, g.E - i), g.E - i);
    }
    const int group_size = g.E / g.num_groups;
    int* groups = int_scratch;
    int num_kept = 0;
    if (g.topk_group < g.num_groups) {
        for (int i = 0; i < g.num_groups; i++) {
            const float* at = choice_E + i * group_size;
            float best = at[0], second = at[1];
            if (second > best) {
                best = at[1];
                second = at[0];
            }
            for (int j = 2; j < group_size; j++) {
                const float low = at[j] < best ? at[j] : best;
                best = at[j] > best ? at[j] : best;
                second = low > second ? low : second;
            }
            insert_top(best + second, i, g.topk_group, num_kept, top, groups);
        }
        for (int i = 1; i < num_kept; i++)  // sort by index, so that ties go to the lower expert
            for (int j = i; j > 0 && groups[j] < groups[j - 1]; j--) std::swap(groups[j], groups[j - 1]);
    } else {
        for (; num_kept < g.num_groups; num_kept++) groups[num_kept] = num_kept;
    }
    int taken = 0;
    for (int i = 0; i < num_kept; i++)
        for (int e = groups[i] * group_size; e < (groups[i] + 1) * group_size; e++)
            insert_top(choice_E[e], e, g.K, taken, top, ids_K);
    float sum = 0.0f;
    for (int k = 0; k < g.K; k++) sum += weights_K[k] = sigmoid1(logits_E[ids_K[k]]);
    const float factor = g.is_normed ? g.scale / (sum + 1e-20f) : g.scale;  // 1e-20: as in the released gate
    for (int k = 0; k < g.K; k++) weights_K[k] *= factor;
}

}  // namespace hadal
