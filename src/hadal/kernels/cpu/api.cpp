// C ABI that Python loads with ctypes. The Python wrappers check pointers, counts and contiguity. Values that index
// memory (ids, positions, blocks) are checked here, because reading them in Python would take longer than the step. A
// team runs one call at a time; calls from several threads take turns.
#include "codec.h"
#include "draft.h"
#include "message.h"
#include "route.h"

using namespace hadal;

namespace {

enum Status { kOk = 0, kBadToken = 1, kBadPosition = 2, kBadBlock = 3, kBadExpert = 4, kNoMemory = 5, kBadRow = 6, kNothingBefore = 7 };

bool good_blocks(const int32_t* table, long max_blocks, int64_t length, int num_blocks) {
    for (int64_t i = 0; i * kBlock < length; i++)
        if (i >= max_blocks || table[i] < 0 || table[i] >= num_blocks) return false;
    return true;
}

// Check the rows of a step; the first B of them attend.
int check_rows(const StepShape& shape, int T, int B, const int64_t* tokens, const int64_t* positions,
               const int32_t* table, long max_blocks) {
    for (int t = 0; t < T; t++) {
        if (tokens[t] < 0 || tokens[t] >= shape.vocab) return kBadToken;
        if (positions[t] < 0 || positions[t] >= shape.max_position) return kBadPosition;
        if (t < B && positions[t] < shape.first_position) return kNothingBefore;
        if (!good_blocks(table + t * max_blocks, max_blocks, positions[t] + 1, shape.num_blocks)) return kBadBlock;
    }
    return kOk;
}

bool good_slots(const DraftTable& table, int N, const int64_t* slots, const int64_t* positions) {
    for (int n = 0; n < N; n++)
        if (slots[n] < 0 || slots[n] >= table.S || positions[n] < 0) return false;
    return true;
}

// Run `carve` twice over the team's scratch memory: first to compute its size, then to assign the pointers.
template <class Carve>
bool lay_out(Team& team, const Carve& carve) {
    try {
        Carver size;
        carve(size);
        Carver carver{static_cast<char*>(team.scratch(size.used)), 0};
        carve(carver);
        return true;
    } catch (const std::bad_alloc&) {
        return false;
    }
}

constexpr int kHeadRows = 96;  // tokens per work item, so that a head's part of W_UK stays in cache
constexpr long kExpertScratchBytes =
    64l << 20;  // limits memory: long prompts are multiplied in pieces
constexpr long kScoreBytes = 16l << 20;  // index scores in memory at a time, at least one row's

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

const char* hadal_isa() { return kHasTiles ? "amx" : kIsa; }

void* hadal_team_new(int count) {
    try {
        return new Team(count);
    } catch (...) {
        return nullptr;
    }
}

int64_t hadal_team_thread(void* team, int index) { return static_cast<Team*>(team)->thread_of(index); }

void hadal_team_pinned(void* team, int is_pinned) { static_cast<Team*>(team)->pinned(is_pinned != 0); }

void hadal_team_free(void* team) { delete static_cast<Team*>(team); }

// x [M, K], w [N, K], y [M, N].
int hadal_linear(void* team_, const float* x, int M, int K, const Matrix* w, int N, float* y) {
    Team& team = *static_cast<Team*>(team_);
    std::lock_guard<std::mutex> lock(team.mutex());
    team.run([&](const Member& me) {
        int begin, end;
        me.share(N, 4, begin, end);
        linear(x, K, M, *w, begin, end, y, N);
    });
    return kOk;
}

// x [T, D], w [E] (some may be empty), ids [T, K], weights [T, K], y [T, D].
int hadal_experts(void* team_, const float* x, int T, int D, const MlpMatrices* w, int E, int I, const int64_t* ids,
                  const float* weights, int K, float* y) {
    for (long i = 0; i < long(T) * K; i++)
        if (ids[i] < 0 || ids[i] >= E || !w[ids[i]].gate) return kBadExpert;
    Team& team = *static_cast<Team*>(team_);
    std::lock_guard<std::mutex> lock(team.mutex());
    const int piece = int(std::max(64l, kExpertScratchBytes / (long(sizeof(float)) * 2 * K * I)));
    const int max_tokens = std::min(T, piece), count = team.count();
    int* expert_ids = nullptr;
    float *gate = nullptr, *up = nullptr;
    std::vector<Sorted> sorted(static_cast<size_t>(count));
    const auto carve = [&](Carver& c) {
        const size_t pairs = size_t(max_tokens) * size_t(K);
        expert_ids = c.take<int>(pairs);
        gate = c.take<float>(pairs * size_t(I));
        up = c.take<float>(pairs * size_t(I));
        for (Sorted& s : sorted)
            s = Sorted{c.take<int>(size_t(E) + 1), c.take<int>(pairs), c.take<Job>(size_t(E) + 1), 0};
    };
    if (!lay_out(team, carve)) return kNoMemory;
    for (int t0 = 0; t0 < T; t0 += piece) {
        const int n = std::min(piece, T - t0);
        for (long i = 0; i < long(n) * K; i++) expert_ids[i] = int(ids[long(t0) * K + i]);
        team.run([&](const Member& me) {
            Sorted& s = sorted[size_t(me.index)];
            s.num_jobs = 0;
            sort_pairs(expert_ids, n * K, E, s);
            add_routed_jobs(s, w, E, I, gate, up);
            run_up_share(me, s.jobs, s.num_jobs, x + long(t0) * D, D, K, nullptr);
            int d0, d1;
            me.share(D, 4, d0, d1);
            for (int t = t0; t < t0 + n; t++) std::memset(y + long(t) * D + d0, 0, size_t(d1 - d0) * sizeof(float));
            me.barrier();
            run_down_share(me, s.jobs, s.num_jobs, D, K, weights + long(t0) * K, y + long(t0) * D, nullptr);
        });
    }
    return kOk;
}

// x [T, D], weight [D], y [T, D].
int hadal_rms_norm(void* team_, const float* x, int T, int D, const float* weight, float eps, float* y) {
    Team& team = *static_cast<Team*>(team_);
    std::lock_guard<std::mutex> lock(team.mutex());
    team.run([&](const Member& me) {
        int begin, end;
        me.share(T, 1, begin, end);
        for (long t = begin; t < end; t++) rms_norm(x + t * D, weight, D, eps, y + t * D);
    });
    return kOk;
}

// logits [T, E], bias [E], ids [T, K], weights [T, K].
int hadal_gate(void* team_, const float* logits, int T, int E, const float* bias, int K, int num_groups,
               int topk_group, int is_normed, float scale, int64_t* ids, float* weights) {
    const GateShape shape{E, K, num_groups, topk_group, is_normed, scale};
    Team& team = *static_cast<Team*>(team_);
    std::lock_guard<std::mutex> lock(team.mutex());
    const size_t floats = size_t(E) + size_t(std::max(K, num_groups)), ints = size_t(num_groups) + size_t(K);
    float* scratch = nullptr;
    int* chosen = nullptr;
    const auto carve = [&](Carver& c) {
        scratch = c.take<float>(floats * size_t(team.count()));
        chosen = c.take<int>(ints * size_t(team.count()));
    };
    if (!lay_out(team, carve)) return kNoMemory;
    team.run([&](const Member& me) {
        float* own = scratch + floats * size_t(me.index);
        int* own_ids = chosen + ints * size_t(me.index);
        int begin, end;
        me.share(T, 1, begin, end);
        for (long t = begin; t < end; t++) {
            choose_experts(shape, logits + t * E, bias, own, own_ids + K, own_ids, weights + t * K);
            for (int k = 0; k < K; k++) ids[t * K + k] = own_ids[k];
        }
    });
    return kOk;
}

// q_latent [B, H, C], q_rope [B, H, R], cache [num_blocks, num_layers, 64, width], table [B, max_blocks], o [B, H, C].
// selected [B, top_k]: the positions that sequences of more than top_k positions attend to; top_k 0: every sequence
// attends to all positions, from `first` (0 or 1) on.
int hadal_mla_decode(void* team_, const float* q_latent, const float* q_rope, int B, int H, int C, int R,
                     const float* cache, int width, int num_blocks, int num_layers, int layer, const int32_t* table,
                     long max_blocks, const int64_t* lengths, const int32_t* selected, int top_k, int first,
                     float scale, float* o) {
    for (int b = 0; b < B; b++) {
        if (lengths[b] < 0) return kBadPosition;
        if (!good_blocks(table + b * max_blocks, max_blocks, lengths[b], num_blocks)) return kBadBlock;
        for (long i = long(b) * top_k; lengths[b] > top_k && i < long(b + 1) * top_k; i++)
            if (selected[i] < first || selected[i] >= lengths[b]) return kBadPosition;
    }
    Team& team = *static_cast<Team*>(team_);
    std::lock_guard<std::mutex> lock(team.mutex());
    float *q = nullptr, *parts = nullptr, *scratch = nullptr;
    Attention attention{};
    attention.B = B, attention.H = H, attention.C = C, attention.R = R, attention.num_layers = num_layers;
    attention.max_blocks = max_blocks, attention.scale = scale, attention.cache = cache, attention.block_table = table;
    attention.width = width, attention.top_k = top_k, attention.selected = selected, attention.first = first;
    const size_t own = Attention::scratch_floats(H, C + R, top_k);
    const auto carve = [&](Carver& c) {
        q = c.take<float>(size_t(B) * size_t(H) * size_t(C + R));
        parts = c.take<float>(attention.part_floats() * size_t(attention.num_parts));
        scratch = c.take<float>(own * size_t(team.count()));
    };
    try {
        attention.plan(lengths, team.count());
    } catch (const std::bad_alloc&) {
        return kNoMemory;
    }
    if (!lay_out(team, carve)) return kNoMemory;
    team.run([&](const Member& me) {
        int begin, end;
        me.share(B * H, 1, begin, end);
        for (long i = begin; i < end; i++) {
            std::memcpy(q + i * (C + R), q_latent + i * C, size_t(C) * sizeof(float));
            std::memcpy(q + i * (C + R) + C, q_rope + i * R, size_t(R) * sizeof(float));
        }
        me.barrier();
        attention.run(q, o, parts, scratch + own * size_t(me.index), layer, me.count);
        if (!attention.is_split) return;
        me.barrier();
        attention.merge_share(me, parts, o);
    });
    return kOk;
}

// See index.h. q [B, J, X], weights [B, J], cache and table as in hadal_mla_decode. Keys are the last X values of an
// entry. selected [B, top_k] is written for rows of more than top_k positions: none before `first` (0 or 1).
int hadal_select_positions(void* team_, const float* q, const float* weights, int B, int J, int X, const float* cache,
                           int width, int num_blocks, int num_layers, int layer, const int32_t* table, long max_blocks,
                           const int64_t* lengths, int top_k, int first, int32_t* selected) {
    long longest = 1;
    for (int b = 0; b < B; b++) {
        if (lengths[b] < 0) return kBadPosition;
        if (!good_blocks(table + b * max_blocks, max_blocks, lengths[b], num_blocks)) return kBadBlock;
        longest = std::max(longest, long(lengths[b]));
    }
    Team& team = *static_cast<Team*>(team_);
    std::lock_guard<std::mutex> lock(team.mutex());
    Attention attention{};
    attention.width = width, attention.num_layers = num_layers, attention.max_blocks = max_blocks;
    attention.cache = cache, attention.block_table = table, attention.first = first;
    Selection selection{J, X, top_k, width - X, &attention, lengths, {}, 0};
    uint32_t* keys = nullptr;
    float* scratch = nullptr;
    const size_t own = Selection::scratch_floats(J);
    const auto carve = [&](Carver& c) {
        keys = c.take<uint32_t>(selection.num_keys());
        scratch = c.take<float>(own * size_t(team.count()));
    };
    const int piece = int(std::max(1l, kScoreBytes / (long(sizeof(uint32_t)) * longest)));
    for (int b0 = 0; b0 < B; b0 += piece) {
        try {
            selection.plan(attention, lengths, b0, std::min(B, b0 + piece));
        } catch (const std::bad_alloc&) {
            return kNoMemory;
        }
        if (selection.rows.empty()) continue;
        if (!lay_out(team, carve)) return kNoMemory;
        team.run([&](const Member& me) {
            selection.score(q, weights, J, keys, scratch + own * size_t(me.index), layer);
            me.barrier();
            selection.select_share(me, keys, selected);
        });
    }
    return kOk;
}

// x [*, D], index [N] or null for 0 .. N-1, rows: N rows, `stride` bytes apart.
int hadal_encode(void* team_, const float* x, int T, int D, const int32_t* index, int N, int format, uint8_t* rows,
                 long stride) {
    for (int n = 0; index && n < N; n++)
        if (index[n] < 0 || index[n] >= T) return kBadRow;
    Team& team = *static_cast<Team*>(team_);
    std::lock_guard<std::mutex> lock(team.mutex());
    team.run([&](const Member& me) {
        int begin, end;
        me.share(N, 1, begin, end);
        for (long n = begin; n < end; n++) encode_row(x + long(index ? index[n] : n) * D, D, format, rows + n * stride);
    });
    return kOk;
}

int hadal_decode(void* team_, const uint8_t* rows, long stride, int N, int D, int format, float* y) {
    Team& team = *static_cast<Team*>(team_);
    std::lock_guard<std::mutex> lock(team.mutex());
    team.run([&](const Member& me) {
        int begin, end;
        me.share(N, 1, begin, end);
        for (long n = begin; n < end; n++) decode_row(rows + n * stride, D, format, y + n * D);
    });
    return kOk;
}

// rows [P, D] of FP32 or BF16, at, ids and weights [T, K] with K <= 64, y [T, D]: added by ascending id.
int hadal_weighted_sum(void* team_, const uint8_t* rows, int P, int D, int is_bf16, const int32_t* at,
                       const int64_t* ids, const float* weights, int T, int K, float* y) {
    for (long i = 0; i < long(T) * K; i++)
        if (at[i] < 0 || at[i] >= P) return kBadRow;
    Team& team = *static_cast<Team*>(team_);
    std::lock_guard<std::mutex> lock(team.mutex());
    const long row_bytes = long(D) * (is_bf16 ? 2 : 4);
    team.run([&](const Member& me) {
        int begin, end;
        me.share(T, 1, begin, end);
        for (long t = begin; t < end; t++) {
            int order[64];
            for (int k = 0; k < K; k++) {
                int j = k;
                for (; j > 0 && ids[t * K + order[j - 1]] > ids[t * K + k]; j--) order[j] = order[j - 1];
                order[j] = k;
            }
            const uint8_t* from[64];
            float weight[64];
            for (int k = 0; k < K; k++) {
                from[k] = rows + at[t * K + order[k]] * row_bytes;
                weight[k] = weights[t * K + order[k]];
            }
            sum_rows(from, weight, K, D, is_bf16 != 0, y + t * D);
        }
    });
    return kOk;
}

// See route.h. `scratch` holds T * K + 4 * num_ranks.
int hadal_route(const RouteShape* shape, const int64_t* ids, const int32_t* slots, const int32_t* counts,
                int32_t* scratch, int32_t* pairs_R, int32_t* rows_R, int32_t* token_P, int32_t* row_P, int32_t* slot_P,
                int32_t* token_of_row, int32_t* at) {
    const bool is_good = route(*shape, ids, slots, counts, scratch, pairs_R, rows_R, token_P, row_P, slot_P,
                               token_of_row, at, scratch + long(shape->T) * shape->K);
    return is_good ? kOk : kBadExpert;
}

// q [B, H, N] with strides (ldq, ldh, 1), w: per head N rows of C; head h's begin at row first + h * apart; y [B, H,
// C]: y[b][h] = q[b][h] w[h].
int hadal_heads_in(void* team_, const float* q, long ldq, long ldh, int B, int H, int N, const Matrix* w, int first,
                   int apart, int C, float* y) {
    Team& team = *static_cast<Team*>(team_);
    std::lock_guard<std::mutex> lock(team.mutex());
    const int pieces = (B + kHeadRows - 1) / kHeadRows;
    team.run([&](const Member& me) {
        int begin, end;
        me.share(H * pieces, 1, begin, end);
        for (int unit = begin; unit < end; unit++) {
            const long h = unit / pieces, b = long(unit % pieces) * kHeadRows;
            outer(q + b * ldq + h * ldh, ldq, int(std::min(B - b, long(kHeadRows))), N, w->from(first + int(h) * apart),
                  0, C, y + (b * H + h) * C, long(H) * C);
        }
    });
    return kOk;
}

// x [B, H, C], w: `width` rows of C for each head, as in hadal_heads_in, y [B, H, W]: y[b][h] = w[h] x[b][h].
int hadal_heads_out(void* team_, const float* x, int B, int H, int C, const Matrix* w, int first, int apart, int width,
                    float* y) {
    Team& team = *static_cast<Team*>(team_);
    std::lock_guard<std::mutex> lock(team.mutex());
    const int pieces = (B + kHeadRows - 1) / kHeadRows;
    team.run([&](const Member& me) {
        int begin, end;
        me.share(H * pieces, 1, begin, end);
        for (int unit = begin; unit < end; unit++) {
            const long h = unit / pieces, b = long(unit % pieces) * kHeadRows;
            linear(x + (b * H + h) * C, long(H) * C, int(std::min(B - b, long(kHeadRows))),
                   w->from(first + int(h) * apart), 0, width, y + (b * H + h) * width, long(H) * width);
        }
    });
    return kOk;
}

// See message.h. x [T, D], offset_R and first_R [num_ranks]; K <= 64.
int hadal_pack(void* team_, const PackShape* shape, const float* x, const int32_t* slot_TK, const int32_t* at_TK,
               const int32_t* pairs_R, const int32_t* rows_R, const int32_t* row_P, const int32_t* slot_P,
               const int64_t* offset_R, const int32_t* first_R, uint8_t* buffer) {
    Team& team = *static_cast<Team*>(team_);
    std::lock_guard<std::mutex> lock(team.mutex());
    team.run([&](const Member& me) {
        pack_share(me, *shape, x, slot_TK, at_TK, pairs_R, rows_R, row_P, slot_P, offset_R, first_R, buffer);
    });
    return kOk;
}

// See message.h. row_M and slot_M [M], counts [num_slots], out [N, D], this rank's own rows first.
int hadal_unpack(void* team_, const UnpackShape* shape, const Arrived* messages, const float* x,
                 const int32_t* own_token_N, const int32_t* own_row_P, const int32_t* own_slot_P, int64_t* row_M,
                 int64_t* slot_M, int64_t* counts_S, float* out) {
    if (!unpack_pairs(*shape, messages, own_row_P, own_slot_P, row_M, slot_M, counts_S)) return kBadRow;
    Team& team = *static_cast<Team*>(team_);
    std::lock_guard<std::mutex> lock(team.mutex());
    const size_t row = (size_t(row_bytes_of(shape->D, shape->format)) + 63) / 64 * 64;
    uint8_t* scratch = nullptr;
    if (!lay_out(team, [&](Carver& c) { scratch = c.take<uint8_t>(row * size_t(team.count())); })) return kNoMemory;
    team.run([&](const Member& me) {
        unpack_share(me, *shape, messages, x, own_token_N, scratch + row * size_t(me.index), out);
    });
    return kOk;
}

// See sample.h. Bias tokens are below V. counts, seen and masks may be null if unused. R: rows of all slots, no slot
// twice. Results are contiguous; at_R receives the row of each, *num_drawn their number.
int hadal_sample(void* team_, const float* logits, long stride, int R, int B, int V, const int64_t* slots_B,
                 const int64_t* num_B, const int64_t* fed_R, SamplingSlot* slots_S, int S, const TokenValue* bias,
                 int32_t* counts_SV, uint8_t* seen_SV, const uint32_t* bits_MW, const int64_t* mask_R, int N,
                 int64_t* num_drawn_B, int64_t* at_R, SampledRow* rows_R, TokenValue* best_RN, int64_t* num_drawn) {
    const SampleCall call{logits,    stride,  B,       V,      N,           slots_B, num_B,  fed_R, slots_S, bias,
                          counts_SV, seen_SV, bits_MW, mask_R, num_drawn_B, rows_R,  best_RN};
    Team& team = *static_cast<Team*>(team_);
    std::lock_guard<std::mutex> lock(team.mutex());
    std::vector<SampleScratch> scratch(B == 1 ? 1 : size_t(team.count()));
    long* first_B = nullptr;
    uint8_t* is_taken_S = nullptr;
    const auto carve = [&](Carver& c) {
        first_B = c.take<long>(size_t(B));
        is_taken_S = c.take<uint8_t>(size_t(S));
        for (SampleScratch& own : scratch) own.carve(c, V);
    };
    if (!lay_out(team, carve)) return kNoMemory;
    std::memset(is_taken_S, 0, size_t(S));
    long num_rows = 0;
    for (int b = 0; b < B; b++) {
        if (slots_B[b] < 0 || slots_B[b] >= S || is_taken_S[slots_B[b]]++) return kBadRow;
        first_B[b] = num_rows;
        if (num_B[b] < 1 || num_B[b] > R - num_rows) return kBadRow;
        num_rows += num_B[b];
    }
    if (num_rows != R) return kBadRow;
    const auto draw = [&](const Member& me) {
        int begin, end;
        me.share(B, 1, begin, end);
        for (int b = begin; b < end; b++) num_drawn_B[b] = sample_slot(call, b, first_B[b], scratch[size_t(me.index)]);
    };
    if (B == 1)
        draw(Member{&team, 0, 1});  // one row: wake no other member
    else
        team.run(draw);
    long to = 0;
    for (int b = 0; b < B; b++) {
        for (long i = 0; i < num_drawn_B[b]; i++, to++) {
            const long from = at_R[to] = first_B[b] + i;
            if (from == to) continue;
            rows_R[to] = rows_R[from];
            std::copy(best_RN + from * N, best_RN + (from + 1) * N, best_RN + to * N);
        }
    }
    *num_drawn = to;
    return kOk;
}

void* hadal_step_new(void* team, const StepShape* shape, const StepPointers* at, const LayerPointers* layers) {
    try {
        return new Step(static_cast<Team*>(team), *shape, *at, layers);
    } catch (...) {
        return nullptr;
    }
}

void hadal_step_free(void* step) { delete static_cast<Step*>(step); }

// See step.h. tokens, positions and table have T rows; the first B attend and get logits. seen [T, D] or null.
int hadal_step_run(void* step_, void* team_, const StepShape* shape, int T, int B, const int64_t* tokens,
                   const int64_t* positions, const int32_t* table, long max_blocks, const float* seen, float* normed,
                   float* logits) {
    if (const int status = check_rows(*shape, T, B, tokens, positions, table, max_blocks)) return status;
    Team& team = *static_cast<Team*>(team_);
    std::lock_guard<std::mutex> lock(team.mutex());
    try {
        static_cast<Step*>(step_)->run(T, B, tokens, positions, table, max_blocks, seen, normed, logits);
    } catch (const std::bad_alloc&) {
        return kNoMemory;
    }
    return kOk;
}

// See draft.h. `hidden` has R rows.
int hadal_note(const DraftTable* table, int N, const int64_t* slots, const int64_t* positions, const int64_t* tokens,
               const int64_t* rows_N, int R, const float* hidden) {
    if (!good_slots(*table, N, slots, positions)) return kBadRow;
    for (int n = 0; n < N; n++)
        if (rows_N[n] < 0 || rows_N[n] >= R) return kBadRow;
    note(*table, N, slots, positions, tokens, rows_N, hidden);
    return kOk;
}

// See draft.h. No slot may be listed twice; blocks [N, M].
int hadal_draft(void* step_, void* team_, const StepShape* shape, const DraftTable* table, int num_drafts, int N,
                const int64_t* slots, const int64_t* positions, const int64_t* rooms, const int32_t* blocks, long M,
                float* normed, float* logits) {
    static thread_local DraftRows rows;
    if (N > shape->max_batch || num_drafts < 0 || num_drafts > table->K || table->D != shape->D) return kBadRow;
    if (!good_slots(*table, N, slots, positions)) return kBadRow;
    Team& team = *static_cast<Team*>(team_);
    std::lock_guard<std::mutex> lock(team.mutex());
    const auto run = [&](int T, int B) {
        const int64_t *tokens = rows.tokens.data(), *at = rows.positions.data();
        const int32_t* of_rows = rows.blocks_TM.data();
        if (T == 0) return int(kOk);
        if (const int status = check_rows(*shape, T, B, tokens, at, of_rows, M)) return status;
        static_cast<Step*>(step_)->run(T, B, tokens, at, of_rows, M, rows.seen_TD.data(), normed, logits);
        return int(kOk);
    };
    try {
        rows.begin(*table, blocks, M);
        return draft(team, *table, rows, num_drafts, N, slots, positions, rooms, shape->max_rows, shape->vocab, logits,
                     normed, run);
    } catch (const std::bad_alloc&) {
        return kNoMemory;
    }
}

}  // extern "C"
#pragma GCC visibility pop
