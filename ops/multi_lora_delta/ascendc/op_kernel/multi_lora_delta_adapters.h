// Prefill: which rows of a window of tokens share an adapter. The scalar unit finds them from the indices alone, when
// they are needed, so rows need no order and no table has to fit anywhere.
#pragma once

#include "ascendc_common/tile_rows.h"
#include "multi_lora_delta_tiling.h"

namespace mindlora {

class Adapters {
public:
    static constexpr int32_t kNone = -1;        // y = y0
    static constexpr int32_t kNoSuchSlot = -2;  // the result is NaN

    __aicore__ inline Adapters(const MultiLoraDeltaTiling& sizes, GM_ADDR ranks, GM_ADDR indices) : sizes_(sizes)
    {
        ranks_.SetGlobalBuffer((__gm__ int32_t*)ranks, sizes.slots);
        indices_.SetGlobalBuffer((__gm__ int32_t*)indices, sizes.tokens);
    }

    __aicore__ inline int32_t SlotOf(uint32_t token) const
    {
        const int32_t index = indices_.GetValue(token);
        if (index < 0) {
            return kNone;
        }
        if (static_cast<uint32_t>(index) >= sizes_.slots || ranks_.GetValue(index) < 0 ||
            RankOf(index) > sizes_.maxRank) {
            return kNoSuchSlot;
        }
        return RankOf(index) == 0 ? kNone : index;
    }

    __aicore__ inline uint32_t RankOf(int32_t slot) const { return static_cast<uint32_t>(ranks_.GetValue(slot)); }

    // Takes the first of the `count` tokens from `token` on that is not done, and all that share its index. Returns
    // false if none is left.
    __aicore__ inline bool Next(uint32_t token, uint32_t count, uint64_t& done, TileRows& rows, int32_t& slot) const
    {
        uint32_t row = 0;
        while (row < count && (done >> row & 1) != 0) {
            ++row;
        }
        if (row == count) {
            return false;
        }
        const int32_t index = indices_.GetValue(token + row);
        slot = SlotOf(token + row);
        rows.SetNone();
        for (; row < count; ++row) {
            if ((done >> row & 1) == 0 && indices_.GetValue(token + row) == index) {
                rows.Add(row);
                done |= uint64_t{1} << row;
            }
        }
        return true;
    }

private:
    const MultiLoraDeltaTiling& sizes_;
    AscendC::GlobalTensor<int32_t> ranks_;
    AscendC::GlobalTensor<int32_t> indices_;
};

}  // namespace mindlora
