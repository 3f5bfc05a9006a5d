// Absorbed MLA attention over the paged latent cache (arXiv 2412.19437 eq. 1-11; absorbed as in DeepSeek's `absorb`
// mode): all heads share one key row [c_kv (C); k_rope (R)] and one value row, its first C values. So for one sequence
// scores are a small GEMM, heads by positions, and each latent row is loaded once for a group of heads.
//
// A sequence is cut into at most kMaxSplits ranges of positions by its length alone. Each range is one online softmax
// over 64-position blocks, and ranges are merged in order: the result depends neither on the batch nor on the number of
// threads. A sequence of more than top_k positions may attend to top_k selected ones: they are gathered 64 at a time
// and treated as if the sequence had no others. Positions before `first` are not attended to: ranges begin after them,
// so their memory is not read. Shapes: B sequences, H heads, L = C + R. Block table [B, max_blocks]; cache [num_blocks,
// num_layers, 64, width], with L values read of each row.
#pragma once
#include <limits>
#include <utility>

#include "gemm.h"
#include "team.h"

namespace hadal {

constexpr int kBlock = 64;
constexpr int kMinSplit = 256;
constexpr int kMaxSplits = 16;

struct Span {
    int sequence, begin, end, part;  // part: index of its partial result, -1 for a whole sequence
    const int32_t* selected;         // null: attends to positions [begin, end); else to selected[begin .. end)
};

struct Attention {
    int B, H, C, R, width, num_layers;
    long max_blocks;
    float scale;
    const float* cache;
    const int32_t* block_table;
    int top_k;                // 0: all sequences attend to all their positions
    const int32_t* selected;  // [B, top_k], ascending, none before `first`; only read for longer sequences
    int first;                // 0 or 1
    // Work list, shared by all layers of a step:
    std::vector<Span> spans;
    std::vector<std::pair<int, int>> part_range;  // per sequence: first part, number of parts
    int num_head_groups, num_parts;
    bool is_split;
    std::atomic<int> next{0};

    static int num_splits(int length, int& split_length) {
        const int wanted = max_int(1, min_int(kMaxSplits, (length + kMinSplit - 1) / kMinSplit));
        split_length = max_int(kBlock, ((length + wanted - 1) / wanted + kBlock - 1) / kBlock * kBlock);
        return max_int(1, (length + split_length - 1) / split_length);
    }

    // lengths[b]: positions to attend to. Allocates only while the work list grows.
    void plan(const int64_t* lengths, int num_threads) {
        spans.clear();
        part_range.clear();
        num_parts = 0;
        for (int b = 0; b < B; b++) {
            const bool is_sparse = top_k && lengths[b] > top_k;
            const int length = is_sparse ? top_k : int(lengths[b]);
            int step;
            const int n = num_splits(length, step);
            for (int s = 0; s < n; s++)
                spans.push_back({b, is_sparse ? s * step : max_int(first, s * step), min_int(length, (s + 1) * step),
                                 n == 1 ? -1 : num_parts + s, is_sparse ? selected + long(b) * top_k : nullptr});
            part_range.push_back({num_parts, n > 1 ? n : 0});
            num_parts += n > 1 ? n : 0;
        }
        is_split = num_parts > 0;
        // Split heads for balance, into groups of at least four: with fewer heads, loading a row costs too much per
        // head.
        const int wanted = (3 * num_threads + int(spans.size()) - 1) / int(spans.size());
        num_head_groups = max_int(1, min_int(wanted, H / 4));
    }

    // Per thread: scores [H, 64], three values per head, and gathered latents [64, L] if positions are selected.
    static size_t scratch_floats(int H, int L, int top_k) {
        return size_t(H) * (kBlock + 3) + (top_k ? size_t(kBlock) * size_t(L) : 0);
    }
    // Per part: o [H, C], max [H], sum [H].
    size_t part_floats() const { return size_t(H) * (C + 2); }

    const float* block_at(int sequence, int position, int layer) const {
        const long block = block_table[sequence * max_blocks + position / kBlock];
        return cache + (block * num_layers + layer) * kBlock * width;
    }

    // Gather the latents of n selected positions from the p-th on.
    const float* gather(const Span& span, int p, int n, int layer, float* to) const {
        const size_t L = size_t(C + R);
        for (int i = 0; i < n; i++) {
            const int at = span.selected[p + i];
            const float* from = block_at(span.sequence, at, layer) + long(at % kBlock) * width;
            std::memcpy(to + size_t(i) * L, from, L * sizeof(float));
        }
        return to;
    }

    // Return the first latents of a work item, for prefetching; null past the last item, and for gathered ones.
    const float* start_of(size_t span, int layer) const {
        if (span >= spans.size() || spans[span].begin >= spans[span].end || spans[span].selected) return nullptr;
        return block_at(spans[span].sequence, spans[span].begin, layer);
    }

    // Run all sequences for heads [h0, h1). Used for short contexts, where later phases also split by head and a
    // barrier costs more than imbalance.
    void run_heads(int h0, int h1, const float* q, float* o, float* parts, float* scratch, int layer) const {
        for (size_t i = 0; i < spans.size(); i++)
            run_span(spans[i], h0, h1, q, o, parts, scratch, layer, start_of(i + 1, layer));
        if (is_split)
            for (int b = 0; b < B; b++)
                for (int h = h0; h < h1; h++) merge(b, h, parts, o);
    }

    // q [B, H, L] (latent query, rotated query); o [B, H, C]. Members take items as they become free.
    void run(const float* q, float* o, float* parts, float* scratch, int layer, int num_members) {
        const int num_items = int(spans.size()) * num_head_groups;
        for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_items;) {
            const int group = i % num_head_groups, h0 = H * group / num_head_groups;
            const int h1 = H * (group + 1) / num_head_groups;
            const float* then = start_of(size_t((i + num_members) / num_head_groups), layer);  // likely the next item
            run_span(spans[size_t(i / num_head_groups)], h0, h1, q, o, parts, scratch, layer, then);
        }
    }

    void run_span(const Span& span, int h0, int h1, const float* q, float* o, float* parts, float* scratch,
                  int layer, const float* then) const {
        const int L = C + R, heads = h1 - h0;
        float *scores = scratch, *max_H = scores + size_t(heads) * kBlock, *sum_H = max_H + heads,
              *fade_H = sum_H + heads, *gathered = scratch + size_t(H) * (kBlock + 3);
        const int row = span.selected ? L : width;
        const float* q_at = q + (long(span.sequence) * H + h0) * L;
        float* part = span.part < 0 ? nullptr : parts + size_t(span.part) * part_floats();
        float* out = part ? part + long(h0) * C : o + (long(span.sequence) * H + h0) * C;
        if (span.begin >= span.end) {  // no visible positions
            for (long i = 0; i < long(heads) * C; i++) out[i] = 0.0f;
            return;
        }
        for (int p = span.begin, n; p < span.end; p += n) {
            n = min_int(kBlock - p % kBlock, span.end - p);
            const float* latent = span.selected
                                      ? gather(span, p, n, layer, gathered)
                                      : block_at(span.sequence, p, layer) + long(p % kBlock) * width;
            const float* after =
                span.selected || p + n >= span.end ? then : block_at(span.sequence, p + n, layer);
            gemm(RowAt{q_at, L}, heads, latent, row, L, 0, n, Store<false>{scores, kBlock}, after);
            const bool is_first = p == span.begin;
            for (int h = 0; h < heads; h++)
                softmax_block(scores + h * kBlock, n, is_first, max_H[h], sum_H[h], fade_H[h]);
            if (is_first)
                outer<false>(scores, kBlock, heads, n, latent, row, 0, C, nullptr, out, C);
            else
                outer<true>(scores, kBlock, heads, n, latent, row, 0, C, fade_H, out, C);
        }
        for (int h = 0; h < heads; h++) {
            if (part) {
                part[long(H) * C + h0 + h] = max_H[h];
                part[long(H) * (C + 1) + h0 + h] = sum_H[h];
            } else {
                scale_row(out + long(h) * C, 1.0f / sum_H[h]);
            }
        }
    }

    // scores -> exp(scale * (score - max)); updates the running max and sum; fade: the factor for earlier blocks.
    void softmax_block(float* s, int n, bool is_first, float& max, float& sum, float& fade) const {
        V top = v_set(-std::numeric_limits<float>::infinity());
        int i = 0;
        for (; i + W <= n; i += W) top = v_max(top, v_load(s + i));
        float block_max = v_max_lane(top);
        for (; i < n; i++) block_max = s[i] > block_max ? s[i] : block_max;
        const float new_max = is_first || block_max > max ? block_max : max;
        V total = v_zero();
        for (i = 0; i < n; i += W) {
            v_store_tail(s + i, v_exp((v_load_tail(s + i, n - i) - v_set(new_max)) * v_set(scale)), n - i);
            total = total + v_load_tail(s + i, n - i);  // read back: lanes past n are zero again
        }
        if (is_first) {
            fade = 0.0f;
            sum = v_sum(total);
        } else {
            fade = exp1((max - new_max) * scale);
            sum = std::fma(sum, fade, v_sum(total));
        }
        max = new_max;
    }

    void scale_row(float* row, float factor) const {
        for (int c = 0; c < C; c += W) v_store_tail(row + c, v_load_tail(row + c, C - c) * v_set(factor), C - c);
    }

    // o[b][h] = sum over parts of e^(max_i - max) o_i / sum of e^(max_i - max) sum_i. Does nothing for a single part.
    void merge(int b, int h, const float* parts, float* o) const {
        const auto [first, n] = part_range[size_t(b)];
        if (n == 0) return;
        const float* base = parts + size_t(first) * part_floats();
        float max = base[long(H) * C + h], sum = 0.0f;
        for (int i = 1; i < n; i++) max = std::fmax(max, base[i * part_floats() + long(H) * C + h]);
        float* out = o + (long(b) * H + h) * C;
        for (int i = 0; i < n; i++) {
            const float* part = base + i * part_floats();
            const float weight = exp1((part[long(H) * C + h] - max) * scale);
            sum = std::fma(weight, part[long(H) * (C + 1) + h], sum);
            for (int c = 0; c < C; c += W) {
                const V old = i == 0 ? v_zero() : v_load_tail(out + c, C - c);
                v_store_tail(out + c, v_fma(v_set(weight), v_load_tail(part + long(h) * C + c, C - c), old), C - c);
            }
        }
        scale_row(out, 1.0f / sum);
    }

    void merge_share(const Member& me, const float* parts, float* o) const {
        int begin, end;
        me.share(B * H, 1, begin, end);
        for (int at = begin; at < end; at++) merge(at / H, at % H, parts, o);
    }
};

}  // namespace hadal
