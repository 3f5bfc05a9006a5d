// Whole decode step, from token ids to logits, as one job of a team: B rows, each one token of one sequence.
//
// Rows may belong to the same sequence (same block table, consecutive positions: a speculative check or the tail of a
// prompt), because every row's latent is in the cache before any row attends. Weights are used in place, without
// repacking. Phases are separated by barriers. Members split weight rows, so one core reads each row of W, once per
// step.
//
// The same job drafts if StepPointers has an MTP module (arXiv 2412.19437, eq. 21-23) and `layers` is its single layer:
// a row's input is then eh_proj [enorm(embedding); hnorm(the hidden state given for the row)]. Of a call's T rows, the
// first B run through everything; the others only write their cache entries. In an ordinary step T is B. Shapes: T
// rows, B of them to the logits, D model, Q q_lora (0: none), H heads, N nope, R rope, C kv_lora, W v_head, L = C + R,
// J index heads (0: none), X index key (0), V vocab, F dense width, E experts, I expert width, S shared width, K
// experts per token. qk = N + R.
#pragma once
#include "experts.h"
#include "gate.h"
#include "index.h"

namespace hadal {

struct StepShape {  // filled by Python, field for field
    int32_t vocab, D, num_layers, Q, H, N, R, C, W, J, X, index_topk, F, S, E, I, K, num_groups, topk_group, is_normed,
        max_rows, max_batch, max_position, num_blocks, cache_layers;
    int32_t first_layer;     // cache layer of layers[0]
    int32_t first_position;  // first attended position, 0 or 1
    float eps, latent_eps, index_eps, routed_scale, softmax_scale;
};

struct LayerPointers {  // null for parts that the layer lacks
    const float *attn_norm_D, *q_a_norm_Q, *kv_a_norm_C, *k_norm_X, *k_norm_bias_X, *ffn_norm_D, *router_ED,
        *router_bias_E;
    const Matrix *q_a, *q_b, *kv_a, *kv_b, *o;  // without q-LoRA there is no q_a, and q_b takes the hidden state
    const Matrix *index_q_b, *index_k, *head_weights;
    const MlpMatrices *mlp;                     // the dense MLP or the shared expert
    const MlpMatrices *mlp_E;                   // routed experts
};

struct StepPointers {
    const float *norm_D, *cos_sin;
    const Matrix *embed_VD, *head_VD;
    float* cache;
    const float *enorm_D, *hnorm_D;  // these and eh_proj: of an MTP module, else null
    const Matrix* eh_proj;
};

constexpr long kShortBytes = 512 << 10;  // most latents per layer that each member reads by itself

class Step {
  public:
    Step(Team* team, const StepShape& shape, const StepPointers& at, const LayerPointers* layers)
        : team_(team), s_(shape), at_(at), layers_(layers, layers + shape.num_layers) {
        Carver count;
        carve(count);
        memory_.reset(static_cast<char*>(std::aligned_alloc(64, count.used + 64)));
        if (!memory_) throw std::bad_alloc();
        std::memset(memory_.get(), 0, count.used);
        Carver carver{memory_.get(), 0};
        carve(carver);
    }

    // The caller has checked ids, positions and blocks. seen_TD: hidden states for the MTP module, null without one.
    // normed_BD receives the head's input: the hidden states after the last norm; it may alias seen_TD.
    void run(int T, int B, const int64_t* tokens_T, const int64_t* positions_T, const int32_t* block_table,
             long max_blocks, const float* seen_TD, float* normed_BD, float* logits_BV) {
        T_ = T, B_ = B;
        tokens_ = tokens_T;
        positions_ = positions_T;
        seen_ = seen_TD;
        normed_ = normed_BD;
        logits_ = logits_BV;
        attention_.block_table = block_table, attention_.max_blocks = max_blocks;
        if (B) plan(B);
        team_->run([this](const Member& me) { walk(me); });
    }

  private:
    // Plan attention work, and memory for it.
    void plan(int B) {
        long cached = 0;
        for (int b = 0; b < B; b++) cached += lengths_[b] = positions_[b] + 1;
        is_short_ = cached * latent() * long(sizeof(float)) <= kShortBytes;
        attention_.B = B, attention_.H = s_.H, attention_.C = s_.C, attention_.R = s_.R,
        attention_.num_layers = s_.cache_layers;
        attention_.scale = s_.softmax_scale, attention_.cache = at_.cache;
        attention_.width = entry(), attention_.top_k = s_.index_topk, attention_.selected = selected_;
        attention_.first = s_.first_position;
        attention_.plan(lengths_, team_->count());
        selection_.J = s_.J, selection_.X = s_.X, selection_.top_k = s_.index_topk, selection_.key_at = latent();
        selection_.plan(attention_, lengths_, 0, s_.J ? B : 0);
        Carver size;
        carve_contexts(size);
        if (size.used) {
            Carver carver{static_cast<char*>(team_->scratch(size.used)), 0};
            carve_contexts(carver);
        }
    }

    struct Own {         // one member's private memory
        float* normed;   // [max_rows, max(D, Q)]
        float* scratch;  // attention scores, gate
        int* ints;
        Sorted sorted;
        int *few_ids, *ids;  // experts chosen in this step: private (few rows) or shared
        float *few_weights, *weights;
    };

    void carve(Carver& c) {
        const size_t T = size_t(s_.max_rows), B = size_t(s_.max_batch), pairs = B * size_t(s_.K);
        const size_t wide = size_t(max_int(s_.D, s_.Q));
        lengths_ = c.take<int64_t>(B);
        both_ = c.take<float>(at_.eh_proj ? T * 2 * size_t(s_.D) : 0);
        hidden_ = c.take<float>(T * size_t(s_.D));
        qkv_ = c.take<float>(T * size_t(qkv_width()));
        q_ = c.take<float>(B * size_t(s_.H * (s_.N + s_.R)));
        q_latent_ = c.take<float>(B * size_t(s_.H * (s_.C + s_.R)));
        o_latent_ = c.take<float>(B * size_t(s_.H * s_.C));
        value_ = c.take<float>(B * size_t(s_.H * s_.W));
        index_q_ = c.take<float>(B * size_t(s_.J * s_.X));
        selected_ = c.take<int32_t>(B * size_t(s_.index_topk));
        dense_gate_ = c.take<float>(B * size_t(max_int(s_.F, s_.S)));
        dense_up_ = c.take<float>(B * size_t(max_int(s_.F, s_.S)));
        gate_ = c.take<float>(pairs * size_t(s_.I));
        up_ = c.take<float>(pairs * size_t(s_.I));
        router_ = c.take<float>(B * size_t(s_.E));
        ids_ = c.take<int>(pairs);
        weights_ = c.take<float>(pairs);
        own_.resize(size_t(team_->count()));
        for (Own& own : own_) {
            own.normed = c.take<float>(T * wide);
            own.scratch = c.take<float>(Attention::scratch_floats(s_.H, latent(), s_.index_topk) +
                                        Selection::scratch_floats(s_.J) + 2 * size_t(max_int(s_.E, s_.K)));
            own.ints = c.take<int>(size_t(max_int(s_.E, s_.K)));
            own.few_ids = c.take<int>(4 * size_t(s_.K));
            own.few_weights = c.take<float>(4 * size_t(s_.K));
            own.sorted = Sorted{c.take<int>(size_t(s_.E) + 1), c.take<int>(pairs), c.take<Job>(size_t(s_.E) + 1), 0};
        }
    }

    // Carve the memory that depends on context lengths.
    void carve_contexts(Carver& c) {
        parts_ = c.take<float>(attention_.part_floats() * size_t(attention_.num_parts));
        keys_ = c.take<uint32_t>(selection_.num_keys());
    }

    int qk() const { return s_.N + s_.R; }
    int latent() const { return s_.C + s_.R; }
    int entry() const { return latent() + s_.X; }
    int query_width() const { return s_.Q ? s_.Q : s_.H * qk(); }
    int weights_at() const { return query_width() + entry(); }  // start of the index heads' weights in a row of qkv_
    int qkv_width() const { return weights_at() + s_.J; }
    bool is_selecting() const { return !selection_.rows.empty(); }
    const Matrix& first_of(const LayerPointers& w) const { return s_.Q ? *w.q_a : *w.q_b; }
    // W_UK and W_UV of one head: kv_b stores both head by head.
    Matrix key_rows(const LayerPointers& w, int h) const { return w.kv_b->from(h * (s_.N + s_.W)); }
    Matrix value_rows(const LayerPointers& w, int h) const { return w.kv_b->from(h * (s_.N + s_.W) + s_.N); }

    void walk(const Member& me) {
        Own& own = own_[size_t(me.index)];
        embed(me);
        for (int i = 0; i < s_.num_layers; i++) {
            attend(me, own, layers_[size_t(i)], s_.first_layer + i);
            if (B_ == 0) return;  // An MTP module that only writes entries.
            const char* next = i + 1 < s_.num_layers ? share_of(me, first_of(layers_[size_t(i) + 1]), query_width())
                                                     : share_of(me, *at_.head_VD, s_.vocab);
            feed_forward(me, own, layers_[size_t(i)], next);
        }
        const float* x = norm_all(me, own, hidden_, s_.D, B_, at_.norm_D, s_.D, s_.eps);
        int begin, end;
        me.share(B_, 1, begin, end);
        std::memcpy(normed_ + long(begin) * s_.D, x + long(begin) * s_.D,
                    size_t(end - begin) * size_t(s_.D) * sizeof(float));
        multiply(me, x, s_.D, B_, *at_.head_VD, s_.vocab, logits_, s_.vocab, nullptr);
    }

    // Write every row's embedding, or the MTP module's combined state, to hidden_.
    void embed(const Member& me) {
        int begin, end;
        me.share(T_, 1, begin, end);
        for (long t = begin; t < end; t++) {
            float* x = hidden_ + t * s_.D;
            widen_row(*at_.embed_VD, int(tokens_[t]), 0, s_.D, x);
            if (!at_.eh_proj) continue;
            rms_norm(x, at_.enorm_D, s_.D, s_.eps, both_ + t * 2 * s_.D);
            rms_norm(seen_ + t * s_.D, at_.hnorm_D, s_.D, s_.eps, both_ + (t * 2 + 1) * s_.D);
        }
        me.barrier();
        if (!at_.eh_proj) return;
        multiply(me, both_, 2 * s_.D, T_, *at_.eh_proj, s_.D, hidden_, s_.D, nullptr);
        me.barrier();
    }

    // RMS norm of rows. Up to 4 members each compute all rows (no barrier); more members share them in member 0's
    // memory.
    const float* norm_all(const Member& me, Own& own, const float* x, long ld, int rows, const float* g, int n,
                          float eps) {
        const bool is_repeated = me.count <= 4;
        int begin = 0, end = rows;
        if (!is_repeated) me.share(rows, 1, begin, end);
        float* y = is_repeated ? own.normed : own_[0].normed;
        for (int b = begin; b < end; b++) rms_norm(x + b * ld, g, n, eps, y + long(b) * n);
        if (!is_repeated) me.barrier();
        return y;
    }

    // Compute this member's part of y[m][n] = x[m] . w[n] for M rows and N outputs.
    void multiply(const Member& me, const float* x, long ldx, int M, const Matrix& w, int N, float* y, long ldy,
                  const char* after) {
        int begin, end;
        me.share(N, 4, begin, end);
        linear(x, ldx, M, w, begin, end, y, ldy, after);
    }

    void attend(const Member& me, Own& own, const LayerPointers& w, int layer) {
        const int width = qkv_width(), heads_qk = s_.H * qk();
        const float* x = norm_all(me, own, hidden_, s_.D, T_, w.attn_norm_D, s_.D, s_.eps);
        if (s_.J) multiply(me, x, s_.D, T_, *w.index_k, s_.X, qkv_ + weights_at() - s_.X, width, nullptr);
        if (B_ && is_selecting())
            multiply(me, x, s_.D, B_, *w.head_weights, s_.J, qkv_ + weights_at(), width, nullptr);
        multiply(me, x, s_.D, B_, first_of(w), query_width(), qkv_, width, share_of(me, *w.kv_a, latent()));
        multiply(me, x, s_.D, T_, *w.kv_a, latent(), qkv_ + query_width(), width,
                 s_.Q ? share_of(me, *w.q_b, heads_qk) : nullptr);
        if (me.index == 0) {
            attention_.next.store(0, std::memory_order_relaxed);
            selection_.next.store(0, std::memory_order_relaxed);
        }
        me.barrier();

        // If heads divide evenly and contexts are short, each member keeps its heads in all phases, which saves three
        // barriers.
        const bool by_heads = is_short_ && s_.H % me.count == 0;
        const int h0 = s_.H * me.index / me.count, h1 = s_.H * (me.index + 1) / me.count;
        write_cache(me, w, layer);
        if (B_ == 0) return;
        const float* q = qkv_;
        long ldq = width;
        if (s_.Q) {
            const float* c_q = norm_all(me, own, qkv_, width, B_, w.q_a_norm_Q, s_.Q, s_.latent_eps);
            if (is_selecting()) index_queries(me, w, c_q);
            if (by_heads) {
                linear(c_q, s_.Q, B_, *w.q_b, h0 * qk(), h1 * qk(), q_, heads_qk, key_rows(w, h0).data);
            } else {
                multiply(me, c_q, s_.Q, B_, *w.q_b, heads_qk, q_, heads_qk, w.kv_b->data);
                me.barrier();
            }
            q = q_, ldq = heads_qk;
        }
        const int chunks = (s_.C + kOuterColumns - 1) / kOuterColumns;
        int begin = h0 * chunks, end = h1 * chunks;
        if (!by_heads) me.share(s_.H * chunks, 1, begin, end);
        absorb(w, q, ldq, begin, end);
        me.barrier();
        if (is_selecting()) {
            selection_.score(index_q_, qkv_ + weights_at(), width, keys_, own.scratch, layer);
            me.barrier();
            selection_.select_share(me, keys_, selected_);
            me.barrier();
        }

        begin = h0 * s_.W, end = h1 * s_.W;
        if (by_heads) {
            attention_.run_heads(h0, h1, q_latent_, o_latent_, parts_, own.scratch, layer);
        } else {
            attention_.run(q_latent_, o_latent_, parts_, own.scratch, layer, me.count);
            me.barrier();
            if (attention_.is_split) {
                attention_.merge_share(me, parts_, o_latent_);
                me.barrier();
            }
            me.share(s_.H * s_.W, 4, begin, end);
        }
        lift_values(w, begin, end, share_of(me, *w.o, s_.D));
        me.barrier();

        me.share(s_.D, 4, begin, end);
        const int K = s_.H * s_.W;
        gemm(RowAt{value_, K}, B_, *w.o, begin, end, Store<true>{hidden_, s_.D},
             w.router_ED ? reinterpret_cast<const char*>(w.router_ED) : share_of(me, w.mlp->gate, s_.F));
        me.barrier();
    }

    // Write the norm of c_kv, the rotated k_rope and the indexer's key to each row's place in the paged cache.
    void write_cache(const Member& me, const LayerPointers& w, int layer) {
        int begin, end;
        me.share(T_, 1, begin, end);
        const int width = qkv_width(), from = query_width();
        for (long t = begin; t < end; t++) {
            const int64_t p = positions_[t];
            const long block = attention_.block_table[t * attention_.max_blocks + p / kBlock];
            float* at = at_.cache + ((block * s_.cache_layers + layer) * kBlock + p % kBlock) * entry();
            const float* x = qkv_ + t * width + from;
            rms_norm(x, w.kv_a_norm_C, s_.C, s_.latent_eps, at);
            rope(x + s_.C, at_.cos_sin + p * s_.R, s_.R, at + s_.C);
            if (!s_.J) continue;
            layer_norm(x + latent(), w.k_norm_X, w.k_norm_bias_X, s_.X, s_.index_eps, at + latent());
            rope_halves(at + latent(), at_.cos_sin + p * s_.R, s_.R);
        }
    }

    // Compute this member's index heads of index_q[b][j] = rope(W_j c_q[b]).
    void index_queries(const Member& me, const LayerPointers& w, const float* c_q) {
        int begin, end;
        me.share(s_.J, 1, begin, end);
        const long ld = long(s_.J) * s_.X;
        linear(c_q, s_.Q, B_, *w.index_q_b, begin * s_.X, end * s_.X, index_q_, ld);
        for (int b = 0; b < B_; b++)
            for (int j = begin; j < end; j++)
                rope_halves(index_q_ + b * ld + j * s_.X, at_.cos_sin + positions_[b] * s_.R, s_.R);
    }

    // q_latent[b][h] = [W_UK(h)^T q_nope; rope(q_rope)], for units [begin, end): heads by chunks of columns.
    void absorb(const LayerPointers& w, const float* q, long ldq, int begin, int end) {
        const int chunks = (s_.C + kOuterColumns - 1) / kOuterColumns;
        const long ld = long(s_.H) * latent();
        for (int unit = begin; unit < end; unit++) {
            const int h = unit / chunks, c0 = unit % chunks * kOuterColumns;
            const float* q_h = q + long(h) * qk();
            float* out = q_latent_ + long(h) * latent();
            outer(q_h, ldq, B_, s_.N, key_rows(w, h), c0, min_int(s_.C, c0 + kOuterColumns), out, ld);
            if (c0 == 0)
                for (int b = 0; b < B_; b++)
                    rope(q_h + b * ldq + s_.N, at_.cos_sin + positions_[b] * s_.R, s_.R, out + b * ld + s_.C);
        }
    }

    // value[b][h] = W_UV(h) o_latent[b][h], for rows [begin, end) of all heads' W_UV in sequence.
    void lift_values(const LayerPointers& w, int begin, int end, const char* after) {
        const long ldx = long(s_.H) * s_.C, ldy = long(s_.H) * s_.W;
        for (int at = begin; at < end;) {
            const int h = at / s_.W, row = at % s_.W, stop = min_int(s_.W, row + end - at);
            at += stop - row;
            linear(o_latent_ + long(h) * s_.C, ldx, B_, value_rows(w, h), row, stop, value_ + long(h) * s_.W, ldy,
                   at < end ? nullptr : after);
        }
    }

    void feed_forward(const Member& me, Own& own, const LayerPointers& w, const char* next) {
        const float* x = norm_all(me, own, hidden_, s_.D, B_, w.ffn_norm_D, s_.D, s_.eps);
        const bool is_moe = w.router_ED != nullptr;
        Sorted& sorted = own.sorted;
        sorted.jobs[0] = Job{w.mlp, is_moe ? s_.S : s_.F, B_, nullptr, dense_gate_, dense_up_};
        sorted.num_jobs = 1;
        if (is_moe) {
            int e0, e1;
            me.share(s_.E, 4, e0, e1);
            gemm(RowAt{x, s_.D}, B_, w.router_ED, s_.D, s_.D, e0, e1, Store<false>{router_, s_.E});
        }
        const char* down = share_of(me, w.mlp->down, s_.D);
        run_up_share(me, sorted.jobs, 1, x, s_.D, s_.K, down);
        me.barrier();
        if (is_moe) {
            choose(me, own, w);
            sort_pairs(own.ids, B_ * s_.K, s_.E, sorted);
            add_routed_jobs(sorted, w.mlp_E, s_.E, s_.I, gate_, up_);
            run_up_share(me, sorted.jobs + 1, sorted.num_jobs - 1, x, s_.D, s_.K, down);
            me.barrier();
        }
        run_down_share(me, sorted.jobs, sorted.num_jobs, s_.D, s_.K, own.weights, hidden_, next);
        me.barrier();
    }

    // Choose experts. For fewer than 4 rows each member computes all choices; otherwise members share the rows and read
    // each other's choices.
    void choose(const Member& me, Own& own, const LayerPointers& w) {
        const GateShape shape{s_.E, s_.K, s_.num_groups, s_.topk_group, s_.is_normed, s_.routed_scale};
        const bool is_repeated = B_ < 4;
        int begin = 0, end = B_;
        if (!is_repeated) me.share(B_, 1, begin, end);
        own.ids = is_repeated ? own.few_ids : ids_;
        own.weights = is_repeated ? own.few_weights : weights_;
        for (int b = begin; b < end; b++)
            choose_experts(shape, router_ + long(b) * s_.E, w.router_bias_E, own.scratch, own.ints, own.ids + b * s_.K,
                           own.weights + b * s_.K);
        if (!is_repeated) me.barrier();
    }

    struct Free {
        void operator()(char* p) const { std::free(p); }
    };

    Team* team_;
    const StepShape s_;
    const StepPointers at_;
    const std::vector<LayerPointers> layers_;
    std::unique_ptr<char, Free> memory_;
    std::vector<Own> own_;
    Attention attention_{};
    Selection selection_{};
    // This step's rows:
    int T_ = 0, B_ = 0;
    bool is_short_ = false;
    const int64_t *tokens_ = nullptr, *positions_ = nullptr;
    const float* seen_ = nullptr;
    float *normed_ = nullptr, *logits_ = nullptr, *parts_ = nullptr;
    // Shared between members, [B, ...]; both_, hidden_ and qkv_ [T, ...]:
    int64_t* lengths_;
    float *both_, *hidden_, *qkv_, *q_, *q_latent_, *o_latent_, *value_, *dense_gate_, *dense_up_, *gate_, *up_, *router_,
        *weights_, *index_q_;
    int* ids_;
    int32_t* selected_;
    uint32_t* keys_ = nullptr;
};

}  // namespace hadal
