// Whole dispatch messages (comm/layout): written for all peers in one pass over the tokens, so that a token is encoded
// once for any number of messages, and read in one pass over the received messages.
#pragma once
#include <vector>

#include "codec.h"
#include "route.h"
#include "team.h"

namespace hadal {

constexpr long kHeadBytes = 16, kPairBytes = 8, kMessageHeadBytes = 16;

inline long row_bytes_of(int D, int format) {
    if (format == kRowFp32) return 4l * D;
    if (format == kRowBf16) return 2l * D;
    return padded_codes(D) + 4l * ((D + kScaleGroup - 1) / kScaleGroup);
}

struct PackShape {
    int T, K, D, num_slots, num_ranks, format, is_low_latency, layer, kind;
};

// offset_R: start of a rank's message in `buffer`, or -1 if there is none.
inline void pack_share(const Member& me, const PackShape& s, const float* x, const int32_t* slot_TK,
                       const int32_t* at_TK, const int32_t* pairs_R, const int32_t* rows_R, const int32_t* row_P,
                       const int32_t* slot_P, const int64_t* offset_R, const int32_t* first_R, uint8_t* buffer) {
    const long row_bytes = row_bytes_of(s.D, s.format);
    for (int r = me.index; r < s.num_ranks; r += me.count) {
        if (offset_R[r] < 0) continue;
        uint8_t* message = buffer + offset_R[r];
        const int32_t head[4] = {s.is_low_latency ? pairs_R[r] : rows_R[r], pairs_R[r], s.layer, s.kind};
        std::memcpy(message, head, sizeof head);
        if (s.is_low_latency) continue;
        const size_t bytes = size_t(pairs_R[r]) * sizeof(int32_t);
        std::memcpy(message + kHeadBytes, row_P + first_R[r], bytes);
        std::memcpy(message + kHeadBytes + bytes, slot_P + first_R[r], bytes);
    }
    int begin, end;
    me.share(s.T, 1, begin, end);
    for (int t = begin; t < end; t++) {
        uint8_t* rows[64];
        int num_rows = 0;
        for (int k = 0; k < s.K; k++) {
            const long i = long(t) * s.K + k;
            const int rank = slot_TK[i] / s.num_slots, p = at_TK[i];
            if (offset_R[rank] < 0) continue;
            uint8_t* row = buffer + offset_R[rank] + kHeadBytes;
            if (s.is_low_latency) {
                row += (p - first_R[rank]) * (kMessageHeadBytes + row_bytes);
                const int32_t head[4] = {t, slot_P[p], 0, 0};
                std::memcpy(row, head, sizeof head);
                row += kMessageHeadBytes;
            } else {
                row += pairs_R[rank] * kPairBytes + row_P[p] * row_bytes;
                bool is_there = false;  // token already sent for another expert of the same rank
                for (int j = 0; j < num_rows; j++) is_there |= rows[j] == row;
                if (is_there) continue;
            }
            if (num_rows == 0)
                encode_row(x + long(t) * s.D, s.D, s.format, row);
            else
                std::memcpy(row, rows[0], size_t(row_bytes));
            rows[num_rows++] = row;
        }
    }
}

struct UnpackShape {
    int D, num_slots, format, is_low_latency, num_messages, own_rows, own_pairs;
};

// Received message; its rows and pairs begin at these indices among all.
struct Arrived {
    int64_t address, num_rows, num_pairs, first_row, first_pair;
};

// Write rows and expert slots of all pairs; adds this call's pairs to counts_S, by slot. Returns false if a pair names
// a row or slot out of range.
inline bool unpack_pairs(const UnpackShape& s, const Arrived* messages, const int32_t* own_row_P,
                         const int32_t* own_slot_P, int64_t* row_M, int64_t* slot_M, int64_t* counts_S) {
    const long message_bytes = kMessageHeadBytes + row_bytes_of(s.D, s.format);
    bool is_good = true;
    const auto count = [&](int32_t slot) {
        const bool is_there = slot >= 0 && slot < s.num_slots;
        is_good &= is_there;
        if (is_there) counts_S[slot]++;
    };
    for (int p = 0; p < s.own_pairs; p++) {
        row_M[p] = own_row_P[p], slot_M[p] = own_slot_P[p];
        count(own_slot_P[p]);
    }
    for (int m = 0; m < s.num_messages; m++) {
        const Arrived& a = messages[m];
        const uint8_t* at = reinterpret_cast<const uint8_t*>(a.address) + kHeadBytes;
        for (long p = 0; p < a.num_pairs; p++) {
            int32_t row = int32_t(p), slot;
            if (s.is_low_latency) {
                std::memcpy(&slot, at + p * message_bytes + 4, sizeof slot);
            } else {
                std::memcpy(&row, at + p * 4, sizeof row);
                std::memcpy(&slot, at + (a.num_pairs + p) * 4, sizeof slot);
            }
            is_good &= row >= 0 && row < a.num_rows;
            count(slot);
            row_M[a.first_pair + p] = a.first_row + row, slot_M[a.first_pair + p] = slot;
        }
    }
    return is_good;
}

// Own rows are encoded and decoded like received ones, so that results do not depend on a token's rank.
inline void unpack_share(const Member& me, const UnpackShape& s, const Arrived* messages, const float* x,
                         const int32_t* own_token_N, uint8_t* scratch, float* out) {
    const long row_bytes = row_bytes_of(s.D, s.format);
    int begin, end;
    me.share(s.own_rows, 1, begin, end);
    for (long n = begin; n < end; n++) {
        const float* from = x + long(own_token_N[n]) * s.D;
        if (s.format == kRowFp32) {
            std::memcpy(out + n * s.D, from, size_t(s.D) * sizeof(float));
            continue;
        }
        encode_row(from, s.D, s.format, scratch);
        decode_row(scratch, s.D, s.format, out + n * s.D);
    }
    for (int m = 0; m < s.num_messages; m++) {
        const Arrived& a = messages[m];
        const long stride = s.is_low_latency ? kMessageHeadBytes + row_bytes : row_bytes;
        const uint8_t* rows = reinterpret_cast<const uint8_t*>(a.address) + kHeadBytes +
                              (s.is_low_latency ? kMessageHeadBytes : a.num_pairs * kPairBytes);
        me.share(int(a.num_rows), 1, begin, end);
        for (long n = begin; n < end; n++)
            decode_row(rows + n * stride, s.D, s.format, out + (a.first_row + n) * s.D);
    }
}

}  // namespace hadal
