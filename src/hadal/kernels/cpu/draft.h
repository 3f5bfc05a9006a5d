// Per-slot tables of a rank for the MTP module, and its passes over them: first the entries that are still to be
// written, then the requested drafts, each the likeliest token after the one before. `hadal/model/drafts.py` documents
// the fields and does the same step by step.
#pragma once
#include "sample.h"
#include "step.h"

namespace hadal {

struct DraftTable {  // filled by Python; S slots, P = kBlock positions
    int64_t *drafts_SK, *num_drafts_S, *num_written_S, *tokens_SP;
    float* hidden_SPD;
    int32_t S, K, D;

    float* hidden(long slot, long position) const { return hidden_SPD + (slot * kBlock + position % kBlock) * D; }
    int64_t& token(long slot, long position) const { return tokens_SP[slot * kBlock + position % kBlock]; }
};

// Store N drawn tokens; row rows_N[n] of the hidden states is the state before token n.
inline void note(const DraftTable& table, int N, const int64_t* slots, const int64_t* positions, const int64_t* tokens,
                 const int64_t* rows_N, const float* hidden_RD) {
    const size_t bytes = size_t(table.D) * sizeof(float);
    for (int n = 0; n < N; n++) {
        table.token(slots[n], positions[n]) = tokens[n];
        float* to = table.hidden(slots[n], positions[n]);
        if (positions[n] % kBlock) std::memcpy(to, hidden_RD + rows_N[n] * table.D, bytes);
        else std::memset(to, 0, bytes);
    }
}

constexpr long kAloneValues = 1 << 16;  // up to this many logits, waking another member costs more time

// Rows of one call of the module's step, built from a table. The object is reused, so that a step allocates nothing.
class DraftRows {
  public:
    // blocks [N, M]: block table, by index n of `add`.
    void begin(const DraftTable& table, const int32_t* blocks, long M) {
        table_ = &table, blocks_ = blocks, M_ = M;
        clear();
    }

    int count() const { return int(tokens.size()); }

    // Add a row with the slot's stored token at this position.
    void add(int n, int64_t slot, int64_t position) {
        add(n, table_->token(slot, position), position, table_->hidden(slot, position));
    }

    void add(int n, int64_t token, int64_t position, const float* seen_D) {
        tokens.push_back(token), positions.push_back(position);
        blocks_TM.insert(blocks_TM.end(), blocks_ + n * M_, blocks_ + (n + 1) * M_);
        if (position % kBlock) seen_TD.insert(seen_TD.end(), seen_D, seen_D + table_->D);
        else seen_TD.insert(seen_TD.end(), size_t(table_->D), 0.0f);
    }

    void clear() { tokens.clear(), positions.clear(), blocks_TM.clear(), seen_TD.clear(); }

    std::vector<int64_t> tokens, positions;
    std::vector<int32_t> blocks_TM;
    std::vector<float> seen_TD;
    // Slots that draft: index into `slots`, and position of the last token.
    std::vector<int> full;
    std::vector<int64_t> last;

  private:
    const DraftTable* table_ = nullptr;
    const int32_t* blocks_ = nullptr;
    long M_ = 0;
};

// run(T, B) runs the module's step on these rows; the first B draft: their logits [B, V] and normed states [B, D] are
// then at `logits` and `normed`. A non-zero return value ends the call.
template <class Run>
int draft(Team& team, const DraftTable& table, DraftRows& rows, int num_drafts, int N, const int64_t* slots,
          const int64_t* positions, const int64_t* rooms, int max_rows, int V, const float* logits, const float* normed,
          const Run& run) {
    std::vector<int>& full = rows.full;
    std::vector<int64_t>& last = rows.last;
    full.clear(), last.clear();
    long num_before = 0;
    for (int n = 0; n < N; n++) {
        table.num_drafts_S[slots[n]] = 0;
        if (positions[n] >= rooms[n]) continue;
        full.push_back(n), last.push_back(positions[n]);
        num_before += std::max<long>(0, positions[n] - table.num_written_S[slots[n]]);
    }
    const auto add_full = [&] {
        for (const int n : full) rows.add(n, slots[n], positions[n]);
    };
    const bool is_apart = num_before + long(full.size()) > max_rows;  // too many rows: write missing entries first
    if (!is_apart) add_full();
    for (const int n : full) {
        for (int64_t q = table.num_written_S[slots[n]]; q < positions[n]; q++) {
            rows.add(n, slots[n], q);
            if (!is_apart || rows.count() < max_rows) continue;
            if (const int status = run(rows.count(), 0)) return status;
            rows.clear();
        }
    }
    if (is_apart) {
        if (const int status = run(rows.count(), 0)) return status;
        rows.clear();
        add_full();
    }
    for (int turn = 0; turn < num_drafts && !full.empty(); turn++) {
        const int B = int(full.size());
        if (const int status = run(rows.count(), B)) return status;
        if (turn == 0)
            for (const int n : full) table.num_written_S[slots[n]] = positions[n] + 1;
        const auto choose = [&](const Member& me) {
            int begin, end;
            me.share(B, 1, begin, end);
            for (long b = begin; b < end; b++) {
                const float* x = logits + b * V;
                table.drafts_SK[slots[full[size_t(b)]] * table.K + turn] = find_first(x, V, find_best(x, V));
            }
        };
        if (long(B) * V < kAloneValues) choose(Member{&team, 0, 1});
        else team.run(choose);
        rows.clear();
        size_t kept = 0;
        for (size_t b = 0; b < full.size(); b++) {
            const int n = full[b];
            table.num_drafts_S[slots[n]] = turn + 1;
            // Further drafts start from the module's own state, while the slot has positions left.
            if (turn + 1 == num_drafts || last[b] + 1 >= rooms[n]) continue;
            rows.add(n, table.drafts_SK[slots[n] * table.K + turn], last[b] + 1, normed + long(b) * table.D);
            full[kept] = n, last[kept++] = last[b] + 1;
        }
        full.resize(kept), last.resize(kept);
    }
    return 0;
}

}  // namespace hadal
