// What a vector core does between shrink and expand.
#pragma once

#include "ascendc_common/copy.h"
#include "ascendc_common/exchange.h"
#include "ascendc_common/prefill_exchange.h"
#include "ascendc_common/prefill_tiling.h"
#include "ascendc_common/share.h"

namespace mindlora {

template <typename T>
class PrefillVector {
public:
    __aicore__ inline PrefillVector(AscendC::TPipe& pipe, const PrefillTiling& split,
        const PrefillExchange<T>& exchange)
        : split_(split), exchange_(exchange)
    {
        pipe.InitBuffer(partials_, 2, split.shrinkSlices * split.reduceTile * sizeof(float));
        pipe.InitBuffer(low_, 2, split.reduceTile * sizeof(T));
        pipe.InitBuffer(constants_, 1, kConstantsSize * sizeof(T));
    }

    // This core's part of something that is dealt out in multiples of `unit`.
    __aicore__ inline static Range Mine(uint32_t count, uint32_t unit)
    {
        return Share(count, unit, AscendC::GetBlockNum() * AscendC::GetSubBlockNum(), AscendC::GetBlockIdx());
    }

    __aicore__ inline void WriteConstantsOnce()
    {
        if (AscendC::GetBlockIdx() == 0) {
            WriteConstants(constants_, exchange_);
        }
    }

    // low = the sum of the partials times scale, for the numbers [begin, end) of low.
    __aicore__ inline void Reduce(const Range& numbers, float scale)
    {
        for (uint32_t at = numbers.begin; at < numbers.end; at += split_.reduceTile) {
            ReduceTile(at, Least(split_.reduceTile, numbers.end - at), scale);
        }
    }

private:
    __aicore__ inline void ReduceTile(uint32_t at, uint32_t count, float scale)
    {
        AscendC::LocalTensor<float> partials = partials_.template AllocTensor<float>();
        CopyRowsIn(partials, exchange_.partials[at], split_.shrinkSlices, count, exchange_.stride);
        partials_.EnQue(partials);
        partials = partials_.template DeQue<float>();
        AddRowsUp(partials, split_.shrinkSlices, PitchOf<float>(count));
        AscendC::Muls(partials, partials, scale, static_cast<int32_t>(count));
        AscendC::LocalTensor<T> low = low_.template AllocTensor<T>();
        AscendC::Cast(low, partials, AscendC::RoundMode::CAST_RINT, count);
        partials_.FreeTensor(partials);
        low_.EnQue(low);
        low = low_.template DeQue<T>();
        CopyRowsOut(exchange_.low[at], low, 1, count, count);
        low_.FreeTensor(low);
    }

    const PrefillTiling& split_;
    const PrefillExchange<T>& exchange_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> partials_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> low_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> constants_;
};

}  // namespace mindlora
