// The cube cores of lora_delta's prefill way.
#pragma once

#include "ascendc_common/prefill_cube.h"
#include "lora_delta_tiling.h"

namespace mindlora {

template <typename T>
class LoraDeltaPrefillCube {
public:
    __aicore__ inline LoraDeltaPrefillCube(
        AscendC::TPipe& pipe, const LoraDeltaTiling& sizes, const PrefillExchange<T>& exchange)
        : sizes_(sizes), split_(sizes.prefill), exchange_(exchange), cube_(pipe, sizes.prefill, sizes.rank)
    {}

    __aicore__ inline void Shrink(GM_ADDR x, GM_ADDR a)
    {
        AscendC::GlobalTensor<T> xGm, aGm;
        xGm.SetGlobalBuffer((__gm__ T*)x);
        aGm.SetGlobalBuffer((__gm__ T*)a);
        const uint32_t slices = split_.shrinkSlices;
        const uint32_t parts = Ceil(sizes_.tokens, split_.shrinkRows) * slices;
        for (uint32_t part = AscendC::GetBlockIdx(); part < parts; part += AscendC::GetBlockNum()) {
            const uint32_t begin = part % slices * split_.shrinkDepth;
            const uint32_t depth = Least(split_.shrinkDepth, sizes_.inFeatures - begin);
            const uint64_t partial = uint64_t{part % slices} * exchange_.stride;
            const uint32_t firstRow = part / slices * split_.shrinkRows;
            const uint32_t lastRow = Least(firstRow + split_.shrinkRows, sizes_.tokens);
            AscendC::LocalTensor<T> weight = cube_.LoadWeight(aGm[begin], sizes_.rank, depth, sizes_.inFeatures);
            for (uint32_t row = firstRow; row < lastRow; row += kPrefillTileRows) {
                rows_.SetAll(Least(kPrefillTileRows, lastRow - row));
                cube_.Shrink({exchange_.partials[partial + uint64_t{row} * sizes_.rank], sizes_.rank},
                    {xGm[uint64_t{row} * sizes_.inFeatures + begin], sizes_.inFeatures}, weight, rows_, sizes_.rank,
                    depth);
            }
            cube_.FreeWeight(weight);
        }
    }

    __aicore__ inline void Expand(GM_ADDR y0, GM_ADDR b, GM_ADDR y)
    {
        AscendC::GlobalTensor<T> y0Gm, bGm, yGm;
        y0Gm.SetGlobalBuffer((__gm__ T*)y0);
        bGm.SetGlobalBuffer((__gm__ T*)b);
        yGm.SetGlobalBuffer((__gm__ T*)y);
        const uint32_t rank = sizes_.rank;
        const uint32_t out = sizes_.outFeatures;
        const uint32_t slices = split_.expandSlices;
        const uint32_t parts = Ceil(sizes_.tokens, split_.expandRows) * slices;
        const AscendC::LocalTensor<T> identity = cube_.LoadIdentity(exchange_.constant);
        for (uint32_t part = AscendC::GetBlockIdx(); part < parts; part += AscendC::GetBlockNum()) {
            const uint32_t begin = part % slices * split_.expandWidth;
            const uint32_t width = Least(split_.expandWidth, out - begin);
            const uint32_t firstRow = part / slices * split_.expandRows;
            const uint32_t lastRow = Least(firstRow + split_.expandRows, sizes_.tokens);
            AscendC::LocalTensor<T> weight = cube_.LoadWeight(bGm[uint64_t{begin} * rank], width, rank, rank);
            for (uint32_t row = firstRow; row < lastRow; row += kPrefillTileRows) {
                rows_.SetAll(Least(kPrefillTileRows, lastRow - row));
                const uint64_t at = uint64_t{row} * out + begin;
                cube_.Expand({yGm[at], out}, {y0Gm[at], out}, {exchange_.low[uint64_t{row} * rank], rank}, weight,
                    identity, rows_, rank, width);
            }
            cube_.FreeWeight(weight);
        }
    }

private:
    const LoraDeltaTiling& sizes_;
    const PrefillTiling& split_;
    const PrefillExchange<T>& exchange_;
    PrefillCube<T, false> cube_;
    TileRows rows_;
};

}  // namespace mindlora
