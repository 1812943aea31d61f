// The cube cores of multi_lora_delta's prefill.
#pragma once

#include "ascendc_common/prefill_cube.h"
#include "multi_lora_delta_adapters.h"

namespace mindlora {

template <typename T>
class MultiLoraDeltaPrefillCube {
public:
    __aicore__ inline MultiLoraDeltaPrefillCube(AscendC::TPipe& pipe, const MultiLoraDeltaTiling& sizes,
        const PrefillExchange<T>& exchange, const Adapters& adapters, GM_ADDR pool)
        : sizes_(sizes), split_(sizes.prefill), exchange_(exchange), adapters_(adapters),
          cube_(pipe, sizes.prefill, sizes.maxRank)
    {
        pool_.SetGlobalBuffer((__gm__ T*)pool);
    }

    __aicore__ inline void Shrink(GM_ADDR x)
    {
        AscendC::GlobalTensor<T> xGm;
        xGm.SetGlobalBuffer((__gm__ T*)x);
        const uint32_t slices = split_.shrinkSlices;
        const uint32_t parts = Ceil(sizes_.tokens, split_.shrinkRows) * slices;
        for (uint32_t part = AscendC::GetBlockIdx(); part < parts; part += AscendC::GetBlockNum()) {
            const uint32_t begin = part % slices * split_.shrinkDepth;
            const uint32_t depth = Least(split_.shrinkDepth, sizes_.in - begin);
            const uint64_t partial = uint64_t{part % slices} * exchange_.stride;
            const uint32_t firstRow = part / slices * split_.shrinkRows;
            const uint32_t lastRow = Least(firstRow + split_.shrinkRows, sizes_.tokens);
            for (uint32_t row = firstRow; row < lastRow; row += kPrefillTileRows) {
                const Window<float> low{exchange_.partials[partial + uint64_t{row} * sizes_.maxRank], sizes_.maxRank};
                const Window<T> window{xGm[uint64_t{row} * sizes_.in + begin], sizes_.in};
                const uint32_t count = Least(kPrefillTileRows, lastRow - row);
                int32_t slot = 0;
                for (uint64_t done = 0; adapters_.Next(row, count, done, rows_, slot);) {
                    if (slot >= 0) {
                        Load(slot, begin, depth);
                        cube_.Shrink(low, window, weight_, rows_, adapters_.RankOf(slot), depth);
                    }
                }
            }
            Free();
        }
    }

    // Rows without an adapter are the vector cores'.
    __aicore__ inline void Expand(GM_ADDR y0, GM_ADDR y)
    {
        AscendC::GlobalTensor<T> y0Gm, yGm;
        y0Gm.SetGlobalBuffer((__gm__ T*)y0);
        yGm.SetGlobalBuffer((__gm__ T*)y);
        const uint32_t slices = split_.expandSlices;
        const uint32_t parts = Ceil(sizes_.tokens, split_.expandRows) * slices;
        const AscendC::LocalTensor<T> identity = cube_.LoadIdentity(exchange_.constant);
        for (uint32_t part = AscendC::GetBlockIdx(); part < parts; part += AscendC::GetBlockNum()) {
            const uint32_t begin = part % slices * split_.expandWidth;
            const uint32_t width = Least(split_.expandWidth, sizes_.out - begin);
            const uint32_t firstRow = part / slices * split_.expandRows;
            const uint32_t lastRow = Least(firstRow + split_.expandRows, sizes_.tokens);
            for (uint32_t row = firstRow; row < lastRow; row += kPrefillTileRows) {
                const uint64_t at = uint64_t{row} * sizes_.out + begin;
                const Window<T> to{yGm[at], sizes_.out};
                const Window<T> from{y0Gm[at], sizes_.out};
                const Window<T> low{exchange_.low[uint64_t{row} * sizes_.maxRank], sizes_.maxRank};
                const uint32_t count = Least(kPrefillTileRows, lastRow - row);
                int32_t slot = 0;
                for (uint64_t done = 0; adapters_.Next(row, count, done, rows_, slot);) {
                    if (slot >= 0) {
                        Load(slot, sizes_.in + begin, width);
                        cube_.Expand(to, from, low, weight_, identity, rows_, adapters_.RankOf(slot), width);
                    }
                }
            }
            Free();
        }
    }

private:
    static constexpr int32_t kNothing = -1;

    // `columns` columns of a slot's block, which stay in L1 while rows of one adapter follow one another.
    __aicore__ inline void Load(int32_t slot, uint32_t column, uint32_t columns)
    {
        if (slot == loaded_) {
            return;
        }
        Free();
        const uint32_t row = sizes_.in + sizes_.out;
        const uint64_t block = static_cast<uint64_t>(slot) * sizes_.maxRank * row;
        weight_ = cube_.LoadWeight(pool_[block + column], adapters_.RankOf(slot), columns, row);
        loaded_ = slot;
    }

    __aicore__ inline void Free()
    {
        if (loaded_ != kNothing) {
            cube_.FreeWeight(weight_);
            loaded_ = kNothing;
        }
    }

    const MultiLoraDeltaTiling& sizes_;
    const PrefillTiling& split_;
    const PrefillExchange<T>& exchange_;
    const Adapters& adapters_;
    AscendC::GlobalTensor<T> pool_;
    PrefillCube<T, true> cube_;
    AscendC::LocalTensor<T> weight_;
    int32_t loaded_ = kNothing;
    TileRows rows_;
};

}  // namespace mindlora
