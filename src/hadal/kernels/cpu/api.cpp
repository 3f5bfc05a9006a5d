// The C ABI that Python loads with ctypes. Pointers, counts and contiguity were checked by the Python wrapper; values
// that index memory (ids, positions, blocks) are checked here, because reading them in Python would cost more than the
// step. A team runs one call at a time; calls from several threads take turns.
#include "step.h"

using namespace hadal;

namespace {

enum Status { kOk = 0, kBadToken = 1, kBadPosition = 2, kBadBlock = 3, kBadExpert = 4, kNoMemory = 5 };

bool good_blocks(const int32_t* table, long max_blocks, int64_t length, int num_blocks) {
    for (int64_t i = 0; i * kBlock < length; i++)
        if (i >= max_blocks || table[i] < 0 || table[i] >= num_blocks) return false;
    return true;
}

// Run `carve` twice over the team's scratch memory: once to learn its size, once to hand out the pointers.
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

constexpr long kExpertScratchBytes =
    64l << 20;  // prompts are multiplied in pieces, so that a long one takes no more memory

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

const char* hadal_isa() { return kIsa; }

void* hadal_team_new(int count) {
    try {
        return new Team(count);
    } catch (...) {
        return nullptr;
    }
}

void hadal_team_free(void* team) { delete static_cast<Team*>(team); }

// x [M, K], w [N, K], y [M, N].
int hadal_linear(void* team_, const float* x, int M, int K, const float* w, int N, float* y) {
    Team& team = *static_cast<Team*>(team_);
    std::lock_guard<std::mutex> lock(team.mutex());
    team.run([&](const Member& me) {
        int begin, end;
        me.share(N, 4, begin, end);
        linear(x, K, M, w, K, begin, end, y, N);
    });
    return kOk;
}

// x [T, D], gate_up [E, 2I, D], down [E, D, I], ids [T, K], weights [T, K], y [T, D].
int hadal_experts(void* team_, const float* x, int T, int D, const float* gate_up, const float* down, int E, int I,
                  const int64_t* ids, const float* weights, int K, float* y) {
    for (long i = 0; i < long(T) * K; i++)
        if (ids[i] < 0 || ids[i] >= E) return kBadExpert;
    Team& team = *static_cast<Team*>(team_);
    std::lock_guard<std::mutex> lock(team.mutex());
    const int piece = int(std::max(64l, kExpertScratchBytes / (long(sizeof(float)) * 2 * K * I)));
    const int max_tokens = std::min(T, piece), count = team.count();
    int* slot_ids = nullptr;
    float *gate = nullptr, *up = nullptr;
    std::vector<Sorted> sorted(static_cast<size_t>(count));
    const auto carve = [&](Carver& c) {
        const size_t slots = size_t(max_tokens) * size_t(K);
        slot_ids = c.take<int>(slots);
        gate = c.take<float>(slots * size_t(I));
        up = c.take<float>(slots * size_t(I));
        for (Sorted& s : sorted)
            s = Sorted{c.take<int>(size_t(E) + 1), c.take<int>(slots), c.take<Job>(size_t(E) + 1), 0};
    };
    if (!lay_out(team, carve)) return kNoMemory;
    for (int t0 = 0; t0 < T; t0 += piece) {
        const int n = std::min(piece, T - t0);
        for (long i = 0; i < long(n) * K; i++) slot_ids[i] = int(ids[long(t0) * K + i]);
        team.run([&](const Member& me) {
            Sorted& s = sorted[size_t(me.index)];
            s.num_jobs = 0;
            sort_slots(slot_ids, n * K, E, s);
            add_routed_jobs(s, gate_up, down, E, I, D, gate, up);
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

// q_latent [B, H, C], q_rope [B, H, R], cache [num_blocks, num_layers, 64, C + R], table [B, max_blocks], o [B, H, C].
int hadal_mla_decode(void* team_, const float* q_latent, const float* q_rope, int B, int H, int C, int R,
                     const float* cache, int num_blocks, int num_layers, int layer, const int32_t* table,
                     long max_blocks, const int64_t* lengths, float scale, float* o) {
    for (int b = 0; b < B; b++) {
        if (lengths[b] < 0) return kBadPosition;
        if (!good_blocks(table + b * max_blocks, max_blocks, lengths[b], num_blocks)) return kBadBlock;
    }
    Team& team = *static_cast<Team*>(team_);
    std::lock_guard<std::mutex> lock(team.mutex());
    float *q = nullptr, *parts = nullptr, *scratch = nullptr;
    Attention attention{};
    attention.B = B, attention.H = H, attention.C = C, attention.R = R, attention.num_layers = num_layers;
    attention.max_blocks = max_blocks, attention.scale = scale, attention.cache = cache, attention.block_table = table;
    const auto carve = [&](Carver& c) {
        q = c.take<float>(size_t(B) * size_t(H) * size_t(C + R));
        parts = c.take<float>(attention.part_floats() * size_t(attention.num_parts));
        scratch = c.take<float>(Attention::scratch_floats(H) * size_t(team.count()));
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
        attention.run(q, o, parts, scratch + Attention::scratch_floats(H) * size_t(me.index), layer,
                      me.count);
        if (!attention.is_split) return;
        me.barrier();
        attention.merge_share(me, parts, o);
    });
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

int hadal_step_run(void* step_, void* team_, const StepShape* shape, int B, const int64_t* tokens,
                   const int64_t* positions, const int32_t* table, long max_blocks, float* normed, float* logits) {
    for (int b = 0; b < B; b++) {
        if (tokens[b] < 0 || tokens[b] >= shape->vocab) return kBadToken;
        if (positions[b] < 0 || positions[b] >= shape->max_position) return kBadPosition;
        if (!good_blocks(table + b * max_blocks, max_blocks, positions[b] + 1, shape->num_blocks)) return kBadBlock;
    }
    Team& team = *static_cast<Team*>(team_);
    std::lock_guard<std::mutex> lock(team.mutex());
    try {
        static_cast<Step*>(step_)->run(B, tokens, positions, table, max_blocks, normed, logits);
    } catch (const std::bad_alloc&) {
        return kNoMemory;
    }
    return kOk;
}

}  // extern "C"
#pragma GCC visibility pop
