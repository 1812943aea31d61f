// What a vector core does between shrink and expand.
#pragma once

#include "ascendc_common/partial_sums.h"
#include "ascendc_common/prefill_tiling.h"

namespace mindlora {

template <typename T>
class PrefillVector {
public:
    __aicore__ inline PrefillVector(
        AscendC::TPipe& pipe, const PrefillTiling& split, const PrefillExchange<T>& exchange)
        : exchange_(exchange), sums_(pipe, exchange, split.shrinkSlices, split.reduceTile)
    {
        pipe.InitBuffer(identity_, 1, kFractalSize * sizeof(T));
    }

    // This core's part of `count`, which is dealt out in multiples of `unit`.
    __aicore__ inline static Range Mine(uint32_t count, uint32_t unit)
    {
        return Share(count, unit, AscendC::GetBlockNum() * AscendC::GetSubBlockNum(), AscendC::GetBlockIdx());
    }

    __aicore__ inline void WriteIdentityOnce()
    {
        if (AscendC::GetBlockIdx() == 0) {
            WriteIdentity(identity_, exchange_);
        }
    }

    // As PartialSums::Reduce.
    __aicore__ inline void Reduce(const Range& numbers, float scale) { sums_.Reduce(numbers, scale); }

private:
    const PrefillExchange<T>& exchange_;
    PartialSums<T> sums_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> identity_;
};

}  // namespace mindlora
