// Which rows share an adapter. Every core finds out by itself, from the indices alone, so all agree.
#pragma once

#include "kernel_operator.h"
#include "multi_lora_delta_tiling.h"

namespace mindlora {

// Rows of one adapter, at most `together` of them, as a list of tokens.
struct Segment {
    static constexpr int32_t kNoSuchSlot = -1;  // as a rank: the result is NaN

    int32_t slot;
    int32_t rank;  // 0: y = y0
    int32_t rows;
    int32_t first;

    __aicore__ inline uint32_t Rows() const { return static_cast<uint32_t>(rows); }
    __aicore__ inline uint32_t Rank() const { return rank > 0 ? static_cast<uint32_t>(rank) : 0; }
    __aicore__ inline uint32_t Numbers() const { return Rank() * Rows(); }  // of the rows' products with A
    __aicore__ inline uint32_t Space() const { return (Numbers() + 7) / 8 * 8; }
};

class Segments {
public:
    __aicore__ inline explicit Segments(const MultiLoraDeltaTiling& sizes) : sizes_(sizes) {}

    __aicore__ inline void SetArguments(AscendC::TPipe& pipe, GM_ADDR ranks, GM_ADDR indices)
    {
        ranksGm_.SetGlobalBuffer((__gm__ int32_t*)ranks, sizes_.slots);
        indicesGm_.SetGlobalBuffer((__gm__ int32_t*)indices, sizes_.tokens);
        const uint32_t keys = (sizes_.slots + kDecodeKeys + 7) / 8 * 8;
        pipe.InitBuffer(tables_, (keys + kDecodeTables * sizes_.round) * sizeof(int32_t));
        const auto all = tables_.Get<int32_t>();
        indices_ = all;
        next_ = all[sizes_.round];
        slot_ = all[2 * sizes_.round];
        rank_ = all[3 * sizes_.round];
        rows_ = all[4 * sizes_.round];
        first_ = all[5 * sizes_.round];
        last_ = all[6 * sizes_.round];
        open_ = all[7 * sizes_.round];
    }

    // Takes the tokens [start, start + tokens).
    __aicore__ inline void Read(uint64_t start, uint32_t tokens)
    {
        start_ = start;
        count_ = 0;
        AscendC::PipeBarrier<PIPE_ALL>();  // the tables of the last round are free
        AscendC::DataCopyPad(indices_, indicesGm_[start],
            AscendC::DataCopyExtParams(1, static_cast<uint32_t>(tokens * sizeof(int32_t)), 0, 0, 0),
            AscendC::DataCopyPadExtParams<int32_t>(false, 0, 0, 0));
        AscendC::Duplicate(open_, int32_t(-1), static_cast<int32_t>(sizes_.slots + kDecodeKeys));
        AscendC::PipeBarrier<PIPE_ALL>();
        for (uint32_t token = 0; token < tokens; ++token) {
            Add(static_cast<int32_t>(token), KeyOf(indices_.GetValue(token)));
        }
    }

    // Tokens count from here.
    __aicore__ inline uint64_t Start() const { return start_; }
    __aicore__ inline uint32_t Count() const { return count_; }

    __aicore__ inline Segment At(uint32_t i) const
    {
        return {slot_.GetValue(i), rank_.GetValue(i), rows_.GetValue(i), first_.GetValue(i)};
    }

    // How many of the last `left` tokens of a segment, from `token` on, follow one another. Moves `token` past them.
    __aicore__ inline uint32_t Run(int32_t& token, uint32_t left) const
    {
        for (uint32_t length = 1; length < left; ++length) {
            const int32_t before = token;
            token = next_.GetValue(before);
            if (token != before + 1) {
                return length;
            }
        }
        return left;
    }

private:
    // Two keys after those of the slots: rows without an adapter, and rows that name a slot that does not exist.
    __aicore__ inline uint32_t KeyOf(int32_t index) const
    {
        return index < 0 ? sizes_.slots : static_cast<uint32_t>(index) < sizes_.slots ? index : sizes_.slots + 1;
    }

    __aicore__ inline int32_t RankOf(uint32_t key) const
    {
        if (key >= sizes_.slots) {
            return key == sizes_.slots ? 0 : Segment::kNoSuchSlot;
        }
        const int32_t rank = ranksGm_.GetValue(key);
        return rank >= 0 && static_cast<uint32_t>(rank) <= sizes_.maxRank ? rank : Segment::kNoSuchSlot;
    }

    __aicore__ inline void Add(int32_t token, uint32_t key)
    {
        int32_t segment = open_.GetValue(key);
        const int32_t rows = segment < 0 ? 0 : rows_.GetValue(segment);
        if (segment < 0 || rows == static_cast<int32_t>(sizes_.together)) {
            segment = static_cast<int32_t>(count_++);
            open_.SetValue(key, segment);
            slot_.SetValue(segment, static_cast<int32_t>(key));
            rank_.SetValue(segment, RankOf(key));
            first_.SetValue(segment, token);
            rows_.SetValue(segment, 1);
        } else {
            next_.SetValue(last_.GetValue(segment), token);
            rows_.SetValue(segment, rows + 1);
        }
        last_.SetValue(segment, token);
    }

    const MultiLoraDeltaTiling& sizes_;
    uint64_t start_ = 0;
    uint32_t count_ = 0;
    AscendC::GlobalTensor<int32_t> ranksGm_, indicesGm_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> tables_;
    AscendC::LocalTensor<int32_t> indices_, next_, slot_, rank_, rows_, first_, last_;  // the last five by segment
    AscendC::LocalTensor<int32_t> open_;  // by key: the segment that takes its next row
};

}  // namespace mindlora
